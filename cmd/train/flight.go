package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/tandem-go/tandem/trace"
)

func newFlight() *cobra.Command {
	return &cobra.Command{
		Use:   "flight DIR",
		Short: "Say where the ranks of a failed or hanging run parted",
		Long: `Joins the flight records of all ranks in the directory of a run (--out): the
last 2,000 collectives of each, written when the run fails and when the launcher
or a rank is sent SIGUSR1. The first line says on which collective the ranks
parted and who keeps the others waiting; then comes what each rank did last.`,
		Example: `  train flight run1
  kill -USR1 $(pgrep -o train); train flight run1   # of a run that still goes on`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			f, err := trace.ReadFlights(args[0])
			if err != nil {
				return err
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), f.Text())
			return err
		},
	}
}
