package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/BurntSushi/toml"
	"github.com/spf13/pflag"
)

// envPrefix precedes a flag's name, in capitals and with _ for -, in the variable
// that stands for it: TANDEM_TRAIN_BATCH is --batch.
const envPrefix = "TANDEM_TRAIN_"

// aboutFlags are flags that say what to do with the others and so are no part of
// a configuration; config may be a variable.
var aboutFlags = []string{"config", "print-config", "help", "version"}

// variable is the environment's name for a flag.
func variable(flag string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// origins says where flags' values come from, by name; what isn't there is a default.
type origins map[string]string

// gather sets the flags that the command line leaves out: from the environment
// (os.Environ), then from the TOML file that --config names. Names that are no
// flags are errors.
func gather(flags *pflag.FlagSet, environ []string) (origins, error) {
	from := origins{}
	flags.Visit(func(f *pflag.Flag) { from[f.Name] = "flag" })
	if err := fromEnviron(flags, environ, from); err != nil {
		return nil, err
	}
	path, err := flags.GetString("config")
	if err != nil || path == "" {
		return from, err
	}
	return from, fromFile(flags, path, from)
}

func fromEnviron(flags *pflag.FlagSet, environ []string, from origins) error {
	names := map[string]string{}
	flags.VisitAll(func(f *pflag.Flag) { names[variable(f.Name)] = f.Name })
	for _, name := range aboutFlags[1:] {
		delete(names, variable(name))
	}
	vars := map[string]string{}
	for _, e := range environ {
		if k, v, _ := strings.Cut(e, "="); strings.HasPrefix(k, envPrefix) && v != "" {
			vars[k] = v
		}
	}
	for _, k := range slices.Sorted(maps.Keys(vars)) {
		name, ok := names[k]
		if !ok {
			return fmt.Errorf("%s: there is no flag --%s; see train --help", k, strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(k, envPrefix), "_", "-")))
		}
		if from[name] != "" {
			continue
		}
		if err := flags.Set(name, vars[k]); err != nil {
			return fmt.Errorf("%s: %w", k, oneLine(err))
		}
		from[name] = "environment " + k
	}
	return nil
}

func fromFile(flags *pflag.FlagSet, path string, from origins) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	var values map[string]any
	if err := toml.Unmarshal(raw, &values); err != nil {
		return fmt.Errorf("--config %s: %w", path, oneLine(err))
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if flags.Lookup(name) == nil || slices.Contains(aboutFlags, name) {
			return fmt.Errorf("--config %s: there is no flag --%s; keys are the names of flags, see train --help", path, name)
		}
		if from[name] != "" {
			continue
		}
		text, err := tomlText(values[name])
		if err == nil {
			err = flags.Set(name, text)
		}
		if err != nil {
			return fmt.Errorf("--config %s: %s: %w", path, name, oneLine(err))
		}
		from[name] = "file " + path
	}
	return nil
}

// tomlText writes a value as a flag would have it.
func tomlText(v any) (string, error) {
	switch x := v.(type) {
	case string:
		return x, nil
	case bool:
		return strconv.FormatBool(x), nil
	case int64:
		return strconv.FormatInt(x, 10), nil
	case float64:
		return strconv.FormatFloat(x, 'g', -1, 64), nil
	case []any:
		var parts []string
		for _, e := range x {
			s, err := tomlText(e)
			if err != nil {
				return "", err
			}
			parts = append(parts, s)
		}
		return strings.Join(parts, ","), nil
	}
	return "", errors.New("a flag's value is text, a number, true or false, or a list of these")
}

// oneLine keeps an error of a library from spreading over lines.
func oneLine(err error) error {
	return errors.New(strings.Join(strings.Fields(err.Error()), " "))
}

// print writes the configuration as a TOML file that --config reads, each value
// with where it comes from. Where nobody has said anything and tandem decides
// when it runs, the line is a comment.
func (from origins) print(w io.Writer, flags *pflag.FlagSet, preset string, fromPreset []string) error {
	var err error
	flags.VisitAll(func(f *pflag.Flag) {
		if err != nil || slices.Contains(aboutFlags, f.Name) {
			return
		}
		origin := from[f.Name]
		if origin == "" {
			origin = "default"
			if slices.Contains(fromPreset, f.Name) {
				origin = "preset " + preset
			}
		}
		value := f.Value.String()
		line := f.Name + " = " + value
		switch {
		case from[f.Name] == "" && (value == "" || value == "0" && f.DefValue == "0" && slices.Contains([]string{"nproc", "threads"}, f.Name)):
			line = "# " + f.Name + " ="
		case slices.Contains([]string{"string", "duration"}, f.Value.Type()):
			line = f.Name + " = " + quote(value)
		}
		_, err = fmt.Fprintf(w, "%-40s # %s\n", line, origin)
	})
	return err
}

// quote writes a TOML string.
func quote(s string) string {
	var b strings.Builder
	if err := toml.NewEncoder(&b).Encode(map[string]string{"s": s}); err != nil {
		return strconv.Quote(s)
	}
	return strings.TrimSpace(strings.TrimPrefix(b.String(), "s = "))
}
