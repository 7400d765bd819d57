package trainer

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-go/tandem/checkpoint"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/models/gpt2mini"
	"github.com/tandem-go/tandem/models/gpt2mini/hf"
)

// checkpointDir is where checkpoints are, under Config.Out.
const checkpointDir = "checkpoint"

// checkpointer writes rank 0's state, which is everybody's, beside training: a
// step stalls while memory is copied, and a goroutine writes the copy. While it
// does, no other one begins: a checkpoint that is due waits for a later step.
type checkpointer struct {
	root    string
	every   int
	keep    int
	threads int
	model   gpt2mini.Config

	live, copies []tensor // parameters, then moments
	params       int      // how many of them are parameters

	owed    bool // due, but not yet taken
	best    *Best
	writing chan error // of the write under way; nil when there is none
}

// tensor is a named piece of memory.
type tensor struct {
	name  string
	shape []int
	data  []byte
}

// newCheckpointer finds what is to be saved and makes room for its copy, so that
// not even the first checkpoint waits for memory.
func newCheckpointer(r *run) (*checkpointer, error) {
	c := &checkpointer{
		root: filepath.Join(r.c.Out, checkpointDir), every: r.c.CheckpointEvery, keep: r.c.Keep,
		threads: r.g.Threads, model: r.model.Config,
	}
	shapes := r.model.Config.Params()
	for i, b := range r.ddp.ParamBuffers() {
		if err := c.add(shapes[i].Name, shapes[i].Shape, b); err != nil {
			return nil, err
		}
	}
	c.params = len(c.live)
	for _, s := range r.ddp.Optimizer().States() {
		p := shapes[s.Param]
		if err := c.add(momentName(p.Name, s.Name), p.Shape, s.Buffer); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// momentName is a moment's name in optimizer.safetensors.
func momentName(param, state string) string { return param + "." + state }

func (c *checkpointer) add(name string, shape []int, b device.Buffer) error {
	host, ok := b.HostBytes()
	if !ok {
		return fmt.Errorf("checkpoint: %q lies in memory that the host cannot address", name)
	}
	room := make([]byte, len(host))
	copy(room, host) // touches it
	c.live = append(c.live, tensor{name, shape, host})
	c.copies = append(c.copies, tensor{name, shape, room})
	return nil
}

// due says whether a checkpoint should follow this step: every so many steps, at
// the end, and where the validation loss is the lowest so far.
func (c *checkpointer) due(m *Metrics, last bool) bool {
	better := m.ValLoss != nil && (c.best == nil || *m.ValLoss < c.best.ValLoss)
	c.owed = c.owed || last || m.Step%c.every == 0 || better
	return c.owed
}

// idle reports whether the last write, if any, has ended, and its error. It does
// not wait.
func (c *checkpointer) idle() (bool, error) {
	if c.writing == nil {
		return true, nil
	}
	select {
	case err := <-c.writing:
		c.writing = nil
		return true, err
	default:
		return false, nil
	}
}

// wait waits for the write under way.
func (c *checkpointer) wait() error {
	if c.writing == nil {
		return nil
	}
	err := <-c.writing
	c.writing = nil
	return err
}

// snapshot copies parameters and moments, which must not change meanwhile, and
// returns how long that took. No write may be under way.
func (c *checkpointer) snapshot() time.Duration {
	start := time.Now()
	var next atomic.Int64
	var wg sync.WaitGroup
	for range c.threads {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(c.live); i = int(next.Add(1)) - 1 {
				copy(c.copies[i].data, c.live[i].data)
			}
		})
	}
	wg.Wait()
	return time.Since(start)
}

// start writes the snapshot in the background. s describes it; its Best is
// filled in.
func (c *checkpointer) start(s State) {
	if s.ValLoss != nil && (c.best == nil || *s.ValLoss < c.best.ValLoss) {
		c.best = &Best{s.Step, *s.ValLoss}
	}
	s.Best = c.best
	c.owed = false
	c.writing = make(chan error, 1)
	go func(done chan<- error) {
		if err := c.write(&s); err != nil {
			done <- fmt.Errorf("writing the checkpoint of step %d: %w", s.Step, err)
			return
		}
		done <- nil
	}(c.writing)
}

// write makes the directory of a checkpoint and removes old ones.
func (c *checkpointer) write(s *State) error {
	for _, t := range c.copies[:c.params] {
		if !allFinite(t.data) {
			return fmt.Errorf("parameter %q is not finite; the last whole checkpoint stays", t.name)
		}
	}
	if _, err := checkpoint.Save(c.root, s.Step, func(create func(string, func(io.Writer) error) error) error {
		return errors.Join(
			create(checkpoint.ModelFile, c.writeModel),
			create(checkpoint.OptimizerFile, c.writeMoments),
			create(hf.ConfigFile, c.writeConfig),
			create(checkpoint.StateFile, func(w io.Writer) error {
				e := json.NewEncoder(w)
				e.SetIndent("", "  ")
				return e.Encode(s)
			}))
	}); err != nil {
		return err
	}
	pinned := s.Step
	if s.Best != nil {
		pinned = s.Best.Step
	}
	return checkpoint.Prune(c.root, c.keep, pinned)
}

func (c *checkpointer) writeModel(w io.Writer) error {
	data := map[string][]byte{}
	for _, t := range c.copies[:c.params] {
		data[t.name] = t.data
	}
	return checkpoint.Write(w, hf.Tensors(c.model, func(name string) []byte { return data[name] }), hf.Metadata())
}

func (c *checkpointer) writeMoments(w io.Writer) error {
	var all []checkpoint.Tensor
	for _, t := range c.copies[c.params:] {
		all = append(all, checkpoint.Tensor{Name: t.name, Type: dtype.Float32, Shape: t.shape, Data: t.data})
	}
	return checkpoint.Write(w, all, nil)
}

func (c *checkpointer) writeConfig(w io.Writer) error {
	b, err := hf.Config(c.model)
	if err != nil {
		return err
	}
	_, err = w.Write(b)
	return err
}

// allFinite looks at float32 values: an exponent of ones is a NaN or an infinity.
func allFinite(b []byte) bool {
	const exponent = 0x7f80
	for i := 3; i < len(b); i += 4 {
		if (uint16(b[i])<<8|uint16(b[i-1]))&exponent == exponent {
			return false
		}
	}
	return true
}

// milliseconds is d as metrics have it.
func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
