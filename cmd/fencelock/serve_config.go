package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"

	"go.yaml.in/yaml/v3"
)

// settings are set from three places, of which the later counts: a file in YAML, the environment, the command line. All
// of them have the names of the options, and the same values.
type settings struct {
	flags *flag.FlagSet
	from  []string // where each comes from that is not of the command line, for the log
}

// variable is the name of an option in the environment.
func variable(option string) string {
	return "FENCELOCK_" + strings.ToUpper(strings.ReplaceAll(option, "-", "_"))
}

// Options that name a file, and whose variables have the key itself.
const (
	httpKeyOption = "http-key"
	joinKeyOption = "join-key"
)

// readEnvironment takes the variables that are set and not empty.
func (s *settings) readEnvironment(lookup func(string) (string, bool)) (err error) {
	s.flags.VisitAll(func(f *flag.Flag) {
		value, _ := lookup(variable(f.Name))
		if value == "" || f.Name == configOption || f.Name == httpKeyOption || f.Name == joinKeyOption || err != nil {
			return
		}
		values := []string{value}
		if f.Name == limitOption {
			values = strings.Split(value, ",")
		}
		for _, value := range values {
			if wrong := s.flags.Set(f.Name, value); wrong != nil && err == nil {
				err = fmt.Errorf("%s=%q: %w", variable(f.Name), value, wrong)
			}
		}
		s.from = append(s.from, f.Name+" from "+variable(f.Name))
	})
	return err
}

// readFile takes a mapping of options to values. A key that is none, or is there twice, is an error, as is a key
// without a value: what is mistyped must not count as not said.
func (s *settings) readFile(path string) error {
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
		return fmt.Errorf("%s: it has more than one document", path)
	}
	seen := map[string]int{}
	return each(path, document.Content[0], func(key, value *yaml.Node) error {
		name := key.Value
		if before := seen[name]; before != 0 {
			return fmt.Errorf("%s:%d: %q is there twice, first on line %d", path, key.Line, name, before)
		}
		seen[name] = key.Line
		if s.flags.Lookup(name) == nil || name == configOption {
			return fmt.Errorf("%s:%d: there is no setting %q", path, key.Line, name)
		}
		s.from = append(s.from, fmt.Sprintf("%s from %s:%d", name, path, key.Line))
		switch {
		case name == limitOption:
			return each(path, value, func(limit, n *yaml.Node) error {
				text, err := scalar(path, n)
				if err != nil {
					return err
				}
				return s.set(path, limit, name, limit.Value+"="+text)
			})
		case name == joinOption && value.Kind == yaml.SequenceNode:
			var all []string
			for _, n := range value.Content {
				text, err := scalar(path, n)
				if err != nil {
					return err
				}
				all = append(all, text)
			}
			return s.set(path, value, name, strings.Join(all, ","))
		}
		text, err := scalar(path, value)
		if err != nil {
			return err
		}
		return s.set(path, value, name, text)
	})
}

func (s *settings) set(path string, at *yaml.Node, name, value string) error {
	if err := s.flags.Set(name, value); err != nil {
		return fmt.Errorf("%s:%d: %s %q: %w", path, at.Line, name, value, err)
	}
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
