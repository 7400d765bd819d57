package ddp

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/engine"
)

// splitGradient is the gradient of a tied embedding in two parts. The dense one,
// the head's, is among the first to be final and travels in its bucket, hidden
// by the backward pass. The lookup's is the very last, but has no more rows than
// the batch has tokens: they are gathered behind all buckets, and every rank
// adds them in the order of ranks and positions, so all get the same bits.
type splitGradient struct {
	engine.Split
	tokens, rows       device.Buffer // this rank's
	allTokens, allRows device.Buffer // of all ranks, one after another
	scale, add, zero   launch
	factor             []byte // what scale multiplies by
}

// wantsSplit says whether the two parts of a gradient move fewer bytes when
// nothing is left to hide them: rows of all ranks against a whole all-reduce.
// Ranks must come to one answer, so it is no where batches may differ.
func (d *DDP) wantsSplit(s engine.Split, table device.Tensor) bool {
	p := d.Size()
	if d.opts.WholeEmbeddings || d.opts.Weighted || p == 1 || table.Type != dtype.Float32 {
		return false
	}
	rows := (s.Rows.Bytes() + s.Tokens.Bytes()) * (p - 1)
	whole := 2 * (p - 1) * table.Bytes() / p
	return rows < whole
}

// splitRule is what the engine is told of it: graphs that lack parameters
// account for whole gradients.
func (d *DDP) splitRule() func(engine.Split, device.Tensor) bool {
	if len(d.opts.Graphs) > 0 || d.opts.FindUnused {
		return nil
	}
	return d.wantsSplit
}

// describeSplits is what must agree between ranks about them.
func (d *DDP) describeSplits() string {
	s := ""
	for _, x := range d.plan.Splits() {
		s += fmt.Sprintf("%d rows of %q; ", x.Tokens.Elems(), d.paramName(x.Param))
	}
	return s
}

// prepareSplits allocates and compiles what the second parts need.
func (d *DDP) prepareSplits() error {
	for i, s := range d.plan.Splits() {
		x, err := d.newSplit(s)
		if err != nil {
			return fmt.Errorf("the rows of the gradient of %q: %w", d.paramName(s.Param), err)
		}
		if err := d.plan.BindSplit(i, x.tokens, x.rows); err != nil {
			return err
		}
		d.splits = append(d.splits, x)
	}
	return nil
}

func (d *DDP) newSplit(s engine.Split) (*splitGradient, error) {
	x := &splitGradient{Split: s}
	for _, a := range []struct {
		b *device.Buffer
		n int
	}{{&x.tokens, s.Tokens.Bytes()}, {&x.rows, s.Rows.Bytes()},
		{&x.allTokens, s.Tokens.Bytes() * d.Size()}, {&x.allRows, s.Rows.Bytes() * d.Size()}} {
		var err error
		if *a.b, err = d.comm.Alloc(a.n); err != nil {
			return nil, err
		}
	}
	factor, host, err := hostMemory(d.comm, 4)
	if err != nil {
		return nil, err
	}
	x.factor = host
	all := func(t device.Tensor) device.Tensor {
		shape := append([]int(nil), t.Shape...)
		shape[0] *= d.Size()
		return device.Tensor{Shape: shape, Type: t.Type}
	}
	flat := device.Tensor{Shape: []int{s.Rows.Elems()}, Type: s.Rows.Type}
	param := device.Tensor{Shape: d.layout.Params[s.Param].Shape, Type: s.Rows.Type}
	for _, k := range []struct {
		l    *launch
		op   device.Op
		args []device.Buffer
	}{
		{&x.scale, device.Op{Kind: device.Scale, In: []device.Tensor{flat, {Shape: []int{1}, Type: dtype.Float32}}, Out: []device.Tensor{flat}},
			[]device.Buffer{x.rows, factor, x.rows}},
		{&x.zero, device.Op{Kind: device.Fill, Out: []device.Tensor{flat}}, []device.Buffer{x.rows}},
		{&x.add, device.Op{Kind: device.EmbeddingGradToken, Attr: device.Attr{Accumulate: true},
			In: []device.Tensor{all(s.Tokens), all(s.Rows)}, Out: []device.Tensor{param}},
			[]device.Buffer{x.allTokens, x.allRows, d.gradBufs[s.Param]}},
	} {
		if k.l.kernel, err = d.dev.Compile(k.op); err != nil {
			return nil, err
		}
		k.l.args = k.args
	}
	return x, nil
}

// lateBuckets are those that the rows complete, nil without any.
func (d *DDP) lateBuckets() []bool {
	if len(d.splits) == 0 {
		return nil
	}
	late := make([]bool, len(d.layout.Buckets))
	for _, x := range d.splits {
		late[d.layout.Slots[x.Param].Bucket] = true
	}
	return late
}

// gatherRows is the tail of a step: the second parts, behind all buckets.
func (d *DDP) gatherRows(s device.Stream) error {
	for _, x := range d.splits {
		binary.NativeEndian.PutUint32(x.factor, math.Float32bits(float32(d.scale)))
		if err := s.Launch(x.scale.kernel, x.scale.args); err != nil {
			return err
		}
		tag := comm.Tag{Name: "embedding rows", Bucket: d.layout.Slots[x.Param].Bucket}
		if err := d.meter.AllGather(s, x.allTokens, x.tokens, x.Tokens.Type, tag); err != nil {
			return err
		}
		if err := d.meter.AllGather(s, x.allRows, x.rows, x.Rows.Type, tag); err != nil {
			return err
		}
		if err := s.Launch(x.add.kernel, x.add.args); err != nil {
			return err
		}
	}
	return nil
}

// zeroRows is the second part of a rank without data. The tokens are those of
// an earlier step, or zero: in range in any case.
func (d *DDP) zeroRows() error {
	for _, x := range d.splits {
		if err := d.red.Compute().Launch(x.zero.kernel, x.zero.args); err != nil {
			return err
		}
	}
	return d.red.Rows()
}
