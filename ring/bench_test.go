package ring

import (
	"context"
	"fmt"
	"testing"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/rendezvous"
)

var benchBytes = []int{4 << 10, 64 << 10, 1 << 20, 25 << 20, 100 << 20}

// BenchmarkAllReduce is two ranks in two processes, over loopback and over
// shared memory, this process being rank 0.
func BenchmarkAllReduce(b *testing.B) {
	for k := range 2 * len(benchBytes) {
		bytes, transport := benchBytes[k/2], []string{TransportTCP, TransportShm}[k%2]
		b.Run(fmt.Sprintf("%s %d", transport, bytes), func(b *testing.B) {
			dev, err := cpu.New(&cpu.Options{Threads: 1})
			if err != nil {
				b.Fatal(err)
			}
			defer dev.Close()
			_, addr := startProcesses(b, job{Size: 2, Elems: bytes / 4, Transport: transport}, 1)
			st, err := rendezvous.Dial(context.Background(), rendezvous.ClientOptions{Addr: addr})
			if err != nil {
				b.Fatal(err)
			}
			defer st.Close()
			c, err := New(context.Background(), Options{Size: 2, Store: st, Device: dev, Transport: transport})
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			loop(b, dev, c, bytes)
		})
	}
}

// BenchmarkAllReduceGoroutines is two ranks in one process, which share its
// threads: real ranks differ.
func BenchmarkAllReduceGoroutines(b *testing.B) {
	for _, bytes := range benchBytes[:4] {
		b.Run(fmt.Sprint(bytes), func(b *testing.B) {
			dev, err := cpu.New(&cpu.Options{Threads: 1})
			if err != nil {
				b.Fatal(err)
			}
			defer dev.Close()
			all := start(b, 2, Options{Device: dev})
			done := make(chan struct{})
			go func() {
				defer close(done)
				run(dev, all[1], bytes, func() bool { return true })
			}()
			loop(b, dev, all[0], bytes)
			_ = all[0].Close()
			<-done
			_ = all[1].Close()
		})
	}
}

// run repeats allreduces while more says so and all is well.
func run(dev device.Device, c comm.Communicator, bytes int, more func() bool) error {
	s, err := dev.NewStream(device.High)
	if err != nil {
		return err
	}
	buf, err := c.Alloc(bytes)
	if err != nil {
		return err
	}
	for k := 0; more(); k++ {
		if err := c.AllReduce(s, buf, buf, dtype.Float32, comm.Sum, comm.Tag{Name: "bucket", Bucket: k % 7}); err != nil {
			return err
		}
		if err := s.Sync(context.Background()); err != nil {
			return err
		}
	}
	return nil
}

func loop(b *testing.B, dev device.Device, c comm.Communicator, bytes int) {
	b.SetBytes(int64(bytes))
	if err := run(dev, c, bytes, b.Loop); err != nil {
		b.Fatal(err)
	}
}
