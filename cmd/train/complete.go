package main

import (
	"github.com/spf13/cobra"

	"github.com/tandem-go/tandem"
	"github.com/tandem-go/tandem/data"
	"github.com/tandem-go/tandem/models/gpt2mini"
	"github.com/tandem-go/tandem/trainer"
)

// completions tells the shell what flags of c can be, for those that c has.
func completions(c *cobra.Command) {
	values := map[string][]string{
		"preset":    gpt2mini.Presets(),
		"backend":   {tandem.Auto, tandem.Ring, tandem.NCCL},
		"tokenizer": {data.CharTokenizer, data.GPT2Tokenizer},
	}
	files := map[string][]string{ // by extension; none means any file
		"data": nil, "config": {"toml"}, "init-from": {"safetensors"}, "timeline": {"json"},
	}
	has := func(name string) bool { return c.Flags().Lookup(name) != nil }
	for name, v := range values {
		if has(name) {
			must(c.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(v, cobra.ShellCompDirectiveNoFileComp)))
		}
	}
	for name, ext := range files {
		if has(name) {
			must(c.MarkFlagFilename(name, ext...))
		}
	}
	for _, name := range []string{"out", "checkpoint"} {
		if has(name) {
			must(c.MarkFlagDirname(name))
		}
	}
	if has("resume") {
		must(c.RegisterFlagCompletionFunc("resume", cobra.FixedCompletions([]string{trainer.ResumeAuto}, cobra.ShellCompDirectiveDefault)))
	}
	for _, sub := range c.Commands() {
		completions(sub)
	}
}

// must is for errors that only a flag that doesn't exist can cause.
func must(err error) {
	if err != nil {
		panic(err)
	}
}
