package measure

import (
	"slices"
	"strconv"
	"strings"

	"github.com/fencelock/fencelock"
)

// ValidateLabel checks the program's own label: its name, and whether there is a function for its values.
func ValidateLabel(name string, value func(string) string) error {
	why := ""
	switch {
	case name == "" && value == nil:
		return nil
	case name == "" || value == nil:
		why = "Label and Value are set together"
	case !isLabel(name):
		why = "want letters, digits and _, and no __ in front"
	}
	for i := range All {
		if slices.Contains(All[i].Labels(""), name) {
			why = All[i].Name + " has a label of this name"
		}
	}
	if why == "" {
		return nil
	}
	return &fencelock.InvalidError{
		Kind: fencelock.ErrInvalidOption, What: "Label", Value: strconv.Quote(name), Why: why,
	}
}

// isLabel reports whether every version of Prometheus takes a text for the name of a label.
func isLabel(s string) bool {
	for i, c := range s {
		letter := c == '_' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return !strings.HasPrefix(s, "__")
}
