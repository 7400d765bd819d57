package simd

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/tandem-go/tandem/internal/simd/asmsim"
)

// parseAssembly reads all assembly of this package.
func parseAssembly(t *testing.T) *asmsim.Program {
	t.Helper()
	names, err := filepath.Glob("*_amd64.s")
	if err != nil || len(names) == 0 {
		t.Fatalf("no assembly here: %v", err)
	}
	files := map[string]string{}
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		files[name] = string(text)
	}
	p, err := asmsim.Parse(files)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// assembled is the table of an instruction set whether or not this machine has
// it, with every function in assembly replaced by what shim makes of it.
func assembled(t *testing.T, p *asmsim.Program, isa ISA, shim func(name string, f reflect.Value) (reflect.Value, error)) *Kernels {
	t.Helper()
	k := &Kernels{isa: isa, gemm: gemmTableFor(isa), attention: attentionTableFor(isa)}
	var halves halfKernels
	k.vec, halves = vecAVX2()
	if isa == AVX512 {
		k.vec, halves = vecAVX512()
	}
	names := p.Functions()
	var replace func(v reflect.Value)
	replace = func(v reflect.Value) {
		switch v.Kind() {
		case reflect.Struct:
			for i := range v.NumField() {
				replace(v.Field(i))
			}
		case reflect.Array, reflect.Slice:
			for i := range v.Len() {
				replace(v.Index(i))
			}
		case reflect.Func:
			if v.IsNil() {
				return
			}
			name := runtime.FuncForPC(v.Pointer()).Name()
			name = strings.TrimSuffix(name[strings.LastIndex(name, ".")+1:], ".abi0")
			if !slices.Contains(names, name) {
				return
			}
			v = reflect.NewAt(v.Type(), unsafe.Pointer(v.UnsafeAddr())).Elem() // may be called and set
			f, err := shim(name, reflect.ValueOf(v.Interface()))
			if err != nil {
				t.Fatal(err)
			}
			v.Set(f)
		}
	}
	replace(reflect.ValueOf(k).Elem())
	replace(reflect.ValueOf(&halves).Elem())
	k.vec.useHalves(&halves)
	return k
}

// interpretedKernels are kernels that package asmsim executes from the text of
// the assembly, by name.
func interpretedKernels(t *testing.T) map[string]*Kernels {
	p := parseAssembly(t)
	kernels := map[string]*Kernels{"avx512-interpreted": assembled(t, p, AVX512, func(name string, f reflect.Value) (reflect.Value, error) {
		return p.Func(name, f.Type())
	})}
	if Best() >= AVX2 {
		kernels["avx2-compared"] = assembled(t, p, AVX2, p.Compare)
	}
	return kernels
}

// Every instruction of the AVX-512 kernels for products and attention has been
// interpreted: one that no test reaches could be anything.
func TestInterpretationCoversAVX512(t *testing.T) {
	p := parseAssembly(t)
	k := assembled(t, p, AVX512, func(name string, f reflect.Value) (reflect.Value, error) { return p.Func(name, f.Type()) })
	everyTile(t, k)
	r := rand.New(rand.NewPCG(1, 3))
	newAttentionCase(r, AttentionShape{1, attentionBlock + 3, 1, 19}, 1).check(t, k, k.NewWorkspace())
	for _, trans := range []bool{false, true} { // copies of both operands
		const n = packColsFrom + 16
		g := Gemm{M: packRowsFrom + 12, N: n, K: 40, RsA: packStride, CsA: 1, RsB: n, CsB: 1, LdC: n}
		if trans {
			g.RsA, g.CsA, g.RsB, g.CsB = 1, packStride, 1, 40
		}
		c := gemmCase{g: g}
		c.g.A, c.g.B, c.g.C = random(r, max(g.M, g.K)*packStride), random(r, g.K*g.N), random(r, g.M*g.N)
		c.guard = c.g.C
		k.Gemm(k.NewWorkspace(), &c.g)
		c.check(t)
	}
	for _, name := range p.Functions() {
		if !gemmFunction.MatchString(name) {
			continue
		}
		if missing := p.Unexecuted(name); len(missing) > 0 {
			t.Errorf("%s: never executed: %d instructions, among them %s", name, len(missing), missing[0])
		}
	}
}

// gemmFunction matches what the AVX-512 kernels of products and attention call.
var gemmFunction = regexp.MustCompile(`^(gemmAVX512.*|(softmax|grad|dot|scale)RowsAVX512|copyRows(12|16|32)|transpose8)$`)
