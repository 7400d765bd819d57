// Package lint holds the rules of the house as tests: which package may import
// which, which libraries stay out of the library's closure, how long files and
// functions get. Run it with `make lint`; it fetches nothing.
package lint

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Module is the path whose packages the rules are about.
const Module = "github.com/tandem-go/tandem"

// imports says which packages of the module each package may import directly,
// as docs/design.md draws it. Everyone may import dtype. A package that isn't
// listed may import nothing of ours: adding one is a decision to write down.
var imports = map[string][]string{
	"dtype":                  {},
	"device":                 {},
	"device/devicetest":      {"device"},
	"bucket":                 {},
	"cpu":                    {"device", "internal/simd"},
	"comm":                   {"device"},
	"comm/inmem":             {"comm", "cpu", "device", "internal/simd"},
	"comm/commtest":          {"comm", "cpu", "device"},
	"ring":                   {"comm", "cpu", "device", "rendezvous", "trace", "internal/simd", "internal/auth", "internal/shm"},
	"overlap":                {"device", "comm", "bucket", "trace"},
	"nn":                     {"device", "internal/simd"},
	"engine":                 {"device", "trace"},
	"optim":                  {"device", "bucket", "checkpoint"},
	"ddp/hook":               {"comm", "device", "internal/simd"},
	"ddp":                    {"ddp/hook", "engine", "overlap", "bucket", "comm", "device", "cpu", "optim", "trace"},
	"rendezvous":             {"internal/auth"},
	"launch":                 {"rendezvous", "internal/auth"},
	"internal/auth":          {},
	"internal/shm":           {"internal/auth"},
	"internal/simd":          {"device"},
	"internal/simd/asmsim":   {},
	"internal/lint":          {},
	"internal/chaos":         {"comm", "cpu", "device", "rendezvous", "ring", "internal/auth", "internal/netns"},
	"internal/mutants":       {},
	"internal/netns":         {},
	"data":                   {"data/bpe", "internal/durable"},
	"internal/durable":       {},
	"models/gpt2mini":        {"nn", "device"},
	"nn/nntest":              {},
	"checkpoint":             {"internal/durable"},
	"trace":                  {"internal/durable"},
	"data/bpe":               {},
	"examples":               {},
	"models/gpt2mini/parity": {"models/gpt2mini"},
	"models/gpt2mini/infer":  {"models/gpt2mini", "internal/simd"},
	"models/gpt2mini/hf":     {"models/gpt2mini", "checkpoint", "internal/simd"},
	"":                       {"cpu", "ring", "comm", "device", "rendezvous", "launch", "trace", "internal/auth"},
	"trainer": {"", "ddp", "ddp/hook", "engine", "models/gpt2mini", "models/gpt2mini/hf", "models/gpt2mini/infer", "data", "checkpoint", "optim", "trace",
		"comm", "device", "bucket", "overlap"},
	"bench":      {"", "ddp", "ddp/hook", "models/gpt2mini", "optim", "overlap", "comm", "device", "bucket", "internal/netns"},
	"bench/plot": {"bench"},
	"cmd/train":  {"*"},
}

// library lists the packages whose closure users take into their own programs.
var library = []string{"", "ddp", "nn", "optim", "ring", "launch"}

// programOnly lists path prefixes that must not be in that closure: command
// lines, progress bars, plotting, metrics, MCP, tokenizers.
var programOnly = []string{
	"github.com/spf13/", "github.com/vbauerster/mpb", "gonum.org/v1/plot",
	"github.com/prometheus/", "github.com/modelcontextprotocol/", "github.com/tiktoken-go/",
	"github.com/nlpodyssey/", "pgregory.net/", "go.uber.org/goleak",
}

// Bounds on size. Most files are far below; the bound is where splitting is due.
const (
	maxFileLines = 500
	maxFuncLines = 80
)

type pkg struct {
	ImportPath string
	Imports    []string
	Deps       []string
}

// list runs go list in root over all packages of the module.
func list(root string) ([]pkg, error) {
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports,Deps", "./...")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		var ee *exec.ExitError
		if errors.As(err, &ee) {
			return nil, fmt.Errorf("go list: %s", ee.Stderr)
		}
		return nil, fmt.Errorf("go list: %w", err)
	}
	var pkgs []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs, nil
		} else if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		pkgs = append(pkgs, p)
	}
}

