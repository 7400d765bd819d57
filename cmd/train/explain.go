package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/trainer"
)

// explainStep prints what a step is made of and how long each part takes, as one
// rank in this process, whatever --nproc says.
func (o *options) explainStep(cmd *cobra.Command) error {
	return tandem.Run(cmd.Context(), &tandem.Options{Backend: o.backend, Threads: o.threads, NProc: 1},
		func(ctx context.Context, g *tandem.Group) error {
			text, err := trainer.Explain(ctx, g.Device, o.train)
			if err != nil {
				return err
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), text)
			return err
		})
}
