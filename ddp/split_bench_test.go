package ddp

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/models/gpt2mini"
	"github.com/tandem-go/tandem/optim"
)

// link is a communicator whose collectives take the time that a link of so many
// bytes a second would need for what a rank has to send.
type link struct {
	comm.Communicator
	rate float64
}

func (l *link) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	c, err := l.Communicator.Split(ctx, color, key)
	return &link{c, l.rate}, err
}

func (l *link) wait(s device.Stream, bytes int) error {
	d := time.Duration(float64(bytes) / l.rate * float64(time.Second))
	return s.HostFunc(func() error { time.Sleep(d); return nil })
}

func (l *link) AllReduce(s device.Stream, dst, src device.Buffer, t dtype.Type, op comm.Op, tag comm.Tag) error {
	err := l.wait(s, 2*src.Len()*(l.Size()-1)/l.Size())
	return errors.Join(err, l.Communicator.AllReduce(s, dst, src, t, op, tag))
}

func (l *link) AllGather(s device.Stream, dst, src device.Buffer, t dtype.Type, tag comm.Tag) error {
	err := l.wait(s, src.Len()*(l.Size()-1))
	return errors.Join(err, l.Communicator.AllGather(s, dst, src, t, tag))
}

// BenchmarkTiedEmbedding is a step of 2 ranks over a link of 1 Gbit/s of a model
// whose tied embedding is most of it, with its gradient whole and in two parts.
// exposed-ms is the communication that nothing hides.
func BenchmarkTiedEmbedding(b *testing.B) {
	for _, whole := range []bool{true, false} {
		b.Run(fmt.Sprintf("whole=%v", whole), func(b *testing.B) {
			o := Options{Optimizer: optim.SGD{}, WholeEmbeddings: whole}
			g := group{ranks: 2, opts: o, wrap: func(_ int, c comm.Communicator) comm.Communicator { return &link{c, 125e6} }}
			var exposed, all time.Duration
			g.must(b, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
				m, err := gpt2mini.New(gpt2mini.Config{Vocab: 4096, Block: 64, Seq: 64, Layers: 4, Heads: 4, DModel: 128, Batch: 2})
				if err = errors.Join(err, m.Init(1)); err != nil {
					return err
				}
				d, err := New(ctx, c, m.Loss, m.Params, o)
				if err != nil {
					return err
				}
				defer d.Close()
				x := make([]int, 128)
				for i := range x {
					x[i] = i * 31 % 4096
				}
				for !d.Stopped() {
					if rank == 0 && !b.Loop() {
						d.RequestStop()
					}
					if err := errors.Join(m.SetBatch(x, x), d.Step(ctx), d.Sync(ctx)); err != nil {
						return err
					}
					if rank == 0 {
						exposed, all = exposed+d.Stats().Times.Exposed, all+d.Stats().Times.Comm
					}
				}
				return nil
			})
			b.ReportMetric(float64(exposed.Microseconds())/1e3/float64(b.N), "exposed-ms")
			b.ReportMetric(float64(all.Microseconds())/1e3/float64(b.N), "comm-ms")
		})
	}
}
