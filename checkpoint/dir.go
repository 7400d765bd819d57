package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-go/tandem/internal/durable"
)

// The files of a checkpoint directory. Done comes last: without it the
// directory is not a checkpoint.
const (
	ModelFile     = "model.safetensors"
	OptimizerFile = "optimizer.safetensors"
	StateFile     = "state.json"
	doneFile      = "DONE"
	stepPrefix    = "step-"
)

// ErrNone says that a directory holds no complete checkpoint.
var ErrNone = errors.New("no complete checkpoint")

// Checkpoint is a complete checkpoint on disk.
type Checkpoint struct {
	Dir  string
	Step int
}

// Path is a file of the checkpoint.
func (c Checkpoint) Path(file string) string { return filepath.Join(c.Dir, file) }

// State reads state.json into v.
func (c Checkpoint) State(v any) error {
	raw, err := os.ReadFile(c.Path(StateFile))
	if err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return fmt.Errorf("checkpoint: %s: %w", c.Path(StateFile), err)
	}
	return nil
}

// List returns the complete checkpoints under root, oldest first. Incomplete
// ones, which a crash leaves behind, are passed over; a missing root has none.
func List(root string) ([]Checkpoint, error) {
	entries, err := os.ReadDir(root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("checkpoint: %w", err)
	}
	var cs []Checkpoint
	for _, e := range entries {
		step, ok := stepOf(e.Name())
		if !ok {
			continue
		}
		c := Checkpoint{filepath.Join(root, e.Name()), step}
		if _, err := os.Stat(c.Path(doneFile)); err == nil {
			cs = append(cs, c)
		}
	}
	slices.SortFunc(cs, func(a, b Checkpoint) int { return a.Step - b.Step })
	return cs, nil
}

// Find returns the checkpoint that path means: a checkpoint directory itself,
// or the latest in it or in its folder "checkpoint". ErrNone when there is none.
func Find(path string) (Checkpoint, error) {
	if _, err := os.Stat(path); err != nil {
		return Checkpoint{}, fmt.Errorf("%w: %w", ErrNone, err)
	}
	parent, err := List(filepath.Dir(path))
	if err != nil {
		return Checkpoint{}, err
	}
	for _, c := range parent {
		if filepath.Base(c.Dir) == filepath.Base(path) {
			return c, nil
		}
	}
	if strings.HasPrefix(filepath.Base(path), stepPrefix) {
		return Checkpoint{}, fmt.Errorf("%w: %s lacks its %s file: it was cut short while being written", ErrNone, path, doneFile)
	}
	for _, root := range []string{path, filepath.Join(path, "checkpoint")} {
		cs, err := List(root)
		if err != nil {
			return Checkpoint{}, err
		}
		if len(cs) > 0 {
			return cs[len(cs)-1], nil
		}
	}
	return Checkpoint{}, fmt.Errorf("%w in %s", ErrNone, path)
}

// Save writes a checkpoint under root: each file written aside, fsynced and
// renamed, DONE last. write gets a function that makes one file.
func Save(root string, step int, write func(create func(name string, content func(io.Writer) error) error) error) (Checkpoint, error) {
	c := Checkpoint{filepath.Join(root, fmt.Sprintf(stepPrefix+"%08d", step)), step}
	if err := os.MkdirAll(c.Dir, 0o755); err != nil {
		return c, fmt.Errorf("checkpoint: %w", err)
	}
	// A directory of the same step that is being replaced is no checkpoint meanwhile.
	if err := os.Remove(c.Path(doneFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return c, fmt.Errorf("checkpoint: %w", err)
	}
	create := func(name string, content func(io.Writer) error) error { return durable.Write(c.Path(name), content) }
	if err := write(create); err != nil {
		return c, err
	}
	if err := create(doneFile, func(io.Writer) error { return nil }); err != nil {
		return c, err
	}
	return c, durable.SyncDir(root)
}

// Prune removes all but the newest keep checkpoints under root, and those that
// pinned names; and what is left of incomplete ones, so nobody may be writing
// there. DONE goes first, so that a crash leaves no half checkpoint that looks
// whole.
func Prune(root string, keep int, pinned ...int) error {
	cs, err := List(root)
	if err != nil {
		return err
	}
	var stay []string
	for i, c := range cs {
		if i >= len(cs)-keep || slices.Contains(pinned, c.Step) {
			stay = append(stay, c.Dir)
		}
	}
	entries, err := os.ReadDir(root)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("checkpoint: %w", err)
	}
	for _, e := range entries {
		dir := filepath.Join(root, e.Name())
		if _, ok := stepOf(e.Name()); !ok || slices.Contains(stay, dir) {
			continue
		}
		err := os.Remove(filepath.Join(dir, doneFile))
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		if err = errors.Join(err, os.RemoveAll(dir)); err != nil {
			return fmt.Errorf("checkpoint: removing %s: %w", dir, err)
		}
	}
	return nil
}

// stepOf reads a directory's name.
func stepOf(name string) (int, bool) {
	digits, ok := strings.CutPrefix(name, stepPrefix)
	step, err := strconv.Atoi(digits)
	return step, ok && err == nil && step >= 0
}
