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
	stop := make(chan struct{})
	ctx, cancel := context.WithCancelCause(context.Background())
	go watchSignals(stop, cancel)
	err := newRoot(stop).ExecuteContext(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "train:", err)
		os.Exit(launch.ExitCode(err))
	}
	select {
	case <-stop:
		// The ranks have ended in order, so only the one who was interrupted says
		// that the run isn't finished.
		if !launch.Launched() {
			fmt.Fprintln(os.Stderr, "train: interrupted")
			os.Exit(interrupted)
		}
	default:
	}
}

// interrupted is the exit code of a run that a signal ended, as shells have it.
const interrupted = 128 + int(syscall.SIGINT)

// watchSignals lets the first SIGINT or SIGTERM finish the step under way, and
// makes the second end the run at once.
func watchSignals(stop chan<- struct{}, cancel context.CancelCauseFunc) {
	c := make(chan os.Signal, 2)
	signal.Notify(c, os.Interrupt, syscall.SIGTERM)
	<-c
	close(stop)
	cancel(fmt.Errorf("stopped by a second %v", <-c))
}
