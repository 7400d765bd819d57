package trainer

import (
	"context"
	"fmt"

	"github.com/tandem-go/tandem/data"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/engine"
	"github.com/tandem-go/tandem/models/gpt2mini"
)

// explainRuns is how often Explain runs the plan; of each step the shortest time
// counts.
const explainRuns = 8

// Explain compiles the plan of a micro-step on dev, runs it a few times on the
// text's first windows and describes it: every kernel with shapes, memory, time
// and share of what the device can do (engine.Plan.Explain). It trains nothing,
// writes nothing and needs no other rank.
func Explain(ctx context.Context, dev device.Device, c Config) (string, error) {
	if err := c.Validate(); err != nil {
		return "", err
	}
	text, err := c.LoadText(ctx)
	if err != nil {
		return "", err
	}
	defer text.Close() // only read
	m, err := gpt2mini.New(c.model(text.VocabSize(), c.Batch))
	if err != nil {
		return "", err
	}
	if err := m.Init(uint64(c.Seed)); err != nil {
		return "", err
	}
	tokens, targets := make([]int, c.Batch*c.Block), make([]int, c.Batch*c.Block)
	sampler := data.Sampler{Tokens: text.Train, Block: c.Block, Seed: c.Seed}
	if err := sampler.Fill(tokens, targets, 0, 0); err != nil {
		return "", err
	}
	if err := m.SetDropoutKey(c.Seed, 0, 0); err != nil {
		return "", err
	}
	if err := m.SetBatch(tokens, targets); err != nil {
		return "", err
	}
	plan, err := engine.Compile(dev, m.Loss, m.Params, &engine.Options{Logger: c.Logger, Profile: true})
	if err != nil {
		return "", err
	}
	return profiled(ctx, dev, plan)
}

// profiled runs a plan and describes it.
func profiled(ctx context.Context, dev device.Device, plan *engine.Plan) (string, error) {
	s, err := dev.NewStream(device.Normal)
	if err != nil {
		return "", err
	}
	for range explainRuns {
		if err := plan.Run(s, nil); err != nil {
			return "", err
		}
		if err := s.Sync(ctx); err != nil {
			return "", err
		}
		if err := plan.TakeTimes(); err != nil {
			return "", err
		}
	}
	peak, err := engine.MeasurePeak(ctx, dev)
	if err != nil {
		return "", err
	}
	plan.SetPeak(peak)
	return fmt.Sprintf("%s, one micro-step\n%s", dev.Name(), plan.Explain()), nil
}
