package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/tandem-go/tandem/internal/durable"
	"github.com/tandem-go/tandem/trace"
)

func newTimeline() *cobra.Command {
	var svg string
	var step int
	cmd := &cobra.Command{
		Use:   "timeline FILE",
		Short: "Say where the time of recorded steps went and what to change",
		Long: `Explains a timeline that "train --timeline FILE" has written: forward,
backward, exposed communication and update; which bucket was exposed; what to
change. The file itself opens in https://ui.perfetto.dev.`,
		Example: `  train --steps 100 --timeline run.json
  train timeline run.json --svg step.svg`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if step < 0 {
				return fmt.Errorf("--step %d: steps count from 1", step)
			}
			t, err := trace.Read(args[0])
			if errors.Is(err, trace.ErrFormat) {
				return fmt.Errorf("%w; --timeline of a training run makes one", err)
			}
			if err != nil {
				return err
			}
			text, err := trace.Explain(t)
			if err != nil {
				return err
			}
			if svg != "" {
				err := durable.Write(svg, func(w io.Writer) error { return trace.SVG(w, t, step) })
				if err != nil {
					return fmt.Errorf("--svg: %w", err)
				}
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), text)
			return err
		},
	}
	cmd.Flags().StringVar(&svg, "svg", "", "also draw one step to this file")
	cmd.Flags().IntVar(&step, "step", 0, "the step to draw (default: the one of median length)")
	return cmd
}
