package trainer

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/tandem-go/tandem/checkpoint"
	"github.com/tandem-go/tandem/comm"
	"github.com/tandem-go/tandem/data"
	"github.com/tandem-go/tandem/device"
	"github.com/tandem-go/tandem/dtype"
	"github.com/tandem-go/tandem/models/gpt2mini"
	"github.com/tandem-go/tandem/models/gpt2mini/hf"
)

// ResumeAuto is the Config.Resume that continues in Config.Out, or begins there.
const ResumeAuto = "auto"

// OutOf is the directory of the run that a checkpoint belongs to: path itself, or
// the one above its folder "checkpoint". "" means that the checkpoint lies
// elsewhere.
func OutOf(path string) string {
	c, err := checkpoint.Find(path)
	if err != nil || filepath.Base(filepath.Dir(c.Dir)) != checkpointDir {
		return ""
	}
	return filepath.Dir(filepath.Dir(c.Dir))
}

// origin is where parameters come from, if not from Init.
type origin struct {
	dir     string // of the checkpoint; "" for none
	state   State
	model   *hf.File         // parameters of a checkpoint or of InitFrom; may be nil
	moments *checkpoint.File // of a checkpoint
}

func (o *origin) close() error {
	var errs []error
	if o.model != nil {
		errs = append(errs, o.model.Close())
	}
	if o.moments != nil {
		errs = append(errs, o.moments.Close())
	}
	return errors.Join(errs...)
}

// CheckOrigin opens what Resume and InitFrom name and compares it with the
// configuration, so that a mistake is found before ranks are started.
func (c *Config) CheckOrigin(text *data.Source) error {
	o, err := c.openOrigin(text)
	if err != nil {
		return err
	}
	return o.close()
}

// openOrigin finds and checks the checkpoint or the file that training starts
// from. A checkpoint comes before InitFrom.
func (c *Config) openOrigin(text *data.Source) (*origin, error) {
	model := c.model(text.VocabSize(), 1)
	cp, err := c.find()
	if err != nil {
		return nil, err
	}
	if cp != nil {
		return c.openCheckpoint(*cp, model, data.VocabOf(text.Tokenizer))
	}
	o := &origin{}
	if c.InitFrom == "" {
		return o, nil
	}
	if o.model, err = hf.Open(c.InitFrom); err != nil {
		return nil, fmt.Errorf("--init-from: %w", err)
	}
	if err := o.model.Check(model); err != nil {
		return nil, errors.Join(fmt.Errorf("--init-from: %w", err), o.close())
	}
	return o, nil
}

// find is the checkpoint that Resume means, nil for a fresh start. Checkpoints in
// Out that the run would mix with its own are an error.
func (c *Config) find() (*checkpoint.Checkpoint, error) {
	var there []checkpoint.Checkpoint
	if c.Out != "" {
		var err error
		if there, err = checkpoint.List(filepath.Join(c.Out, checkpointDir)); err != nil {
			return nil, fmt.Errorf("--out: %w", err)
		}
	}
	path := c.Resume
	switch {
	case path == "" && len(there) > 0:
		return nil, fmt.Errorf("%s holds a run that has come to step %d; pass --resume auto to continue it, or another --out", c.Out, there[len(there)-1].Step)
	case path == "" || path == ResumeAuto && len(there) == 0:
		return nil, nil
	case path == ResumeAuto:
		path = c.Out
	}
	cp, err := checkpoint.Find(path)
	if err != nil {
		return nil, fmt.Errorf("--resume: %w", err)
	}
	if n := len(there); n > 0 && there[n-1].Step > cp.Step {
		return nil, fmt.Errorf("--resume: %s is later than %s; pass another --out to branch off, or remove it", there[n-1].Dir, cp.Dir)
	}
	return &cp, nil
}

