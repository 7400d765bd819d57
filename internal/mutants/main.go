// Command mutants plants one fault at a time into the code and runs the tests
// that promise to notice it. A fault that every test lets pass is a hole in
// the tests, and the command fails. Sources stay untouched: a mutated copy
// takes a file's place through the go command's -overlay.
//
//	go run ./internal/mutants [-run REGEXP] [-v]
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// mutant is one planted fault.
type mutant struct {
	// Name says what the fault does.
	Name string
	// File is the path from the module's root. Old occurs in it exactly once
	// and is replaced by New.
	File, Old, New string
	// Packages and Run select the tests (go test's -run) that must fail.
	Packages []string
	Run      string
}

// testTimeout bounds one mutant: a fault may well make a test hang.
const testTimeout = 2 * time.Minute

func main() {
	only := flag.String("run", "", "plant only the faults whose name matches this regular expression")
	verbose := flag.Bool("v", false, "print the failing tests' output")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *only, *verbose); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, only string, verbose bool) error {
	re, err := regexp.Compile(only)
	if err != nil {
		return fmt.Errorf("-run: %w", err)
	}
	root, err := moduleRoot(ctx)
	if err != nil {
		return err
	}
	var survivors, n int
	for _, m := range mutants {
		if !re.MatchString(m.Name) {
			continue
		}
		n++
		start := time.Now()
		killed, out, err := plant(ctx, root, m)
		if err != nil {
			return fmt.Errorf("%s: %w", m.Name, err)
		}
		verdict := "noticed "
		if !killed {
			verdict, survivors = "SURVIVED", survivors+1
		}
		fmt.Printf("%s  %-52s %5.1fs  %s\n", verdict, m.Name, time.Since(start).Seconds(), firstFailure(out))
		if verbose || !killed {
			fmt.Println(out)
		}
	}
	if n == 0 {
		return fmt.Errorf("no fault matches %q", only)
	}
	if survivors > 0 {
		return fmt.Errorf("%d of %d planted faults went unnoticed", survivors, n)
	}
	fmt.Printf("%d planted faults, all noticed\n", n)
	return nil
}

func moduleRoot(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	mod := strings.TrimSpace(string(out))
	if err != nil || mod == "" || mod == os.DevNull {
		return "", errors.New("run it inside the module (go env GOMOD says there is none)")
	}
	return filepath.Dir(mod), nil
}

// plant runs the mutant's tests and reports whether they failed. A mutant that
// doesn't apply or doesn't build is an error: it would prove nothing.
func plant(ctx context.Context, root string, m mutant) (killed bool, out string, err error) {
	overlay, cleanup, err := makeOverlay(root, m)
	if err != nil {
		return false, "", err
	}
	defer cleanup()
	// By the environment, so that a test that builds a program plants it, too.
	flags := "GOFLAGS=" + strings.TrimSpace(os.Getenv("GOFLAGS")+" -overlay="+overlay)
	build := exec.CommandContext(ctx, "go", append([]string{"vet"}, m.Packages...)...)
	build.Dir, build.Env = root, append(os.Environ(), flags)
	if out, err := build.CombinedOutput(); err != nil {
		return false, "", fmt.Errorf("does not build: %w\n%s", err, out)
	}
	args := []string{"test", "-count=1", "-failfast", "-timeout", testTimeout.String(), "-run", m.Run}
	test := exec.CommandContext(ctx, "go", append(args, m.Packages...)...)
	test.Dir, test.Env = root, build.Env
	b, err := test.CombinedOutput()
	if ctx.Err() != nil {
		return false, "", ctx.Err()
	}
	if err == nil && strings.Contains(string(b), "no tests to run") {
		return false, "", fmt.Errorf("no test matches -run %q in %v", m.Run, m.Packages)
	}
	return err != nil, string(b), nil
}

func makeOverlay(root string, m mutant) (path string, cleanup func(), err error) {
	orig := filepath.Join(root, filepath.FromSlash(m.File))
	src, err := os.ReadFile(orig)
	if err != nil {
		return "", nil, err
	}
	if n := strings.Count(string(src), m.Old); n != 1 {
		return "", nil, fmt.Errorf("%s has its text %d times, not once: %q", m.File, n, m.Old)
	}
	dir, err := os.MkdirTemp("", "tandem-mutant-")
	if err != nil {
		return "", nil, err
	}
	cleanup = func() { os.RemoveAll(dir) }
	copyPath := filepath.Join(dir, filepath.Base(m.File))
	over, err := json.Marshal(map[string]map[string]string{"Replace": {orig: copyPath}})
	path = filepath.Join(dir, "overlay.json")
	if err == nil {
		err = errors.Join(
			os.WriteFile(copyPath, []byte(strings.Replace(string(src), m.Old, m.New, 1)), 0o600),
			os.WriteFile(path, over, 0o600))
	}
	if err != nil {
		cleanup()
		return "", nil, err
	}
	return path, cleanup, nil
}

var failLine = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)|^(panic: test timed out)`)

// firstFailure is the name of the first test that failed, for the report.
func firstFailure(out string) string {
	if m := failLine.FindStringSubmatch(out); m != nil {
		return "by " + m[1] + m[2]
	}
	return ""
}
