// Command train trains GPT-2 on a text, data-parallel over the ranks that it
// starts on this machine or that a launcher has started. `train --help` lists
// what can be said.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/tandem-go/tandem/launch"
)

func main() {
	var first os.Signal // set before stop is closed
	stop := make(chan struct{})
	ctx, cancel := context.WithCancelCause(context.Background())
	go watchSignals(&first, stop, cancel)
	err := newRoot(stop).ExecuteContext(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "train:", err)
		os.Exit(launch.ExitCode(err))
	}
	select {
	case <-stop:
		// The ranks have ended in order, so only the one who was interrupted says
		// that the run isn't finished.
		if sig, ok := first.(syscall.Signal); ok && !launch.Launched() {
			fmt.Fprintf(os.Stderr, "train: ended early by signal %v\n", sig)
			os.Exit(128 + int(sig)) // as shells have it
		}
	default:
	}
}

// watchSignals lets the first SIGINT or SIGTERM finish the step under way, and
// makes the second end the run at once.
func watchSignals(first *os.Signal, stop chan<- struct{}, cancel context.CancelCauseFunc) {
	c := make(chan os.Signal, 2)
	signal.Notify(c, os.Interrupt, syscall.SIGTERM)
	*first = <-c
	close(stop)
	cancel(fmt.Errorf("stopped by a second %v", <-c))
}