func (c *Config) openCheckpoint(cp checkpoint.Checkpoint, model gpt2mini.Config, vocab data.Vocab) (*origin, error) {
	o := &origin{dir: cp.Dir}
	err := cp.State(&o.state)
	if err == nil {
		err = o.state.check(cp, modelState(model), vocab)
	}
	if err == nil {
		o.model, err = hf.Open(cp.Path(checkpoint.ModelFile))
	}
	if err == nil {
		err = o.model.Check(model)
	}
	if err == nil {
		o.moments, err = checkpoint.Open(cp.Path(checkpoint.OptimizerFile))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("--resume: %w", err), o.close())
	}
	return o, nil
}

// check names the first thing in which the run is not that of the checkpoint.
func (s *State) check(cp checkpoint.Checkpoint, model ModelState, vocab data.Vocab) error {
	if s.Version != stateVersion {
		return fmt.Errorf("%s has format %d, this program reads %d", cp.Path(checkpoint.StateFile), s.Version, stateVersion)
	}
	if s.Step != cp.Step || s.Updates < 0 {
		return fmt.Errorf("%s says step %d and %d updates, in the directory of step %d", cp.Path(checkpoint.StateFile), s.Step, s.Updates, cp.Step)
	}
	was := s.Model
	for _, v := range []struct {
		flag    string
		was, is int
	}{{"layers", was.Layers, model.Layers}, {"heads", was.Heads, model.Heads}, {"d-model", was.DModel, model.DModel}, {"block", was.Block, model.Block}} {
		if v.was != v.is {
			return fmt.Errorf("%s holds another model: --%s is %d there and %d here", cp.Dir, v.flag, v.was, v.is)
		}
	}
	if s.Vocab == vocab {
		return nil
	}
	if s.Vocab.Tokenizer != vocab.Tokenizer {
		return fmt.Errorf("%s holds another model: --tokenizer is %s there and %s here", cp.Dir, s.Vocab.Tokenizer, vocab.Tokenizer)
	}
	return fmt.Errorf("%s holds another model: its vocabulary of %d (wte.weight %v) is not the text's, of %d (wte.weight %v)",
		cp.Dir, s.Vocab.Size, []int{s.Vocab.Size, was.DModel}, vocab.Size, []int{vocab.Size, model.DModel})
}

// begin is where a run starts, as rank 0 tells everyone.
type begin struct {
	Refused string // rank 0's error
	Dir     string
	State   *State // of a checkpoint
}

// loadOrigin opens the origin on rank 0, reads its parameters into the model, and
// lets all ranks know. The returned origin is nil on the other ranks.
func (r *run) loadOrigin(ctx context.Context) (*origin, error) {
	var o *origin
	var b begin
	var err error
	if r.g.Rank == 0 {
		if o, err = r.readOrigin(); err != nil {
			b.Refused = err.Error()
		} else if o.dir != "" {
			b.Dir, b.State = o.dir, &o.state
		}
	}
	if terr := r.tell(ctx, &b); err == nil {
		err = terr
	}
	if err == nil && b.Refused != "" {
		err = fmt.Errorf("rank 0 refused: %s", b.Refused)
	}
	if err != nil {
		if o != nil {
			err = errors.Join(err, o.close())
		}
		return nil, err
	}
	r.from = b
	return o, nil
}

// readOrigin is loadOrigin's part of rank 0.
func (r *run) readOrigin() (*origin, error) {
	o, err := r.c.openOrigin(r.text)
	if err != nil || o.model == nil {
		return o, err
	}
	for i, p := range r.model.Config.Params() {
		values, ok := r.model.Params[i].Value().Data().([]float32)
		if !ok {
			return nil, errors.Join(fmt.Errorf("parameter %q is not float32", p.Name), o.close())
		}
		if err := o.model.Read(p.Name, values); err != nil {
			return nil, errors.Join(err, o.close())
		}
	}
	return o, nil
}

