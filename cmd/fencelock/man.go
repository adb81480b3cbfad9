package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

const manHelp = `Usage: fencelock man DIRECTORY

Writes the manual pages, fencelock.1 and one for each subcommand, into DIRECTORY, such as /usr/local/share/man/man1.

Exit codes:

    0  done
   64  the command line is invalid
   73  a page cannot be written
`

func defineMan(*options) func([]string) error { return writeManual }

func writeManual(args []string) error {
	if len(args) != 1 {
		return errors.New("want one DIRECTORY")
	}
	var text strings.Builder
	usage(&text)
	pages := map[string]string{
		"fencelock":                 manPage("fencelock", "distributed locks", text.String()),
		"fencelock-" + backendTopic: manPage("fencelock-"+backendTopic, "the URLs of lock services", backendHelp),
	}
	for _, c := range subcommands() {
		cmd, _ := c.command()
		pages["fencelock-"+c.name] = manPage("fencelock-"+c.name, c.summary, helpOf(cmd))
	}
	for name, page := range pages {
		if err := os.WriteFile(filepath.Join(args[0], name+".1"), []byte(page), 0o644); err != nil {
			return failed(exitNoCreate, err)
		}
	}
	return nil
}

// manPage returns a help text as a manual page. Its columns are aligned already.
func manPage(name, summary, help string) string {
	synopsis, rest := "fencelock SUBCOMMAND", help
	if first, after, found := strings.Cut(help, "\n\n"); found && strings.HasPrefix(first, "Usage: ") {
		synopsis, rest = strings.TrimPrefix(first, "Usage: "), after
	}
	return fmt.Sprintf(".TH %s 1\n.SH NAME\n%s \\- %s\n.SH SYNOPSIS\n.nf\n%s\n.fi\n.SH DESCRIPTION\n.nf\n%s.fi\n",
		strings.ToUpper(name), roff(name), roff(summary), roff(synopsis), roff(rest))
}

// roff escapes a text: a dot or an apostrophe at the begin of a line would be a request.
func roff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(text)
	lines := strings.SplitAfter(text, "\n")
	for i, line := range lines {
		if strings.HasPrefix(line, ".") || strings.HasPrefix(line, "'") {
			lines[i] = `\&` + line
		}
	}
	return strings.Join(lines, "")
}
