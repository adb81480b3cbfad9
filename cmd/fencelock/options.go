package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/listeners"
)

// This file has the common part of the options of all subcommands.

// options are the options of one subcommand. They get their values from a file, the environment and the command line.
type options struct {
	*pflag.FlagSet
	interspersed bool     // options may stand between and behind the arguments
	from         []string // the sources of values from elsewhere than the command line, for the log
}

// given reports whether an option has a value from anywhere, even the default.
func (o *options) given(name string) bool { return o.Changed(name) }

// backendOption names the URL of the lock service.
const backendOption = "backend"

// urlSource is the value of an option that is a URL, or of the option for a file with the URL.
type urlSource struct{ option, text, file string }

// url adds an option that is a URL, and an option for a file with the URL.
func (o *options) url(option, usage string) *urlSource {
	u := &urlSource{option: option}
	o.StringVar(&u.text, option, "", usage)
	o.StringVar(&u.file, option+"-file", "", "a `FILE` with the value of --"+option)
	return u
}

// backend adds the options for the lock service.
func (o *options) backend(usage string) *urlSource {
	return o.url(backendOption, "the `URL` of "+usage+"; see fencelock help backend")
}

// read returns the URL; empty if no URL is given.
func (u *urlSource) read() (string, error) {
	switch {
	case u.text != "" && u.file != "":
		return "", fmt.Errorf("--%s and --%s-file exclude each other", u.option, u.option)
	case u.file == "":
		return u.text, checkBackend(u.text)
	}
	content, err := os.ReadFile(u.file)
	if err != nil {
		return "", fmt.Errorf("--%s-file: %w", u.option, err)
	}
	text := strings.TrimSpace(string(content))
	if text == "" {
		return "", fmt.Errorf("--%s-file %s: it is empty", u.option, u.file)
	}
	return text, checkBackend(text)
}

// required is read for an option without a default.
func (u *urlSource) required() (string, error) {
	text, err := u.read()
	if err == nil && text == "" {
		err = fmt.Errorf("--%s is missing, and neither %s nor %s is set", u.option, variable(u.option),
			variable(u.option+"-file"))
	}
	return text, err
}

// tier adds --tier.
func (o *options) tier(usage string) func() (fencelock.Tier, error) {
	text := o.String("tier", fencelock.Efficiency.String(), "`TIER`, efficiency or correctness: "+usage)
	return func() (fencelock.Tier, error) {
		for _, tier := range []fencelock.Tier{fencelock.Efficiency, fencelock.Correctness} {
			if *text == tier.String() {
				return tier, nil
			}
		}
		return 0, fmt.Errorf("--tier %s: want efficiency or correctness", *text)
	}
}

const logFormatUsage = "the `FORMAT` of messages on standard error, text or json"

// closedFor reads --closed-for, which has been parsed into d, for replica.RestoreOptions: there 0 means the longest TTL
// of the old cluster, and a negative time means no time.
func (o *options) closedFor(d time.Duration) (time.Duration, error) {
	switch {
	case d < 0:
		return 0, fmt.Errorf("--closed-for %v is negative", d)
	case d == 0 && o.given("closed-for"):
		return -1, nil
	}
	return d, nil
}

// maxMisspelt bounds how many letters a misspelt word may differ in for a suggestion.
const maxMisspelt = 2

// misspelt returns the error for options that cannot be parsed. It suggests a likely spelling.
func misspelt(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) || unknown.GetSpecifiedShortnames() != "" {
		return err
	}
	name := unknown.GetSpecifiedName()
	words := &cobra.Command{SuggestionsMinimumDistance: maxMisspelt}
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		words.AddCommand(&cobra.Command{Use: f.Name, Run: func(*cobra.Command, []string) {}})
	})
	return fmt.Errorf("there is no option --%s%s", name, meant("--", words.SuggestionsFor(name)))
}

// meant returns the end of an error about an unknown word.
func meant(prefix string, words []string) string {
	if len(words) == 0 {
		return ""
	}
	return "; did you mean " + prefix + strings.Join(words, " or "+prefix) + "?"
}

// helpWidth is the width of the list of options, in columns.
const helpWidth = 120

// helpOf returns the help of a subcommand, with its options where the text has {options}.
func helpOf(cmd *cobra.Command) string {
	return strings.Replace(cmd.Long, "{options}\n", cmd.LocalFlags().FlagUsagesWrapped(helpWidth), 1)
}

// hideHelp keeps --help out of lists of options.
func hideHelp(f *pflag.FlagSet) {
	f.BoolP("help", "h", false, "print the help")
	f.Lookup("help").Hidden = true
}

// completeValues completes the values of options with few values.
func completeValues(cmd *cobra.Command) {
	for option, values := range map[string][]string{
		"tier":       {fencelock.Efficiency.String(), fencelock.Correctness.String()},
		"log-format": {"text", "json"},
		"print":      {"postgres", "mysql", "sqlite", "s3"},
	} {
		if f := cmd.Flags().Lookup(option); f != nil && f.Value.Type() != "bool" {
			_ = cmd.RegisterFlagCompletionFunc(option, // it fails if there is no such option
				cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
		}
	}
}

// completeHelp suggests the topics of help.
func completeHelp(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
	all := []cobra.Completion{cobra.CompletionWithDesc(backendTopic, "the URLs of lock services")}
	for _, c := range subcommands() {
		all = append(all, cobra.CompletionWithDesc(c.name, c.summary))
	}
	return all, cobra.ShellCompDirectiveNoFileComp
}

// checkPassword refuses the URL of an option on the command line if it has a password.
func checkPassword(option, text string) error {
	if _, socket := listeners.UnixPath(text); socket || !backend.URLHasPassword(text) {
		return nil
	}
	return fmt.Errorf("--%s %s: every user of this machine can read a password on the command line; give --%s-file or "+
		"%s", option, backend.RedactURL(text), option, variable(option))
}

// dataDir adds --data-dir.
func (o *options) dataDir(dir *string, usage string) { o.dataDirOf(dir, "fencelock-data", usage) }

func (o *options) dataDirOf(dir *string, value, usage string) {
	o.StringVar(dir, "data-dir", value, usage)
}
