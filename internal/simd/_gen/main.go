// Command gen writes the assembly of package simd: for every family of kernels
// NAME_amd64.s and the Go stubs NAME_amd64.go. Run it through
// "go generate ./internal/simd". The output depends on nothing but this source.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/mmcloughlin/avo/attr"
	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/gotypes"
	"github.com/mmcloughlin/avo/pass"
	"github.com/mmcloughlin/avo/printer"
)

// family is a group of kernels that share an assembly file.
type family struct {
	name string               // of the file, without _amd64.s
	gen  func(*build.Context) // adds the functions; declares nothing else
}

// families lists what is generated; each is defined in a file of its own.
var families = []family{
	{"gemm_avx2", gemmAVX2},
	{"gemm_avx512", gemmAVX512},
	{"pack", pack},
	{"attention", bothWidths(vecAttention)},
}

func main() {
	// avo's build package puts flags of its own into flag.CommandLine.
	flags := flag.NewFlagSet("gen", flag.ExitOnError)
	out := flags.String("out", "..", "folder of package simd")
	_ = flags.Parse(os.Args[1:]) // exits on an error
	for _, f := range slices.Concat(families, vecFamilies) {
		if err := write(*out, f); err != nil {
			fmt.Fprintln(os.Stderr, "gen:", err)
			os.Exit(1)
		}
	}
}

// write generates one family.
func write(dir string, f family) error {
	ctx := build.NewContext()
	f.gen(ctx)
	file, err := ctx.Result()
	if err != nil {
		return fmt.Errorf("%s: %w", f.name, err)
	}
	if err := pass.Compile.Execute(file); err != nil {
		return fmt.Errorf("%s: %w", f.name, err)
	}
	cfg := printer.Config{Argv: []string{"go", "generate ./internal/simd"}, Pkg: "simd"}
	for ext, p := range map[string]printer.Printer{".s": printer.NewGoAsm(cfg), ".go": printer.NewStubs(cfg)} {
		text, err := p.Print(file)
		if err != nil {
			return fmt.Errorf("%s: print %s: %w", f.name, ext, err)
		}
		if err := os.WriteFile(filepath.Join(dir, f.name+"_amd64"+ext), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// text begins a function: no frame, no stack check, pointers that don't escape.
func text(c *build.Context, name, signature string, doc ...string) {
	s, err := gotypes.ParseSignature(signature)
	if err != nil {
		panic(fmt.Sprintf("signature of %s: %v", name, err))
	}
	textOf(c, name, s, doc...)
}

// textOf is text for a signature with types of package simd.
func textOf(c *build.Context, name string, s *gotypes.Signature, doc ...string) {
	c.Function(name)
	c.Attributes(attr.NOSPLIT)
	c.Pragma("noescape")
	c.Doc(doc...)
	c.Signature(s)
}
