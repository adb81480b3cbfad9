package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// Options get their values from three places, of which the last one wins: a file in YAML, the environment, the
// command line. All three have the same names and the same values.

const (
	configOption    = "config"
	joinOption      = "join"
	httpHostOption  = "http-host"
	limitOption     = "limit"
	httpLimitOption = "http-limit"
	// The variables of these options have the key itself, not the name of its file.
	httpKeyOption      = "http-key"
	httpIdentityOption = "http-identity-key"
	joinKeyOption      = "join-key"
)

// isList has the options that may be repeated, as NAME=VALUE.
var isList = map[string]bool{limitOption: true, httpLimitOption: true, metadataOption: true}

const configUsage = "a YAML `FILE` with options, without the dashes: \"ttl: 1m\". A repeatable option is a list or a " +
	"mapping. Several subcommands can share one file; unknown entries are errors"

// variable returns the name of an option in the environment.
func variable(option string) string {
	return "FENCELOCK_" + strings.ToUpper(strings.ReplaceAll(option, "-", "_"))
}

// ofOneCall are the options without a variable. "fencelock run" sets FENCELOCK_NAME, FENCELOCK_OWNER
// and FENCELOCK_TOKEN for the command; the others belong to one call, and a forgotten variable must not change it.
var ofOneCall = map[string]bool{
	"name": true, "owner": true, "token": true,
	"check": true, "clean": true, "client": true, "closed-for": true, "floor": true, "new-cluster": true,
	"node": true, "own": true, "as": true, "expires-in": true, "subtree": true, "verb": true, "prefix": true, "print": true, "protect": true, "reason": true, "request-id": true,
	"resource": true, "since": true, "stale": true, "supersede": true, "to": true, "yes": true,
	configOption: true, httpKeyOption: true, httpIdentityOption: true, joinKeyOption: true, "help": true,
}

// partner returns the option that excludes another one: a URL, and the file with it.
func partner(option string) string {
	if url, isFile := strings.CutSuffix(option, "-file"); isFile {
		return url
	}
	return option + "-file"
}

// readSettings gives the options their values from the file and the environment, before the command line is parsed.
func (o *options) readSettings(args []string) error {
	line := o.copy()
	if line.Parse(args) != nil {
		return nil // the next Parse fails
	}
	for _, option := range []string{backendOption, storeOption} {
		if f := line.Lookup(option); f != nil && f.Changed {
			if err := checkPassword(option, f.Value.String()); err != nil {
				return err
			}
		}
	}
	environment := map[string]string{}
	o.VisitAll(func(f *pflag.Flag) {
		value := os.Getenv(variable(f.Name))
		if value != "" && !ofOneCall[f.Name] && !line.Changed(partner(f.Name)) {
			environment[f.Name] = value
		}
	})
	if f := line.Lookup(configOption); f != nil {
		path := f.Value.String()
		if !f.Changed {
			path = os.Getenv(variable(configOption))
		}
		if path != "" {
			superseded := func(option string) bool {
				return line.Changed(partner(option)) || environment[partner(option)] != "" ||
					option == nameOption && line.Changed(option)
			}
			if err := o.readFile(path, superseded); err != nil {
				return err
			}
		}
	}
	return o.readEnvironment(environment)
}

// copy returns options with the same names and values, whose only effect is to keep the parsed values.
func (o *options) copy() *pflag.FlagSet {
	line := pflag.NewFlagSet("", pflag.ContinueOnError)
	line.SetOutput(io.Discard)
	line.SetInterspersed(o.interspersed)
	o.VisitAll(func(f *pflag.Flag) {
		c := line.VarPF(new(text), f.Name, f.Shorthand, "")
		c.NoOptDefVal = f.NoOptDefVal
	})
	return line
}

// text is the value of any option, as it is written.
type text string

func (t *text) String() string         { return string(*t) }
func (t *text) Set(value string) error { *t = text(value); return nil }
func (t *text) Type() string           { return "" }

