package ring

import (
	"context"
	"encoding/binary"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/cpu"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/rendezvous"
)

func TestSmoke(t *testing.T) {
	for _, P := range []int{1, 2, 3, 5} {
		for _, N := range []int{0, 1, 100, 100000, 300000} {
			dev, _ := cpu.New(&cpu.Options{Threads: 1})
			st := rendezvous.NewMem()
			var wg sync.WaitGroup
			for r := range P {
				wg.Add(1)
				go func() {
					defer wg.Done()
					c, err := New(context.Background(), Options{Rank: r, Size: P, Store: st, Device: dev, Timeout: 3 * time.Second})
					if err != nil {
						t.Error(err)
						return
					}
					defer c.Close()
					s, _ := dev.NewStream(device.High)
					b, _ := c.Alloc(4 * N)
					p, _ := b.HostBytes()
					for it := range 3 {
						for i := 0; i < N; i++ {
							binary.LittleEndian.PutUint32(p[4*i:], math.Float32bits(float32(i%1000*(c.Rank()+1))))
						}
						if err := c.AllReduce(s, b, b, dtype.Float32, comm.Sum, comm.Tag{Name: "x", Bucket: 1}); err != nil {
							t.Error(err)
						}
						if err := s.Sync(context.Background()); err != nil {
							t.Error(err)
							return
						}
						for i := 0; i < N; i++ {
							if v := math.Float32frombits(binary.LittleEndian.Uint32(p[4*i:])); v != float32(i%1000*P*(P+1)/2) {
								t.Error(it, i, v)
								break
							}
						}
					}
					if err := c.Barrier(context.Background()); err != nil {
						t.Error(err)
					}
				}()
			}
			wg.Wait()
			dev.Close()
		}
	}
}
