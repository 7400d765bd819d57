package simd

import (
	"bufio"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Without it a kernel for AVX2 that needs more than 16 registers would be given
// others by avo, which are AVX-512's: it runs here and dies on older machines,
// or the reverse.
func TestAVX2KernelsUseAVX2(t *testing.T) {
	evex := regexp.MustCompile(`\b([XY](1[6-9]|2\d|3[01])|Z\d+|K[0-7])\b`)
	files, err := filepath.Glob("*_amd64.s")
	if err != nil || len(files) == 0 {
		t.Fatalf("no assembly here: %v", err)
	}
	functions := 0
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		var function string
		lines := bufio.NewScanner(f)
		for n := 1; lines.Scan(); n++ {
			line := lines.Text()
			if strings.HasPrefix(line, "TEXT") {
				function = line
				functions++
			}
			if strings.Contains(function, "AVX2") && evex.MatchString(line) {
				t.Errorf("%s:%d, in %s: %s", name, n, function, line)
			}
		}
		if lines.Err() != nil {
			t.Fatal(lines.Err())
		}
	}
	t.Logf("%d functions in %d files", functions, len(files))
}
