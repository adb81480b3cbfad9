package main

import (
	"flag"
	"io"
	"testing"
)

// What the command line of guard asks for is understood or refused before anything is done.
func TestGuardCommandLine(t *testing.T) {
	for _, c := range []struct {
		args []string
		good bool
	}{
		{[]string{"show", "accounts/42"}, true},
		{[]string{"raise", "100"}, true},
		{[]string{"accept", "etcd-1"}, true},
		{[]string{"install"}, true},
		{nil, false},
		{[]string{"show", "a", "b"}, false},
		{[]string{"raise"}, false},
		{[]string{"raise", "many"}, false},
		{[]string{"accept"}, false},
		{[]string{"lower", "1"}, false},
	} {
		for _, store := range []string{"", "redis://127.0.0.1:1"} {
			s := &guardSettings{store: store, floor: "0"}
			f := flag.NewFlagSet("guard", flag.ContinueOnError)
			f.SetOutput(io.Discard)
			do, err := s.parseGuard(f, c.args)
			if good := c.good && store != ""; (err == nil) != good || (do != nil) != good {
				t.Errorf("guard %q with the store %q: %v, want it understood: %v", c.args, store, err, good)
			}
		}
	}
}
