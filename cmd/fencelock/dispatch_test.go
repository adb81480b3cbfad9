//go:build unix

package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/fencelock/fencelock/backend"
)

func TestSuggestions(t *testing.T) {
	t.Parallel()
	for want, args := range map[string][]string{
		`no subcommand "statsu"; did you mean status?`:     {"statsu"},
		`no subcommand "rum"; did you mean run?`:           {"help", "rum"},
		"no option --bakend; did you mean --backend?":      {"run", "--bakend", "x"},
		"no option --stop-timout; did you mean --stop-tim": {"run", "--stop-timout", "1s"},
		"no option --nothing-like-it\n":                    {"ls", "--nothing-like-it"},
		"no option --json\n":                               {"version", "--json"},
	} {
		start(t, args...).expectExit(exitUsage, want)
	}
}

func TestCompletion(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ args, want []string }{
		{[]string{"rest"}, []string{"restore"}},
		{[]string{"run", "--sto"}, []string{"--stop-timeout"}},
		{[]string{"run", "--tier", "c"}, []string{"correctness"}},
		{[]string{"member", ""}, []string{"list", "add", "remove"}},
		{[]string{"guard", "ch"}, []string{"check"}},
		{[]string{"help", "back"}, []string{"backend", "backup"}},
	} {
		p := start(t, append([]string{"__complete"}, c.args...)...)
		var got []string
		for line := range strings.Lines(p.output()) {
			word, _, _ := strings.Cut(strings.TrimSpace(line), "\t")
			if begun := c.args[len(c.args)-1]; strings.HasPrefix(word, begun) && !strings.HasPrefix(word, ":") && word != "" {
				got = append(got, word)
			}
		}
		p.expectExit(exitOK)
		if !slices.Equal(got, c.want) {
			t.Errorf("%q: %q; want %q", c.args, got, c.want)
		}
	}
	p := start(t, "completion", "bash")
	script := p.output()
	p.expectExit(exitOK)
	cmd := exec.Command("bash", "-n")
	cmd.Stdin = strings.NewReader(script)
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(script, "__complete") {
		t.Errorf("completion bash: %v: %s", err, out)
	}
}

// Every subcommand has help that names its options, and a manual page.
func TestManualPages(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	start(t, "man", dir).expectExit(exitOK)
	start(t, "man", filepath.Join(dir, "none")).expectExit(exitNoCreate)
	start(t, "man").expectExit(exitUsage, "DIRECTORY")
	for _, c := range subcommands() {
		text, err := os.ReadFile(filepath.Join(dir, "fencelock-"+c.name+".1"))
		if err != nil {
			t.Error(err)
			continue
		}
		cmd, _ := c.command()
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden && !strings.Contains(string(text), strings.ReplaceAll("--"+f.Name, "-", `\-`)) {
				t.Errorf("the page of %s lacks --%s", c.name, f.Name)
			}
		})
		if !strings.HasPrefix(c.help, "Usage: fencelock "+c.name) {
			t.Errorf("the help of %s does not begin with its usage", c.name)
		}
	}
}

// The table of URL options is the drivers' own.
func TestHelpBackendHasEveryOption(t *testing.T) {
	t.Parallel()
	p := start(t, "help", "backend")
	text := p.output()
	p.expectExit(exitOK)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, driver := range []string{"fencelock", "redis", "redlock", "etcd", "zk"} {
		section := ""
		if m := regexp.MustCompile(`(?ms)^  ` + driver + ` +([a-z].*?)(?:^  [a-z]|^$)`).FindStringSubmatch(text); m != nil {
			section = m[1]
		}
		_, err := backend.Open(ctx, driver+"://127.0.0.1:1?no-such-option=1")
		if err == nil || !strings.Contains(err.Error(), "the options are ") {
			t.Errorf("%s takes any option: %v", driver, err)
			continue
		}
		_, list, _ := strings.Cut(err.Error(), "the options are ")
		for _, name := range regexp.MustCompile(`[a-z-]+`).FindAllString(list, -1) {
			if !regexp.MustCompile(`\b`+name+`\b`).MatchString(section) && !regexp.MustCompile(`(?m)^  (\w+, )?`+name+`\b`).MatchString(text) {
				t.Errorf("option %s of %s is not in the help", name, driver)
			}
		}
	}
}
