package bench

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Contender is one of the implementations that Compare runs in turn.
type Contender struct {
	Name string
	// Run measures allreduce of float32, sum, in place.
	Run func(ctx context.Context, ranks int) ([]CollectiveRow, error)
}

// Ratio is one of ours against a peer: ours/theirs of the medians, round by
// round, so that what changes between rounds cancels.
type Ratio struct {
	Bench  string `json:"bench"`
	Ours   string `json:"ours"`
	Theirs string `json:"theirs"`
	Ranks  int    `json:"ranks"`
	Bytes  int    `json:"bytes"`
	// Median, Min and Max are over the rounds; below 1 ours is faster.
	Median         float64 `json:"ratio"`
	Min            float64 `json:"ratio_min"`
	Max            float64 `json:"ratio_max"`
	Rounds         int     `json:"rounds"`
	Oversubscribed bool    `json:"oversubscribed"`
}

// Compare runs ours and theirs in turn, rounds times, for each number of
// ranks. Every row is given to row as it comes.
func Compare(ctx context.Context, ranks []int, rounds, cores int, ours, theirs []Contender, row func(CollectiveRow) error) ([]Ratio, error) {
	var all []Ratio
	for _, n := range ranks {
		times := map[string]map[int][]float64{} // by contender and size, one a round
		for range rounds {
			for _, c := range append(slices.Clone(ours), theirs...) {
				rows, err := c.Run(ctx, n)
				if err != nil {
					return nil, err
				}
				if times[c.Name] == nil {
					times[c.Name] = map[int][]float64{}
				}
				for _, r := range rows {
					r.Oversubscribed = cores > 0 && n > cores
					times[c.Name][r.Bytes] = append(times[c.Name][r.Bytes], r.P50US)
					if err := row(r); err != nil {
						return nil, err
					}
				}
			}
		}
		for _, a := range ours {
			for _, b := range theirs {
				all = append(all, ratios(a.Name, b.Name, n, times[a.Name], times[b.Name], cores)...)
			}
		}
	}
	return all, nil
}

func ratios(ours, theirs string, n int, a, b map[int][]float64, cores int) (all []Ratio) {
	for size, x := range a {
		y := b[size]
		var q []float64
		for i := range min(len(x), len(y)) {
			if y[i] > 0 {
				q = append(q, x[i]/y[i])
			}
		}
		if len(q) > 0 {
			all = append(all, Ratio{Bench: "collectives-ratio", Ours: ours, Theirs: theirs, Ranks: n, Bytes: size, Rounds: len(q),
				Median: quantile(q, 0.5), Min: slices.Min(q), Max: slices.Max(q), Oversubscribed: cores > 0 && n > cores})
		}
	}
	slices.SortFunc(all, func(a, b Ratio) int { return a.Bytes - b.Bytes })
	return all
}

// WriteRatios writes a table, a line for each pair and number of ranks.
func WriteRatios(w io.Writer, all []Ratio) error {
	var sizes []int
	for _, r := range all {
		if !slices.Contains(sizes, r.Bytes) {
			sizes = append(sizes, r.Bytes)
		}
	}
	slices.Sort(sizes)
	fmt.Fprintf(w, "# ours / theirs, medians of rounds (least … most); below 1 ours is faster\n# %-30s %5s", "", "ranks")
	for _, s := range sizes {
		fmt.Fprintf(w, " %22d", s)
	}
	var last string
	for _, r := range all {
		key := fmt.Sprintf("%s / %s", r.Ours, r.Theirs)
		mark := " "
		if r.Oversubscribed {
			mark = "*"
		}
		if line := fmt.Sprint(key, r.Ranks); line != last {
			fmt.Fprintf(w, "\n%s %-30s %5d", mark, key, r.Ranks)
			last = line
		}
		fmt.Fprintf(w, " %22s", fmt.Sprintf("%.2f (%.2f … %.2f)", r.Median, r.Min, r.Max))
	}
	_, err := fmt.Fprintln(w, strings.Repeat("\n", min(1, len(all))))
	return err
}