// rel is an import path relative to the module; ok is false for foreign ones.
func rel(path string) (string, bool) {
	if path == Module {
		return "", true
	}
	return strings.CutPrefix(path, Module+"/")
}

// checkImports holds pkgs against the table.
func checkImports(pkgs []pkg) (bad []string) {
	for _, p := range pkgs {
		from, _ := rel(p.ImportPath)
		allowed, known := imports[from]
		if strings.HasPrefix(from, "examples/") {
			continue
		}
		if !known {
			bad = append(bad, fmt.Sprintf("%s: not in the import table of internal/lint: add its row", p.ImportPath))
			continue
		}
		for _, i := range p.Imports {
			to, ours := rel(i)
			if ours && to != "dtype" && !slices.Contains(allowed, to) && !slices.Contains(allowed, "*") {
				bad = append(bad, fmt.Sprintf("%s imports %s: not allowed by the import table", p.ImportPath, i))
			}
		}
	}
	return bad
}

// checkClosure keeps the program's libraries out of the library.
func checkClosure(pkgs []pkg) (bad []string) {
	for _, p := range pkgs {
		r, ours := rel(p.ImportPath)
		if !ours || !slices.Contains(library, r) {
			continue
		}
		for _, d := range p.Deps {
			for _, bar := range programOnly {
				if strings.HasPrefix(d, bar) {
					bad = append(bad, fmt.Sprintf("%s depends on %s, which belongs to programs only", p.ImportPath, d))
				}
			}
		}
	}
	return bad
}

// goFiles calls f for every Go file that a person wrote.
func goFiles(root string, f func(path string, src []byte) error) error {
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if n := d.Name(); path != root && (strings.HasPrefix(n, ".") || n == "testdata") {
				return filepath.SkipDir
			}
			return nil
		}
		if filepath.Ext(path) != ".go" {
			return nil
		}
		src, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if generated(src) {
			return nil
		}
		return f(path, src)
	})
}

func generated(src []byte) bool {
	s := bufio.NewScanner(strings.NewReader(string(src)))
	for i := 0; i < 5 && s.Scan(); i++ {
		if strings.HasPrefix(s.Text(), "// Code generated ") {
			return true
		}
	}
	return false
}

// checkSizes reports files and functions over the bounds.
func checkSizes(path string, src []byte) (bad []string, err error) {
	if n := strings.Count(string(src), "\n"); n > maxFileLines {
		bad = append(bad, fmt.Sprintf("%s: %d lines, over %d: split it", path, n, maxFileLines))
	}
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, path, src, parser.ParseComments)
	if err != nil {
		return nil, err
	}
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok {
			continue
		}
		pos := fset.Position(fn.Pos())
		if n := fset.Position(fn.End()).Line - pos.Line + 1; n > maxFuncLines {
			bad = append(bad, fmt.Sprintf("%s: %s has %d lines, over %d", pos, fn.Name.Name, n, maxFuncLines))
		}
		if fn.Name.IsExported() && fn.Doc == nil && !strings.HasSuffix(path, "_test.go") && exportedRecv(fn) {
			bad = append(bad, fmt.Sprintf("%s: exported %s has no comment", pos, fn.Name.Name))
		}
	}
	return bad, nil
}

// wellKnown methods need no comment: their contract is their interface's.
var wellKnown = []string{"String", "Error", "Unwrap", "Len", "Less", "Swap", "Close", "MarshalText", "LogValue", "Is", "Name"}

// exportedRecv reports whether fn is part of the documented surface.
func exportedRecv(fn *ast.FuncDecl) bool {
	if fn.Recv == nil {
		return true
	}
	if slices.Contains(wellKnown, fn.Name.Name) {
		return false
	}
	t := fn.Recv.List[0].Type
	if s, ok := t.(*ast.StarExpr); ok {
		t = s.X
	}
	if g, ok := t.(*ast.IndexExpr); ok {
		t = g.X
	}
	id, ok := t.(*ast.Ident)
	return ok && id.IsExported()
}
