package trainer

import (
	"encoding/hex"
	"fmt"
	"slices"

	"github.com/tandem-go/tandem/bucket"
	"github.com/tandem-go/tandem/data"
	"github.com/tandem-go/tandem/models/gpt2mini"
)

// stateVersion is that of the file format below.
const stateVersion = 1

// State is a checkpoint's state.json: what a run needs, besides tensors, to go on
// where it was. Everything random is a pure function of the seed, the step and
// the sample, so Step is the position in the data and of all generators.
type State struct {
	Version int `json:"version"`
	// Step is the number of finished optimizer steps, and Updates what the
	// optimizer has counted.
	Step    int   `json:"step"`
	Updates int   `json:"optimizer_steps"`
	Seed    int64 `json:"seed"`
	// Loss is that of the last step, before its update; ValLoss that of the
	// checkpoint, if it was evaluated.
	Loss    float64  `json:"loss"`
	ValLoss *float64 `json:"val_loss,omitempty"`
	// Best is the checkpoint of the lowest validation loss so far.
	Best *Best `json:"best,omitempty"`

	Model  ModelState `json:"model"`
	Vocab  data.Vocab `json:"vocabulary"`
	Text   TextState  `json:"text"`
	Plan   CommPlan   `json:"comm_plan"`
	Config Config     `json:"config"`
}

// Best is a checkpoint and its validation loss.
type Best struct {
	Step    int     `json:"step"`
	ValLoss float64 `json:"val_loss"`
}

// ModelState is the size of the model.
type ModelState struct {
	Layers int `json:"layers"`
	Heads  int `json:"heads"`
	DModel int `json:"d_model"`
	Block  int `json:"block"`
	Vocab  int `json:"vocab_size"`
}

// TextState is what the run trains on.
type TextState struct {
	Path  string `json:"path"`
	Train int    `json:"train_tokens"`
	Val   int    `json:"val_tokens"`
}

// CommPlan is how ranks shared the work. A run that continues with the same plan
// continues with the same bits.
type CommPlan struct {
	Backend string `json:"backend"`
	// Transport is tandem.Group.Transport; "" is unknown.
	Transport string `json:"transport,omitempty"`
	Device    string `json:"device"` // rank 0's
	WorldSize int    `json:"world_size"`
	// Batch and GradAccum are windows a rank and micro-step, and micro-steps a step.
	Batch     int `json:"batch"`
	GradAccum int `json:"grad_accum"`
	// Caps are the bucket caps in bytes, Layout identifies what lies where.
	Caps   bucket.Caps `json:"bucket_caps"`
	Layout string      `json:"layout_sha256"`
}

func (p *CommPlan) globalBatch() int { return p.WorldSize * p.Batch * p.GradAccum }

// otherSums is whether transports differ and so add in another order, which two
// ranks can't do.
func (p *CommPlan) otherSums(q *CommPlan) bool {
	return p.WorldSize > 2 && p.Transport != "" && q.Transport != "" && p.Transport != q.Transport
}

func modelState(c gpt2mini.Config) ModelState {
	return ModelState{c.Layers, c.Heads, c.DModel, c.Block, c.Vocab}
}

// Config is the model, for one sequence at a time.
func (m ModelState) Config() gpt2mini.Config {
	return gpt2mini.Config{Layers: m.Layers, Heads: m.Heads, DModel: m.DModel, Block: m.Block, Vocab: m.Vocab}
}

// plan is this run's.
func (r *run) plan() CommPlan {
	hash := r.ddp.Layout().Hash()
	return CommPlan{
		Backend: r.g.Backend, Transport: r.g.Transport(), Device: r.g.Device.Name(), WorldSize: r.g.WorldSize,
		Batch: r.c.Batch, GradAccum: r.c.GradAccum, Caps: r.ddp.Caps(), Layout: hex.EncodeToString(hash[:]),
	}
}

func (r *run) textState() TextState {
	return TextState{r.c.Data, r.text.Train.Len(), r.text.Val.Len()}
}

// state is this run's after the step that m is about.
func (r *run) state(m *Metrics, best *Best) State {
	return State{
		Version: stateVersion, Step: m.Step, Updates: r.ddp.Optimizer().Steps(), Seed: r.c.Seed,
		Loss: m.Loss, ValLoss: m.ValLoss, Best: best,
		Model: modelState(r.model.Config), Vocab: data.VocabOf(r.text.Tokenizer), Text: r.textState(),
		Plan: r.plan(), Config: r.c,
	}
}

// notes says what is not as it was when the checkpoint was written.
func (r *run) notes(s *State) []string {
	var all []string
	note := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	then, now := s.Plan, r.plan()
	switch {
	case then.WorldSize != now.WorldSize:
		note("%d ranks then, %d now: the run agrees with an uninterrupted one within rounding, not bit for bit", then.WorldSize, now.WorldSize)
	case then.Layout != now.Layout || !slices.Equal(then.Caps.Cap, now.Caps.Cap):
		note("gradients lie in other buckets than then: the run agrees with an uninterrupted one within rounding, not bit for bit")
	case then.otherSums(&now):
		note("ranks shared gradients over %s then and %s now, which add in another order: the run agrees with an uninterrupted one within rounding, not bit for bit", then.Transport, now.Transport)
	}
	if a, b := then.globalBatch(), now.globalBatch(); a != b {
		note("the global batch was %d windows and is %d now, so training goes another way; --batch × --grad-accum × ranks makes it", a, b)
	}
	if was, is := s.Text, r.textState(); was.Train != is.Train || was.Val != is.Val {
		note("%s has %d + %d tokens, the text of the checkpoint (%s) had %d + %d", is.Path, is.Train, is.Val, was.Path, was.Train, was.Val)
	}
	old, c := &s.Config, &r.c
	for _, v := range []struct {
		flag    string
		was, is any
	}{
		{"seed", s.Seed, c.Seed}, {"steps", old.Steps, c.Steps}, {"lr", old.LR, c.LR}, {"min-lr", old.MinLR, c.MinLR}, {"warmup", old.Warmup, c.Warmup},
		{"weight-decay", old.WeightDecay, c.WeightDecay}, {"clip", old.Clip, c.Clip}, {"dropout", old.Dropout, c.Dropout},
	} {
		if v.was != v.is {
			note("--%s was %v and is %v now", v.flag, v.was, v.is)
		}
	}
	return all
}