// readEnvironment sets the options that have a variable. An empty variable counts as unset.
func (o *options) readEnvironment(values map[string]string) (err error) {
	o.VisitAll(func(f *pflag.Flag) {
		value := values[f.Name]
		if value == "" || err != nil {
			return
		}
		all := []string{value}
		if isList[f.Name] {
			all = strings.Split(value, ",")
		}
		for _, each := range all {
			if wrong := f.Value.Set(each); wrong != nil {
				err = fmt.Errorf("%s=%q: %w", variable(f.Name), each, wrong)
				return
			}
		}
		f.Changed = true
		o.from = append(o.from, f.Name+" from "+variable(f.Name))
	})
	return err
}

// readFile reads a mapping of options to values. An unknown or duplicate key is an error, as is a key without a
// value: a mistyped setting must not count as missing. Options of other subcommands are accepted, and ignored.
func (o *options) readFile(path string, superseded func(option string) bool) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("--%s: %w", configOption, err)
	}
	defer f.Close()
	var document, more yaml.Node
	in := yaml.NewDecoder(f)
	switch err := in.Decode(&document); {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		return fmt.Errorf("%s: %w", path, err)
	}
	if err := in.Decode(&more); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%s: want a single YAML document", path)
	}
	seen := map[string]int{}
	return each(path, document.Content[0], func(key, value *yaml.Node) error {
		name := key.Value
		if before := seen[name]; before != 0 {
			return fmt.Errorf("%s:%d: duplicate setting %q, first on line %d", path, key.Line, name, before)
		}
		seen[name] = key.Line
		if name == configOption || name == "help" || o.Lookup(name) == nil && !settable(name) {
			return fmt.Errorf("%s:%d: there is no setting %q", path, key.Line, name)
		}
		if o.Lookup(name) == nil || superseded(name) {
			return nil
		}
		o.from = append(o.from, fmt.Sprintf("%s from %s:%d", name, path, key.Line))
		return o.setAll(path, name, value)
	})
}

// settable reports whether a subcommand with a settings file has the option.
func settable(name string) bool {
	for _, c := range subcommands() {
		_, o := c.command()
		if o.Lookup(configOption) != nil && o.Lookup(name) != nil {
			return true
		}
	}
	return false
}

// setAll sets an option to a value of the file.
func (o *options) setAll(path, name string, value *yaml.Node) error {
	switch {
	case isList[name]:
		return each(path, value, func(key, n *yaml.Node) error {
			text, err := scalar(path, n)
			if err != nil {
				return err
			}
			return o.set(path, key, name, key.Value+"="+text)
		})
	case (name == joinOption || name == httpHostOption || name == nameOption) && value.Kind == yaml.SequenceNode:
		var all []string
		for _, n := range value.Content {
			text, err := scalar(path, n)
			if err != nil {
				return err
			}
			all = append(all, text)
		}
		if name != nameOption {
			all = []string{strings.Join(all, ",")}
		}
		for _, text := range all {
			if err := o.set(path, value, name, text); err != nil {
				return err
			}
		}
		return nil
	}
	text, err := scalar(path, value)
	if err != nil {
		return err
	}
	return o.set(path, value, name, text)
}

func (o *options) set(path string, at *yaml.Node, name, value string) error {
	f := o.Lookup(name)
	if err := f.Value.Set(value); err != nil {
		return fmt.Errorf("%s:%d: %s %q: %w", path, at.Line, name, value, err)
	}
	f.Changed = true
	return nil
}

// each calls do with the keys and values of a mapping.
func each(path string, n *yaml.Node, do func(key, value *yaml.Node) error) error {
	if n.Kind != yaml.MappingNode {
		return fmt.Errorf("%s:%d: want a mapping, NAME: VALUE on each line", path, n.Line)
	}
	for i := 0; i < len(n.Content); i += 2 {
		if err := do(n.Content[i], n.Content[i+1]); err != nil {
			return err
		}
	}
	return nil
}

func scalar(path string, n *yaml.Node) (string, error) {
	if n.Kind != yaml.ScalarNode || n.Tag == "!!null" {
		return "", fmt.Errorf("%s:%d: want one value", path, n.Line)
	}
	return n.Value, nil
}
