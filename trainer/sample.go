package trainer

import (
	"context"
	"fmt"
	"strings"

	"github.com/tandem-go/tandem/models/gpt2mini/infer"
)

// sample generates text from the trained model, drawn from its distribution. It
// runs after Sync, reading the parameters where training keeps them.
func (r *run) sample(ctx context.Context) (string, error) {
	values := map[string][]float32{}
	for i, p := range r.model.Config.Params() {
		v, ok := r.model.Params[i].Value().Data().([]float32)
		if !ok {
			return "", fmt.Errorf("parameter %q cannot be read by the host", p.Name)
		}
		values[p.Name] = v
	}
	d, err := infer.New(r.model.Config, func(name string) ([]float32, error) { return values[name], nil },
		&infer.Options{Threads: r.g.Threads})
	if err != nil {
		return "", err
	}
	g := Generator{Model: modelState(r.model.Config), tokenizer: r.text, decoder: d}
	var b strings.Builder
	err = g.Generate(ctx, &b, "", r.c.SampleTokens, Sampling{Temperature: 1, Seed: r.c.Seed})
	return strings.TrimSpace(b.String()), err
}
