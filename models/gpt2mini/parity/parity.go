// Package parity reads reference runs of GPT-2 that PyTorch computed in
// float64 (../testdata/README.md), and measures how far a result is from them.
// It is for tests.
package parity

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/nlpodyssey/safetensors"

	"github.com/tandem-go/tandem/models/gpt2mini"
)

// Env names a glob of further files for Files.
const Env = "TANDEM_PARITY"

// Tensor is a tensor of a file, row major.
type Tensor struct {
	Shape []int
	Data  []float32
}

// File is a reference run.
type File struct {
	Path   string
	Config gpt2mini.Config // the whole batch; Seq is Block, no dropout
	Steps  int

	// Params are the values before the first step; Grads the gradients of
	// step 0's loss there; RankGrads the same for the first and the second half
	// of the batch, whose mean is Grads; After the parameters after the last step.
	Params, Grads, After map[string]Tensor
	RankGrads            [2]map[string]Tensor

	Losses []float64 // of each step, before its update
	Norms  []float64 // global gradient norm of each step, before clipping

	Tokens, Targets [][]int // of each step: Batch·Seq, sequence after sequence
}

// Files are the paths of the repository's references and of those that the
// environment variable Env names. It is an error if that matches nothing.
func Files() ([]string, error) {
	root, err := moduleRoot()
	if err != nil {
		return nil, err
	}
	files, err := filepath.Glob(filepath.Join(root, "models", "gpt2mini", "testdata", "*.safetensors"))
	if err != nil {
		return nil, fmt.Errorf("parity: %w", err)
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("parity: no references under %s", root)
	}
	glob := os.Getenv(Env)
	if glob == "" {
		return files, nil
	}
	more, err := filepath.Glob(glob)
	if err != nil {
		return nil, fmt.Errorf("parity: %s=%q: %w", Env, glob, err)
	}
	if len(more) == 0 {
		return nil, fmt.Errorf("parity: %s=%q matches no file; give an absolute path", Env, glob)
	}
	return append(files, more...), nil
}

// moduleRoot is the folder of go.mod above the working directory, which is the
// package's own in a test.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("parity: %w", err)
	}
	for d := dir; ; d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "go.mod")); err == nil {
			return d, nil
		}
		if d == filepath.Dir(d) {
			return "", fmt.Errorf("parity: no go.mod above %s", dir)
		}
	}
}

// Load reads a file. All sizes come from its metadata, and every tensor must
// have the shape that follows from them.
func Load(path string) (*File, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("parity: %w", err)
	}
	st, err := safetensors.Deserialize(raw)
	if err != nil {
		return nil, fmt.Errorf("parity: %s: %w", path, err)
	}
	_, meta, err := safetensors.ReadMetadata(raw)
	if err != nil {
		return nil, fmt.Errorf("parity: %s: %w", path, err)
	}
	r := &reader{path: path, st: st, meta: meta.Metadata()}
	f := &File{Path: path, Steps: r.size("steps")}
	f.Config = gpt2mini.Config{
		Vocab: r.size("vocab"), Block: r.size("block"), Layers: r.size("layers"),
		Heads: r.size("heads"), DModel: r.size("d"), Batch: r.size("batch"),
	}
	if r.err == nil {
		r.err = f.Config.Validate()
	}
	if r.err == nil {
		r.tensors(f)
	}
	if r.err != nil {
		return nil, r.err
	}
	return f, nil
}

func (r *reader) tensors(f *File) {
	c := f.Config
	f.Params, f.Grads, f.After = r.set("param/", c), r.set("grad/", c), r.set("after/", c)
	for k := range f.RankGrads {
		f.RankGrads[k] = r.set(fmt.Sprintf("rank%d/grad/", k), c)
	}
	f.Losses = decode(r, "losses", safetensors.F64, float64At, f.Steps)
	f.Norms = decode(r, "norms", safetensors.F64, float64At, f.Steps)
	f.Tokens, f.Targets = r.steps("tokens", f), r.steps("targets", f)
}

// reader keeps the first error.
type reader struct {
	path string
	st   safetensors.SafeTensors
	meta map[string]string
	err  error
}

func (r *reader) fail(format string, a ...any) {
	r.err = cmp.Or(r.err, fmt.Errorf("parity: "+r.path+": "+format, a...))
}

func (r *reader) size(key string) int {
	n, err := strconv.Atoi(r.meta[key])
	if err != nil || n < 1 {
		r.fail("metadata %s is %q, want a positive number", key, r.meta[key])
	}
	return n
}

func (r *reader) set(prefix string, c gpt2mini.Config) map[string]Tensor {
	set := map[string]Tensor{}
	for _, p := range c.Params() {
		set[p.Name] = Tensor{p.Shape, decode(r, prefix+p.Name, safetensors.F32, float32At, p.Shape...)}
	}
	return set
}

func (r *reader) steps(name string, f *File) [][]int {
	n := f.Config.Batch * f.Config.Seq
	flat := decode(r, name, safetensors.I32, int32At, f.Steps, f.Config.Batch, f.Config.Seq)
	var steps [][]int
	for len(flat) > 0 {
		steps, flat = append(steps, flat[:n:n]), flat[n:]
	}
	return steps
}

func float32At(b []byte) float32 { return math.Float32frombits(binary.LittleEndian.Uint32(b)) }
func float64At(b []byte) float64 { return math.Float64frombits(binary.LittleEndian.Uint64(b)) }
func int32At(b []byte) int       { return int(int32(binary.LittleEndian.Uint32(b))) }

func decode[E any](r *reader, name string, dt safetensors.DType, at func([]byte) E, shape ...int) []E {
	t, ok := r.st.Tensor(name)
	if !ok {
		r.fail("no tensor %q", name)
		return nil
	}
	if t.DType() != dt || fmt.Sprint(t.Shape()) != fmt.Sprint(shape) {
		r.fail("tensor %q is %v%v, want %v%v", name, t.DType(), t.Shape(), dt, shape)
		return nil
	}
	size := int(dt.Size())
	values := make([]E, len(t.Data())/size)
	for i := range values {
		values[i] = at(t.Data()[i*size:])
	}
	return values
}

// Difference is how far values are from a reference.
type Difference struct {
	Abs float64 // max|a−b|
	Rel float64 // max|a−b| / max|b|
}

// Compare measures values (of a parameter or its gradient) against want. The
// key third of c_attn.bias is left out: softmax doesn't see it, so its true
// gradient is zero and what is there is noise. A NaN, or a wrong length, is an
// infinite difference.
func Compare[F float32 | float64](name string, values []F, want Tensor) Difference {
	if len(values) != len(want.Data) {
		return Difference{math.Inf(1), math.Inf(1)}
	}
	var d Difference
	var most float64
	third := len(values) / 3
	for i, b := range want.Data {
		if strings.HasSuffix(name, "attn.c_attn.bias") && i >= third && i < 2*third {
			continue
		}
		diff := math.Abs(float64(values[i]) - float64(b))
		if math.IsNaN(diff) {
			diff = math.Inf(1)
		}
		d.Abs, most = max(d.Abs, diff), max(most, math.Abs(float64(b)))
	}
	if d.Abs > 0 {
		d.Rel = d.Abs / most
	}
	return d
}
