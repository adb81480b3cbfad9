package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

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
	s, err := parseServe([]string{"--config", path, "--max-ttl", "3h", "--limit", "waits=11"})
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
	if !slices.Contains(s.from, "min-ttl from "+path+":5") || !slices.Contains(s.from, "listen from FENCELOCK_LISTEN") {
		t.Errorf("where settings come from: %q", s.from)
	}
	t.Setenv("FENCELOCK_CONFIG", path)
	if s, err := parseServe(nil); err != nil || s.config.DataDir != "/from/file" {
		t.Errorf("FENCELOCK_CONFIG: %v", err)
	}
}

func TestServeSettingsThatMakeNoSense(t *testing.T) {
	for _, x := range []struct{ text, want string }{
		{"data-dir: x\nlisten-at: y", `:2: there is no setting "listen-at"`},
		{"config: x", `:1: there is no setting "config"`},
		{"store: wal\nstore: bolt", `:2: "store" is there twice, first on line 1`},
		{"\nmax-ttl: soon", ":2: max-ttl \"soon\""},
		{"insecure:", ":1: want one value"},
		{"data-dir: [x]", ":1: want one value"},
		{"limit: sessions=3", ":1: want a mapping"},
		{"limit:\n  doors: 3", `:2: limit "doors=3": there is no limit "doors"`},
		{"join: [a:1, [b:2]]", ":1: want one value"},
		{"- data-dir", ":1: want a mapping"},
		{"data-dir: x\n---\nlisten: y", "more than one document"},
		{"dev: true\ndata-dir: x", "--dev keeps nothing"},
		{"log-format: xml", "--log-format xml"},
		{"a: b: c", "server.yaml"},
	} {
		_, err := parseServe([]string{"--config", configFile(t, x.text)})
		if err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%q: %v; want %s", x.text, err, x.want)
		}
	}
	t.Setenv("FENCELOCK_MAX_TTL", "soon")
	if _, err := parseServe(nil); err == nil || !strings.Contains(err.Error(), "FENCELOCK_MAX_TTL=\"soon\"") {
		t.Errorf("in the environment: %v", err)
	}
	t.Setenv("FENCELOCK_MAX_TTL", "")
	// A data directory of the environment is not passed over without a word.
	t.Setenv("FENCELOCK_DATA_DIR", "x")
	if _, err := parseServe([]string{"--dev"}); err == nil {
		t.Error("--dev with FENCELOCK_DATA_DIR is accepted")
	}
	if _, err := parseServe([]string{"--config", filepath.Join(t.TempDir(), "none")}); err == nil {
		t.Error("a file that is not there is accepted")
	}
}
