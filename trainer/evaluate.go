package trainer

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/data"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/engine"
	"github.com/tandem-go/tandem/models/gpt2mini"
)

// forward is the model without gradients, for another batch than training's.
// It reads the parameters where training keeps them, so it runs after Sync.
type forward struct {
	model  *gpt2mini.Model
	plan   *engine.Plan
	stream device.Stream
}

func newForward(r *run, batch int) (*forward, error) {
	m, err := r.model.Reshaped(batch, r.c.Block)
	if err != nil {
		return nil, err
	}
	plan, err := engine.Compile(r.g.Device, m.Loss, m.Params, &engine.Options{ForwardOnly: true, Logger: r.c.Logger})
	if err != nil {
		return nil, err
	}
	if err := plan.BindParams(r.ddp.ParamBuffers()); err != nil {
		return nil, err
	}
	s, err := r.g.Device.NewStream(device.Normal)
	return &forward{m, plan, s}, err
}

// run computes one batch and binds the root's value.
func (f *forward) run(ctx context.Context, tokens, targets []int) error {
	if err := f.model.SetBatch(tokens, targets); err != nil {
		return err
	}
	if err := f.plan.Run(f.stream, nil); err != nil {
		return err
	}
	if err := f.stream.Sync(ctx); err != nil {
		return err
	}
	return f.plan.BindOutputs()
}

// evaluator computes the loss on the whole validation part, each rank a
// contiguous share of its windows.
type evaluator struct {
	*forward
	part     data.Seq
	block    int
	from, to int // windows of this rank
	tokens   []int
	targets  []int
	comm     comm.Communicator
	sums     device.Buffer // loss·windows and windows, float64
}

func newEvaluator(r *run) (*evaluator, error) {
	f, err := newForward(r, r.c.Batch)
	if err != nil {
		return nil, fmt.Errorf("compiling the evaluation: %w", err)
	}
	total := data.Windows(r.text.Val, r.c.Block)
	n := r.c.Batch * r.c.Block
	e := &evaluator{
		forward: f, part: r.text.Val, block: r.c.Block, comm: r.g.Comm,
		from: total * r.g.Rank / r.g.WorldSize, to: total * (r.g.Rank + 1) / r.g.WorldSize,
		tokens: make([]int, n), targets: make([]int, n),
	}
	e.sums, err = r.g.Comm.Alloc(16)
	return e, err
}

// run returns the mean loss over all windows, the same on every rank.
func (e *evaluator) run(ctx context.Context) (float64, error) {
	batch := len(e.tokens) / e.block
	var sum float64
	for at := e.from; at < e.to; at += batch {
		n := min(batch, e.to-at)
		if _, err := data.FillWindows(e.tokens, e.targets, e.part, e.block, at, e.to); err != nil {
			return 0, err
		}
		if err := e.forward.run(ctx, e.tokens, e.targets); err != nil {
			return 0, err
		}
		sum += float64(n) * scalar(e.model.Loss.Value().Data())
	}
	host, ok := e.sums.HostBytes()
	if !ok {
		return 0, fmt.Errorf("evaluation needs memory that the host can address")
	}
	binary.NativeEndian.PutUint64(host, math.Float64bits(sum))
	binary.NativeEndian.PutUint64(host[8:], math.Float64bits(float64(e.to-e.from)))
	if err := e.comm.AllReduce(e.stream, e.sums, e.sums, dtype.Float64, comm.Sum, comm.Tag{Name: "validation loss", Bucket: -1}); err != nil {
		return 0, err
	}
	if err := e.stream.Sync(ctx); err != nil {
		return 0, err
	}
	get := func(i int) float64 { return math.Float64frombits(binary.NativeEndian.Uint64(host[8*i:])) }
	return get(0) / get(1), nil
}

func scalar(v any) float64 {
	switch x := v.(type) {
	case float32:
		return float64(x)
	case []float32:
		return float64(x[0])
	}
	return math.NaN()
}
