// Command train trains GPT-2 on a text, data-parallel over the ranks that it
// starts on this machine or that a launcher has started. `train --help` lists
// what can be said.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"

	"github.com/tandem-go/tandem/launch"
)

func main() {
	in := &interrupts{stop: make(chan struct{})}
	ctx, cancel := context.WithCancelCause(context.Background())
	go in.watch(cancel)
	err := newRoot(in).ExecuteContext(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "train:", err)
		os.Exit(in.exitCode(err))
	}
	// The ranks have ended in order, so only the one who was interrupted says
	// that the run isn't finished.
	if in.came() && !launch.Launched() {
		fmt.Fprintf(os.Stderr, "train: ended early by signal %v\n", in.first)
		os.Exit(128 + int(in.first)) // as shells have it
	}
}

// interrupts are the SIGINT, SIGTERM and SIGHUP that this process gets. The first
// ends the program's context, or, while orderly is set, asks for an end in order;
// the second ends the context in any case.
type interrupts struct {
	stop    chan struct{} // closed by the first
	first   syscall.Signal
	orderly atomic.Bool
}

func (in *interrupts) watch(cancel context.CancelCauseFunc) {
	c := make(chan os.Signal, 2)
	signal.Notify(c, syscall.SIGINT, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // as under nohup
		signal.Notify(c, syscall.SIGHUP)
	}
	in.first = (<-c).(syscall.Signal)
	close(in.stop)
	if !in.orderly.Load() {
		cancel(&launch.SignalError{Signal: in.first})
	}
	cancel(fmt.Errorf("stopped by a second signal, %v", <-c))
}

// came says whether there was one; first can then be read.
func (in *interrupts) came() bool {
	select {
	case <-in.stop:
		return true
	default:
		return false
	}
}

// exitCode is launch.ExitCode's, where the end of the context stands for the
// signal that caused it.
func (in *interrupts) exitCode(err error) int {
	if in.came() && errors.Is(err, context.Canceled) {
		return 128 + int(in.first)
	}
	return launch.ExitCode(err)
}
