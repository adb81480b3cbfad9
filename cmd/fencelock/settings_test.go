//go:build unix

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

// parseServe reads a command line of "fencelock serve" with its file and environment.
func parseServe(args []string) (*serveSettings, *options, error) {
	o := &options{FlagSet: pflag.NewFlagSet("serve", pflag.ContinueOnError), interspersed: true}
	s := newServe(o)
	err := o.readSettings(args)
	if err == nil {
		err = o.Parse(args)
	}
	if err == nil {
		err = s.read(o, o.Args())
	}
	return s, o, err
}

func configFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "server.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// The command line counts before the environment, and that before the file.
func TestServeSettings(t *testing.T) {
	path := configFile(t, `
data-dir: /from/file
listen: 127.0.0.1:1
max-ttl: 1h
min-ttl: 4s
heartbeat-timeout: 900ms
peer-listen: 127.0.0.1:3
join: [127.0.0.1:3, 127.0.0.1:4]
bootstrap-expect: 2
limit:
  sessions: 7
  holds: 8
`)
	t.Setenv("FENCELOCK_LISTEN", "127.0.0.1:2")
	t.Setenv("FENCELOCK_MAX_TTL", "2h")
	t.Setenv("FENCELOCK_LIMIT", "holds=9,waits=10")
	t.Setenv("FENCELOCK_VERBOSE", "")
	t.Setenv("FENCELOCK_JOIN_KEY", "of sixteen bytes and more")
	s, o, err := parseServe([]string{"--config", path, "--max-ttl", "3h", "--limit", "waits=11"})
	if err != nil {
		t.Fatal(err)
	}
	c := s.config
	if c.DataDir != "/from/file" || c.Listen != "127.0.0.1:2" || c.MinTTL != 4*time.Second || c.MaxTTL != 3*time.Hour ||
		c.Timing.Heartbeat != 900*time.Millisecond || c.BootstrapExpect != 2 || s.verbose ||
		string(c.JoinKey) != "of sixteen bytes and more" ||
		!slices.Equal(c.Join, []string{"127.0.0.1:3", "127.0.0.1:4"}) {
		t.Errorf("settings: %+v", c)
	}
	if l := c.Limits; l.Sessions != 7 || l.Holds != 9 || l.Waits != 11 {
		t.Errorf("limits: %+v", l)
	}
	if !slices.Contains(o.from, "min-ttl from "+path+":5") || !slices.Contains(o.from, "listen from FENCELOCK_LISTEN") {
		t.Errorf("where settings come from: %q", o.from)
	}
	t.Setenv("FENCELOCK_CONFIG", path)
	if s, _, err := parseServe(nil); err != nil || s.config.DataDir != "/from/file" {
		t.Errorf("FENCELOCK_CONFIG: %v", err)
	}
}

// One file serves several subcommands. Each takes its own options from it.
func TestSettingsOfSeveralSubcommands(t *testing.T) {
	path := configFile(t, "backend: memory://\nname: [x, y]\nmetadata: {a: b}\ndata-dir: /nowhere\nowner: file\nwait: 1m\n"+
		"status-file: /nowhere/at/all\nhttp-listen: nowhere\n")
	t.Setenv("FENCELOCK_STATUS_FILE", filepath.Join(t.TempDir(), "status"))
	t.Setenv("FENCELOCK_OWNER", "of an outer lock")
	p := start(t, "run", "--config", path, "--", "sh", "-c", "echo $FENCELOCK_OWNER $FENCELOCK_NAME")
	if got := p.output(); got != "file x y" {
		t.Errorf("run: %q", got)
	}
	p.expectExit(exitOK)
	p = start(t, "run", "--config", path, "--name", "z", "--owner", "line", "sh", "-c", "echo $FENCELOCK_OWNER $FENCELOCK_NAME")
	if got := p.output(); got != "line z" {
		t.Errorf("run: %q", got)
	}
	p.expectExit(exitOK)
	start(t, "gateway", "--config", path).expectExit(exitUsage, "--http-listen")
	t.Setenv("FENCELOCK_HTTP_LISTEN", "0.0.0.0:7481")
	start(t, "gateway", "--config", path).expectExit(exitUsage, "--http-listen 0.0.0.0:7481: refusing to serve other machines without TLS")
	start(t, "gateway", "--config", configFile(t, "dta-dir: x")).expectExit(exitUsage, `there is no setting "dta-dir"`)
}

