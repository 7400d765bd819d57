// Command chaos disturbs small jobs of real processes and watches how they end:
// ranks killed in every phase of a step, stopped for less and for longer than
// the clocks allow, ranks that lag, call something else, abort or leave;
// strangers and impostors at every port. No rank may hang, no sum be wrong, the
// survivors must name the same culprit, collective and bucket, and nothing may
// be left behind. A round follows from its seed, so a failure can be repeated:
//
//	go run ./internal/chaos [-rounds N] [-seed FIRST] [-run REGEXP] [-netns] [-v]
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"time"
)

func main() {
	if v := os.Getenv(workerEnv); v != "" {
		if err := work(v, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "chaos: rank:", err)
			os.Exit(1)
		}
		return
	}
	rounds := flag.Int("rounds", 200, "rounds to play")
	seed := flag.Uint64("seed", 1, "seed of the first round; the next ones follow")
	only := flag.String("run", "", "only disturbances whose name matches this regular expression")
	inNet := flag.Bool("netns", false, "instead: ranks in network namespaces, whose links are slow, fail or flap (root, Linux)")
	verbose := flag.Bool("v", false, "print every round")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	among := disturbances
	if *inNet {
		among = netDisturbances
	}
	failed, err := playAll(ctx, *seed, *rounds, among, *only, *verbose)
	if err == nil && failed > 0 {
		err = fmt.Errorf("%d of %d rounds failed", failed, *rounds)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		stop()
		os.Exit(1)
	}
}

// playAll plays rounds one after another and counts those that failed.
func playAll(ctx context.Context, seed uint64, rounds int, among []disturbance, only string, verbose bool) (failed int, err error) {
	re, err := regexp.Compile(only)
	if err != nil {
		return 0, fmt.Errorf("-run: %w", err)
	}
	count := map[disturbance]int{}
	begin := time.Now()
	for i := range rounds {
		r, err := draw(seed+uint64(i), among, re)
		if err != nil {
			return failed, err
		}
		if verbose {
			fmt.Println(&r)
		}
		if err := play(ctx, r); err != nil {
			failed++
			fmt.Printf("FAILED %v\n", err)
		}
		if ctx.Err() != nil {
			return failed, context.Cause(ctx)
		}
		count[r.What]++
	}
	fmt.Printf("%d rounds in %v, %d failed: %v\n", rounds, time.Since(begin).Round(time.Second), failed, count)
	return failed, nil
}
