// Package infer generates text with GPT-2, one token at a time. Keys and values
// of earlier positions are kept, so that a token costs one pass over the weights
// instead of one over the whole text before it.
package infer

import (
	"errors"
	"fmt"
	"sync"

	"github.com/tandem-go/tandem/internal/simd"
	"github.com/tandem-go/tandem/models/gpt2mini"
)

// Options of New. nil or the zero value means the defaults.
type Options struct {
	// Threads compute at the same time. 0 means 1.
	Threads int
	// Portable uses the kernels in plain Go, whatever the machine has.
	Portable bool
}

// layer is the weights of a transformer block. Matrices are (in, out).
type layer struct {
	norm1, norm2           norm
	attn, proj, grow, back linear
	keys                   []float32 // (d, block): each feature's keys lie side by side
	values                 []float32 // (block, d)
}

type norm struct{ gamma, beta []float32 }

type linear struct{ weight, bias []float32 }

// Decoder predicts the token that follows a text. It is used by one goroutine.
type Decoder struct {
	c       gpt2mini.Config
	k       *simd.Kernels
	threads int
	ws      []*simd.Workspace // of each thread

	tokens, positions, head []float32
	layers                  []layer
	last                    norm

	window []int32 // what the cache holds, then what is being fed
	cached int
	scratch
	logits []float32
}

// scratch holds activations of the rows that are being fed.
type scratch struct {
	x, y, qkv, hidden []float32 // rows of d, d, 3d and 4d
	mean, rstd        []float32
	lse               []float32   // heads·rows
	scores            [][]float32 // block elements of each thread
}

// New makes a decoder for the model of configuration c, whose Vocab, Block,
// Layers, Heads, DModel and Untied count. param gives each parameter's values by
// its name (gpt2mini.Config.Params); they are used where they are, so they must
// not change while the decoder's cache is in use (see Reset).
func New(c gpt2mini.Config, param func(name string) ([]float32, error), o *Options) (*Decoder, error) {
	var opts Options
	if o != nil {
		opts = *o
	}
	if opts.Threads < 0 {
		return nil, fmt.Errorf("infer: threads %d, want at least 1, or 0 for one", opts.Threads)
	}
	c.Batch, c.Seq, c.Dropout = 1, 0, 0
	if err := c.Validate(); err != nil {
		return nil, err
	}
	isa := simd.Best()
	if opts.Portable {
		isa = simd.Portable
	}
	k, err := simd.For(isa)
	if err != nil {
		return nil, err
	}
	d := &Decoder{c: c, k: k, threads: max(1, opts.Threads), logits: make([]float32, c.Vocab)}
	for range d.threads {
		d.ws = append(d.ws, k.NewWorkspace())
		d.scores = append(d.scores, make([]float32, c.Block))
	}
	return d, d.load(param)
}

// load finds the weights.
func (d *Decoder) load(param func(name string) ([]float32, error)) error {
	values := map[string][]float32{}
	for _, p := range d.c.Params() {
		v, err := param(p.Name)
		if err != nil {
			return fmt.Errorf("infer: parameter %q: %w", p.Name, err)
		}
		want := 1
		for _, n := range p.Shape {
			want *= n
		}
		if len(v) != want {
			return fmt.Errorf("infer: parameter %q of shape %v has %d values", p.Name, p.Shape, len(v))
		}
		values[p.Name] = v
	}
	pair := func(name string) (w, b []float32) { return values[name+".weight"], values[name+".bias"] }
	d.tokens, d.positions = values["wte.weight"], values["wpe.weight"]
	d.head = d.tokens
	if d.c.Untied {
		d.head = values["lm_head.weight"]
	}
	d.last.gamma, d.last.beta = pair("ln_f")
	d.layers = make([]layer, d.c.Layers)
	for i := range d.layers {
		l, h := &d.layers[i], fmt.Sprintf("h.%d.", i)
		l.norm1.gamma, l.norm1.beta = pair(h + "ln_1")
		l.norm2.gamma, l.norm2.beta = pair(h + "ln_2")
		for name, dst := range map[string]*linear{"attn.c_attn": &l.attn, "attn.c_proj": &l.proj, "mlp.c_fc": &l.grow, "mlp.c_proj": &l.back} {
			dst.weight, dst.bias = pair(h + name)
		}
		l.keys, l.values = make([]float32, d.c.DModel*d.c.Block), make([]float32, d.c.DModel*d.c.Block)
	}
	return nil
}

// Reset forgets what was fed. It must follow a change of the parameters.
func (d *Decoder) Reset() { d.window, d.cached = d.window[:0], 0 }

// kept is how many tokens stay when the block is full.
func (d *Decoder) kept() int { return max(1, d.c.Block-max(1, d.c.Block/4)) }

