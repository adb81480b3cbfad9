package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"time"

	"github.com/fencelock/fencelock"
)

// This file is what the command lines of all subcommands have in common.

// newFlags returns a set that prints nothing by itself: see unparsed.
func newFlags(word string) *flag.FlagSet {
	f := flag.NewFlagSet(word, flag.ContinueOnError)
	f.SetOutput(io.Discard)
	return f
}

// unparsed prints the help if parsing asked for it, or complains if it failed; done reports that the subcommand ends
// with the code.
func unparsed(word, help string, parsed error) (code int, done bool) {
	switch {
	case errors.Is(parsed, flag.ErrHelp):
		fmt.Print(help)
		return exitOK, true
	case parsed != nil:
		return usageError(word, parsed), true
	}
	return exitOK, false
}

// parseMixed reads options that may stand before, between and after the arguments, which it returns.
func parseMixed(f *flag.FlagSet, args []string) (rest []string, err error) {
	for {
		if err := f.Parse(args); err != nil {
			return nil, err
		}
		if f.NArg() == 0 {
			return rest, nil
		}
		rest, args = append(rest, f.Arg(0)), f.Args()[1:]
	}
}

// givenOf are the names of the options that stand on the command line, also with the value that they have without it.
func givenOf(f *flag.FlagSet) map[string]bool {
	given := map[string]bool{}
	f.Visit(func(f *flag.Flag) { given[f.Name] = true })
	return given
}

// tierOf reads --tier.
func tierOf(text string) (fencelock.Tier, error) {
	for _, tier := range []fencelock.Tier{fencelock.Efficiency, fencelock.Correctness} {
		if text == tier.String() {
			return tier, nil
		}
	}
	return 0, fmt.Errorf("--tier %s: want efficiency or correctness", text)
}

// closedFor reads --closed-for, which has been parsed into d, for replica.RestoreOptions: there 0 means the longest TTL
// of the old cluster, and a negative time none.
func closedFor(f *flag.FlagSet, d time.Duration) (time.Duration, error) {
	switch {
	case d < 0:
		return 0, fmt.Errorf("--closed-for %v is negative", d)
	case d == 0 && givenOf(f)["closed-for"]:
		return -1, nil
	}
	return d, nil
}