// A password stands in a file or in the environment, and not where every user of the machine can read it.
func TestPasswordsOnTheCommandLine(t *testing.T) {
	for _, args := range []string{
		"run --name x --backend redis://:secret@127.0.0.1:1 true", "ls --backend redis://a:secret@127.0.0.1:1",
		"gateway --backend postgres://a:secret@127.0.0.1:1/x", "guard show --store mysql://a:secret@127.0.0.1:1/x",
		"postgres migrate --backend postgres://a:secret@127.0.0.1:1/x",
	} {
		p := start(t, strings.Fields(args)...)
		p.expectExit(exitUsage, "can read a password on the command line", "-file or FENCELOCK_")
		if strings.Contains(p.Stderr(), "secret") {
			t.Errorf("%s: %s", args, p.Stderr())
		}
	}
	file := configFile(t, "redis://:secret@127.0.0.1:1\n")
	start(t, "guard", "show", "--store-file", file).expectExit(exitUnavailable)
	start(t, "ls", "--backend-file", file).expectExit(exitUnavailable)
	t.Setenv("FENCELOCK_STORE", "redis://:secret@127.0.0.1:1")
	t.Setenv("FENCELOCK_BACKEND", "nonsense")
	start(t, "guard", "show").expectExit(exitUnavailable)
	start(t, "ls", "--backend-file", file).expectExit(exitUnavailable) // the command line counts first
	t.Setenv("FENCELOCK_BACKEND_FILE", file)
	start(t, "ls").expectExit(exitUsage, "exclude each other")
}

func TestServeSettingsThatMakeNoSense(t *testing.T) {
	for _, x := range []struct{ text, want string }{
		{"data-dir: x\nlisten-at: y", `:2: there is no setting "listen-at"`},
		{"config: x", `:1: there is no setting "config"`},
		{"log-store: wal\nlog-store: bolt", `:2: duplicate setting "log-store", first on line 1`},
		{"\nmax-ttl: soon", ":2: max-ttl \"soon\""},
		{"insecure:", ":1: want one value"},
		{"data-dir: [x]", ":1: want one value"},
		{"limit: sessions=3", ":1: want a mapping"},
		{"limit:\n  doors: 3", `:2: limit "doors=3": there is no limit "doors"`},
		{"join: [a:1, [b:2]]", ":1: want one value"},
		{"- data-dir", ":1: want a mapping"},
		{"data-dir: x\n---\nlisten: y", "want a single YAML document"},
		{"dev: true\ndata-dir: x", "--dev keeps all data in memory"},
		{"log-format: xml", "--log-format xml"},
		{"a: b: c", "server.yaml"},
	} {
		_, _, err := parseServe([]string{"--config", configFile(t, x.text)})
		if err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%q: %v; want %s", x.text, err, x.want)
		}
	}
	t.Setenv("FENCELOCK_MAX_TTL", "soon")
	if _, _, err := parseServe(nil); err == nil || !strings.Contains(err.Error(), "FENCELOCK_MAX_TTL=\"soon\"") {
		t.Errorf("in the environment: %v", err)
	}
	t.Setenv("FENCELOCK_MAX_TTL", "")
	// A data directory of the environment is not passed over without a word.
	t.Setenv("FENCELOCK_DATA_DIR", "x")
	if _, _, err := parseServe([]string{"--dev"}); err == nil {
		t.Error("--dev with FENCELOCK_DATA_DIR is accepted")
	}
	if _, _, err := parseServe([]string{"--config", filepath.Join(t.TempDir(), "none")}); err == nil {
		t.Error("a file that is not there is accepted")
	}
}
