package simd

import (
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"testing"
)

// Without it the interpreter could be wrong where it matters for the kernels of
// vectors: it executes those for AVX2 beside the processor and compares memory and
// results to the bit. And a kernel that no table holds, or an instruction that no
// length of vector reaches, would stay untested.
func TestVectorKernelsInterpretedAndReal(t *testing.T) {
	p := parseAssembly(t)
	names := map[string]bool{} // whether a table holds it
	for _, name := range vectorFunctions(t) {
		names[name] = false
	}
	for _, isa := range []ISA{AVX2, AVX512} {
		if isa == AVX2 && Best() < AVX2 {
			continue
		}
		k := assembled(t, p, isa, func(name string, f reflect.Value) (reflect.Value, error) {
			names[name] = true
			if isa == AVX2 {
				return p.Compare(name, f)
			}
			return p.Func(name, f.Type())
		})
		for _, n := range []int{0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 143} {
			calls := vecCalls(k, n)
			for _, name := range slices.Sorted(maps.Keys(calls)) {
				calls[name]()
			}
		}
	}
	for _, name := range vectorFunctions(t) {
		if !names[name] {
			t.Errorf("no table holds %s", name)
		} else if missing := p.Unexecuted(name); len(missing) > 0 {
			t.Errorf("%s: %d instructions never run, the first: %s", name, len(missing), missing[0])
		}
	}
}

// vectorFunctions lists the functions of the vector kernels' assembly.
func vectorFunctions(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("vec*_amd64.s")
	if err != nil || len(files) == 0 {
		t.Fatalf("no assembly of vector kernels here: %v", err)
	}
	var names []string
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`(?m)^TEXT ·(\w+)`).FindAllSubmatch(text, -1) {
			names = append(names, string(m[1]))
		}
	}
	return names
}
