package ddp

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/optim"
	"github.com/tandem-go/tandem/overlap"
)

// disturb adds a little to one element of the parameter called name.
func disturb(d *DDP, name string, element int) {
	for p, param := range d.Layout().Params {
		if b, ok := d.ParamBuffers()[p].HostBytes(); ok && param.Name == name {
			v := math.Float32frombits(binary.NativeEndian.Uint32(b[4*element:]))
			binary.NativeEndian.PutUint32(b[4*element:], math.Float32bits(v+1e-3))
		}
	}
}

// Without it ranks could train different models for ever: the first check after
// the difference names the parameter and the ranks, everywhere alike, and finds
// none as long as there is none.
func TestCheckParamsFindsTheDifference(t *testing.T) {
	for name, g := range map[string]group{
		"external":  {ranks: 4, opts: Options{CheckParams: 3}},
		"built in":  {ranks: 4, opts: Options{CheckParams: 3, Optimizer: optim.AdamW{}}},
		"TCP":       {ranks: 3, ring: true, opts: Options{CheckParams: 3, Optimizer: optim.SGD{}, MaxNorm: 1}},
		"two ranks": {ranks: 2, opts: Options{CheckParams: 3}},
	} {
		t.Run(name, func(t *testing.T) {
			errs := g.run(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
				m, d, err := setup(ctx, c, o)
				if err != nil {
					return err
				}
				defer d.Close()
				after := func() error { return nil }
				if o.Optimizer == nil {
					after = vanilla(d)
				}
				for s := range 20 {
					if s == 7 {
						require.NoError(t, d.Sync(ctx))
						if rank == 1 {
							disturb(d, "s", 0)
							disturb(d, "w2", 5)
						}
					}
					if err := errors.Join(m.feed(s, rank*batch), d.Step(ctx)); err != nil {
						return err
					}
					if err := after(); err != nil {
						return err
					}
				}
				return nil
			})
			for rank, err := range errs {
				var differ *ParamsDifferError
				require.ErrorAs(t, err, &differ, "rank %d", rank)
				require.Equal(t, ParamsDifferError{Step: 9, Param: "w2", Ranks: []int{1}}, *differ)
				require.ErrorContains(t, err, `after step 9: parameter "w2" is not the same on all ranks: it differs on [1]`)
			}
		})
	}
}

// Without it a check would cry wolf: over ranks that ended early, whose solver
// misses updates until Join ends, and after steps that exchanged nothing.
func TestCheckParamsKnowsRightfulDifferences(t *testing.T) {
	for _, o := range []Options{{CheckParams: 1}, {CheckParams: 1, Optimizer: optim.SGD{}}} {
		group{ranks: 3, opts: o}.must(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
			m, d, err := setup(ctx, c, o)
			if err != nil {
				return err
			}
			defer d.Close()
			apply := func() error { return nil }
			if o.Optimizer == nil {
				apply = vanilla(d)
			}
			s := 0
			err = d.Join(ctx, func() (bool, error) {
				if s > 0 {
					if err := apply(); err != nil {
						return false, err
					}
				}
				s++
				return s <= 2+3*rank, m.feed(s, rank*batch)
			})
			if err != nil {
				return err
			}
			if err := errors.Join(m.feed(s, rank*batch), d.Step(ctx)); err != nil {
				return err
			}
			d.SetSchedule(overlap.NoComm)
			for range 2 {
				if err := errors.Join(m.feed(s, rank*batch), d.Step(ctx), apply()); err != nil {
					return err
				}
			}
			d.SetSchedule(overlap.Normal)
			return errors.Join(m.feed(s, rank*batch), d.Step(ctx))
		})
	}
}

// Without it a backend without headers would add up unlike things, or hang,
// where ranks call different collectives.
func TestFingerprintsNameTheDifference(t *testing.T) {
	for want, call := range map[string]func(c comm.Communicator, s device.Stream, b device.Buffer, rank int) error{
		"allreduce avg of 16 float32, root 0 (seq 0, bucket 3), rank 2 calls allreduce avg of 8 float32, root 0 (seq 0, bucket 3)": func(c comm.Communicator, s device.Stream, b device.Buffer, rank int) error {
			b = b.Slice(0, 64-32*(rank/2))
			return c.AllReduce(s, b, b, dtype.Float32, comm.Avg, comm.Tag{Name: "bucket", Bucket: 3})
		},
		"reduce-scatter sum of 4 float32, root 0 (seq 0, x -1), rank 2 calls broadcast sum of 16 int32, root 1 (seq 0, x -1)": func(c comm.Communicator, s device.Stream, b device.Buffer, rank int) error {
			tag := comm.Tag{Name: "x", Bucket: -1}
			if rank == 2 {
				return c.Broadcast(s, b, dtype.Int32, 1, tag)
			}
			return c.ReduceScatter(s, b.Slice(0, 16), b.Slice(0, 48), dtype.Float32, comm.Sum, tag)
		},
		"all-gather sum of 4 float32, root 0 (seq 0, a -1), rank 2 calls all-gather sum of 4 float32, root 0 (seq 0, b -1)": func(c comm.Communicator, s device.Stream, b device.Buffer, rank int) error {
			return c.AllGather(s, b.Slice(0, 48), b.Slice(0, 16), dtype.Float32, comm.Tag{Name: "aab"[rank : rank+1], Bucket: -1})
		},
	} {
		errs := group{ranks: 3}.run(t, func(ctx context.Context, rank int, c comm.Communicator, o *Options) error {
			f, err := newFingerprinted(c, func() context.Context { return ctx })
			if err != nil {
				return err
			}
			b, err := c.Alloc(64)
			if err != nil {
				return err
			}
			s, err := o.Device.NewStream(device.High)
			if err != nil {
				return err
			}
			return call(f, s, b, rank)
		})
		for rank, err := range errs {
			require.ErrorIs(t, err, comm.ErrMismatch, "rank %d", rank)
			require.ErrorContains(t, err, want)
		}
	}
}

// Without it the debug level could change what it watches.
func TestFingerprintsChangeNoBit(t *testing.T) {
	for _, ring := range []bool{false, true} {
		o := Options{Optimizer: optim.AdamW{}, MaxNorm: 1}
		want := group{ranks: 3, ring: ring, opts: o}.train(t, 3, nil)
		o.Fingerprint = true
		require.Equal(t, want, group{ranks: 3, ring: ring, opts: o}.train(t, 3, nil))
	}
}