// tell gives every rank what b is on rank 0.
func (r *run) tell(ctx context.Context, b *begin) error {
	mine, err := json.Marshal(b)
	if err != nil {
		return err
	}
	var size [8]byte
	binary.NativeEndian.PutUint64(size[:], uint64(len(mine)))
	if err := r.broadcast(ctx, size[:], "length of the checkpoint's state"); err != nil {
		return err
	}
	if r.g.Rank != 0 {
		mine = make([]byte, binary.NativeEndian.Uint64(size[:]))
	}
	if err := r.broadcast(ctx, mine, "the checkpoint's state"); err != nil {
		return err
	}
	if r.g.Rank == 0 {
		return nil
	}
	return json.Unmarshal(mine, b)
}

// broadcast overwrites b with rank 0's.
func (r *run) broadcast(ctx context.Context, b []byte, what string) error {
	buf, err := r.g.Comm.Alloc(len(b))
	if err != nil {
		return err
	}
	host, ok := buf.HostBytes()
	if !ok {
		return fmt.Errorf("%s: the communicator's memory cannot be addressed by the host", what)
	}
	copy(host, b)
	s, err := r.stream()
	if err != nil {
		return err
	}
	if err := r.g.Comm.Broadcast(s, buf, dtype.Uint8, 0, comm.Tag{Name: what, Bucket: -1}); err != nil {
		return err
	}
	if err := s.Sync(ctx); err != nil {
		return err
	}
	copy(b, host)
	return nil
}

// stream is the one for the trainer's own collectives, made on first use.
func (r *run) stream() (device.Stream, error) {
	if r.own != nil {
		return r.own, nil
	}
	var err error
	r.own, err = r.g.Device.NewStream(device.Normal)
	return r.own, err
}

// restore gives all ranks the moments and the count of a checkpoint, once ddp is
// there, which has given them the parameters.
func (r *run) restore(ctx context.Context, o *origin) error {
	if r.from.State == nil {
		return nil
	}
	s, err := r.stream()
	if err != nil {
		return err
	}
	shapes := r.model.Config.Params()
	for _, m := range r.ddp.Optimizer().States() {
		p := shapes[m.Param]
		name := momentName(p.Name, m.Name)
		if o != nil {
			if err := readMoment(o.moments, name, p.Shape, m.Buffer); err != nil {
				err = fmt.Errorf("--resume: %s: %w", o.dir, err)
				r.g.Comm.Abort(err)
				return err
			}
		}
		if err := r.g.Comm.Broadcast(s, m.Buffer, dtype.Float32, 0, comm.Tag{Name: name, Bucket: -1}); err != nil {
			return err
		}
	}
	if err := s.Sync(ctx); err != nil {
		return err
	}
	return r.ddp.SetSteps(r.from.State.Step, r.from.State.Updates)
}

func readMoment(f *checkpoint.File, name string, shape []int, b device.Buffer) error {
	t, ok := f.Tensor(name)
	if !ok || t.Type != dtype.Float32 || !slices.Equal(t.Shape, shape) {
		return fmt.Errorf("%s lacks %q of float32 and shape %v", checkpoint.OptimizerFile, name, shape)
	}
	host, ok := b.HostBytes()
	if !ok {
		return fmt.Errorf("%q lies in memory that the host cannot address", name)
	}
	return f.Read(name, host)
}

// first is the step that the run starts with.
func (r *run) first() int {
	if r.from.State == nil {
		return 0
	}
	return r.from.State.Step
}

// keepMetrics drops lines after a step, and a torn one, from a file of metrics.
func keepMetrics(path string, step int) error {
	raw, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	kept := 0
	for at := 0; at < len(raw); {
		end := slices.Index(raw[at:], '\n')
		var m Metrics
		if end < 0 || json.Unmarshal(raw[at:at+end], &m) != nil || m.Step > step {
			break
		}
		at += end + 1
		kept = at
	}
	return os.Truncate(path, int64(kept))
}
