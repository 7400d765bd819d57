package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Outcome is how one rank ended.
type Outcome struct {
	Rank     int    `json:"rank"`
	PID      int    `json:"pid"`
	ExitCode int    `json:"exit_code"`        // -1 when it was killed by a signal
	Signal   string `json:"signal,omitempty"` // "SIGKILL"
	// ByUs says that the launcher had signalled it before.
	ByUs bool `json:"stopped_by_launcher,omitempty"`

	signal syscall.Signal
}

func (o Outcome) ok() bool { return o.ExitCode == 0 }

func (o Outcome) String() string {
	s := fmt.Sprintf("rank %d exited with code %d", o.Rank, o.ExitCode)
	if o.Signal != "" {
		s = fmt.Sprintf("rank %d was killed by %s", o.Rank, o.Signal)
	}
	if o.ByUs {
		s += " after it was told to stop"
	}
	return s
}

// RankError says which rank failed first, how, and what it said last.
type RankError struct {
	Outcome
	// Hint is what the failure may mean, such as a lack of memory.
	Hint string `json:"hint,omitempty"`
	// Stderr are the rank's last lines, at most 20.
	Stderr []string `json:"stderr"`
	// Log is the file with all its output, where there is one.
	Log string `json:"log,omitempty"`
	// Hurt are the ranks that failed or were stopped after it.
	Hurt []Outcome `json:"hurt"`
	// Time and Elapsed are when it ended, and how long after its start.
	Time    time.Time     `json:"time"`
	Elapsed time.Duration `json:"elapsed_ns"`
}

func (e *RankError) Error() string {
	var b strings.Builder
	how := fmt.Sprintf("exit code %d", e.ExitCode)
	if e.Signal != "" {
		how = e.Signal
	}
	fmt.Fprintf(&b, "rank %d (pid %d) failed first, after %v: %s", e.Rank, e.PID, e.Elapsed.Round(time.Millisecond), how)
	if e.Hint != "" {
		b.WriteString(": " + e.Hint)
	}
	if len(e.Stderr) > 0 {
		fmt.Fprintf(&b, "\nlast lines of rank %d's stderr:", e.Rank)
		for _, l := range e.Stderr {
			b.WriteString("\n  " + l)
		}
	} else {
		fmt.Fprintf(&b, "\nrank %d wrote nothing to stderr", e.Rank)
	}
	if e.Log != "" {
		b.WriteString("\nall of its output: " + e.Log)
	}
	for i, h := range e.Hurt {
		if i == 0 {
			b.WriteString("\nhurt by it: ")
		} else {
			b.WriteString("; ")
		}
		b.WriteString(h.String())
	}
	return b.String()
}

// code is what a shell would report.
func (o Outcome) code() int {
	if o.signal != 0 {
		return 128 + int(o.signal)
	}
	return o.ExitCode
}

// SignalError says that the job was stopped by a signal to the launcher.
type SignalError struct{ Signal syscall.Signal }

func (e *SignalError) Error() string { return "launch: stopped by " + unix.SignalName(e.Signal) }

// ExitCode is what a program should exit with after an error of Launch: the
// code of the rank that failed first (128 + n for signal n), 128 + n when the
// launcher was stopped by signal n, 130 when its context was canceled, 1 for
// other errors and 0 for nil.
func ExitCode(err error) int {
	var r *RankError
	var s *SignalError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &r) && r.code() > 0:
		return r.code()
	case errors.As(err, &s):
		return 128 + int(s.Signal)
	case errors.Is(err, context.Canceled):
		return 130
	}
	return 1
}

func errorFile(dir string) string { return filepath.Join(dir, "error.json") }

// write leaves the error as dir/error.json.
func (e *RankError) write(dir string) error {
	b, err := json.MarshalIndent(e, "", "  ")
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, ".error.json.tmp")
	if err := os.WriteFile(tmp, append(b, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, errorFile(dir))
}

// outcome reads how a process ended.
func outcome(rank int, st *os.ProcessState) Outcome {
	o := Outcome{Rank: rank, PID: st.Pid(), ExitCode: st.ExitCode()}
	if ws, ok := st.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		o.signal = ws.Signal()
		o.Signal = unix.SignalName(o.signal)
	}
	return o
}