// Feed appends tokens to the text and returns the logits of the token that
// follows, Vocab of them, in memory that the next call reuses.
//
// The model knows Block positions. When the text outgrows them, the window
// slides: its last three quarters of a block are computed anew from position 0,
// and the text before them is forgotten. So once in a quarter of a block a token
// costs as much as a prompt of that length.
func (d *Decoder) Feed(tokens ...int32) ([]float32, error) {
	if len(tokens) == 0 {
		return nil, errors.New("infer: nothing to feed; a text begins with at least one token")
	}
	for i, t := range tokens {
		if t < 0 || int(t) >= d.c.Vocab {
			return nil, fmt.Errorf("infer: token %d is %d, outside [0, %d)", i, t, d.c.Vocab)
		}
	}
	d.window = append(d.window, tokens...)
	if n := len(d.window); n > d.c.Block {
		d.window = append(d.window[:0], d.window[n-d.kept():]...)
		d.cached = 0
	}
	rows := len(d.window) - d.cached
	d.grow(rows)
	d.embed(d.window[d.cached:])
	for i := range d.layers {
		d.block(&d.layers[i], rows)
	}
	d.cached += rows
	return d.predict(rows), nil
}

// grow makes room for rows.
func (d *Decoder) grow(rows int) {
	if len(d.mean) >= rows {
		return
	}
	n := d.c.DModel
	d.x, d.y = make([]float32, rows*n), make([]float32, rows*n)
	d.qkv, d.hidden = make([]float32, rows*3*n), make([]float32, rows*4*n)
	d.mean, d.rstd, d.lse = make([]float32, rows), make([]float32, rows), make([]float32, rows*d.c.Heads)
}

func (d *Decoder) embed(tokens []int32) {
	n := d.c.DModel
	for i, t := range tokens {
		d.k.Add(d.x[i*n:][:n], d.tokens[int(t)*n:][:n], d.positions[(d.cached+i)*n:][:n])
	}
}

// block runs one transformer block on x.
func (d *Decoder) block(l *layer, rows int) {
	n := rows * d.c.DModel
	x, y := d.x[:n], d.y[:n]
	d.layerNorm(&l.norm1, rows)
	d.product(d.qkv, y, l.attn, rows)
	d.attention(l, rows)
	d.product(d.hidden, y, l.proj, rows)
	d.k.Add(x, x, d.hidden[:n])
	d.layerNorm(&l.norm2, rows)
	d.product(d.hidden, y, l.grow, rows)
	d.k.GELU(d.hidden[:4*n], d.hidden[:4*n])
	d.product(d.qkv, d.hidden, l.back, rows)
	d.k.Add(x, x, d.qkv[:n])
}

// layerNorm puts the norm of x into y.
func (d *Decoder) layerNorm(p *norm, rows int) {
	n := rows * d.c.DModel
	d.k.LayerNorm(d.y[:n], d.x[:n], p.gamma, p.beta, d.mean, d.rstd, rows, d.c.DModel, gpt2mini.LayerNormEps)
}

// predict computes the logits of the last row.
func (d *Decoder) predict(rows int) []float32 {
	n := d.c.DModel
	copy(d.x[:n], d.x[(rows-1)*n:][:n])
	d.layerNorm(&d.last, 1)
	d.split(d.c.Vocab, n*d.c.Vocab, func(t, from, to int) {
		d.k.Gemm(d.ws[t], &simd.Gemm{M: 1, N: to - from, K: n, A: d.y, RsA: n, CsA: 1,
			B: d.head[from*n:], RsB: 1, CsB: n, C: d.logits[from:], LdC: d.c.Vocab})
	})
	return d.logits
}

// product computes y = x·weight + bias for rows of x.
func (d *Decoder) product(y, x []float32, w linear, rows int) {
	out := len(w.bias)
	in := len(w.weight) / out
	d.split(out, rows*len(w.weight), func(t, from, to int) {
		if rows == 1 {
			// Each weight is used once: no time to rearrange them.
			row := y[from:to]
			copy(row, w.bias[from:to])
			for i, v := range x[:in] {
				d.k.Axpy(row, w.weight[i*out+from:][:to-from], v)
			}
			return
		}
		d.k.Gemm(d.ws[t], &simd.Gemm{M: rows, N: to - from, K: in, A: x, RsA: in, CsA: 1,
			B: w.weight[from:], RsB: out, CsB: 1, C: y[from:], LdC: out, Bias: w.bias[from:to]})
	})
}

// Below this many multiplications a second thread costs more than it brings.
const worthSplitting = 1 << 18

// split cuts [0, n) into one range for each thread and calls f for all of them
// at the same time. work is the number of multiplications.
func (d *Decoder) split(n, work int, f func(thread, from, to int)) {
	threads := min(d.threads, n, 1+work/worthSplitting)
	if threads == 1 {
		f(0, 0, n)
		return
	}
	var wg sync.WaitGroup
	for t := range threads {
		wg.Go(func() { f(t, n*t/threads, n*(t+1)/threads) })
	}
	wg.Wait()
}
