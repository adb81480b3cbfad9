//go:build unix

package main

import (
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/fencelock/fencelock/internal/machine"
)

// serving starts a server and returns where clients find it.
func serving(t *testing.T, options ...string) (p *program, url string) {
	t.Helper()
	p = start(t, append([]string{"serve", "--listen", "127.0.0.1:0", "--peer-listen", "127.0.0.1:0"}, options...)...)
	return p, "fencelock://" + p.await("fencelock: serving clients at ")
}

func (p *program) terminate() {
	p.t.Helper()
	if err := p.Terminate(); err != nil {
		p.t.Fatal(err)
	}
	p.expectExit(exitOK)
}

// tokenAt runs a command under a lock of the server and returns the command's token.
func tokenAt(t *testing.T, url string) uint64 {
	t.Helper()
	p := start(t, "run", "--backend", url, "--name", "x", "--tier", "correctness", "--", "sh",
		"-c", "echo token $FENCELOCK_TOKEN")
	token, err := strconv.ParseUint(p.await("token "), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	p.expectExit(0)
	return token
}

func TestServe(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "data")
	p, url := serving(t, "--data-dir", dir)
	first := tokenAt(t, url)
	if second := tokenAt(t, url); second <= first {
		t.Errorf("token %d after %d", second, first)
	} else {
		first = second
	}
	start(t, "serve", "--listen", "127.0.0.1:0", "--peer-listen", "127.0.0.1:0", "--data-dir", dir).
		expectExit(exitUnavailable, "in use")
	p.terminate()
	// It comes back at other addresses, as after a move, and after it was killed.
	p, url = serving(t, "--data-dir", dir)
	if second := tokenAt(t, url); second <= first {
		t.Errorf("after a restart token %d after %d", second, first)
	} else {
		first = second
	}
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	_, url = serving(t, "--data-dir", dir)
	if second := tokenAt(t, url); second <= first {
		t.Errorf("after a crash token %d after %d", second, first)
	}
}

func TestServeDev(t *testing.T) {
	t.Parallel()
	p, url := serving(t, "--dev")
	start(t, "run", "--backend", url, "--name", "x", "--tier", "correctness", "--", "true").
		expectExit(exitUsage, "correctness")
	start(t, "run", "--backend", url, "--name", "x", "--", "true").expectExit(0)
	if err := syscall.Kill(p.Pid(), syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	p.expectExit(exitOK, "keeps all data in memory")
}

func TestServeHelpListsEveryLimit(t *testing.T) {
	t.Parallel()
	text := succeed(t, "serve", "--help")
	limits := machine.DefaultLimits()
	for _, l := range limits.All() {
		if limitsAre[l.Name] == "" || !strings.Contains(text, l.Name+": ") {
			t.Errorf("%s is missing", l.Name)
		}
	}
	if strings.Contains(text, "%!") {
		t.Error(text)
	}
}

func TestServeLimit(t *testing.T) {
	t.Parallel()
	_, url := serving(t, "--dev", "--limit", "name-bytes=4", "--limit", "sessions=1")
	start(t, "run", "--backend", url, "--name", "xxxx", "--", "true").expectExit(0)
	start(t, "run", "--backend", url, "--name", "xxxxx", "--", "true").expectExit(exitUsage, "name-bytes")
}

func TestServeUsage(t *testing.T) {
	t.Parallel()
	for _, x := range []struct{ args, want string }{
		{"argument", "no arguments"},
		{"--dev --data-dir x", "--dev"},
		{"--listen 0.0.0.0:0 --dev", "without TLS"},
		{"--listen nowhere --dev", "Listen"},
		{"--log-store paper --data-dir x", "Store"},
		{"--join 127.0.0.1:1,127.0.0.1:2 --bootstrap-expect 2 --dev --peer-listen 127.0.0.1:3", "BootstrapExpect"},
		{"--min-ttl -1s --dev", "MinTTL"},
		{"--min-ttl 5s --max-ttl 4s --dev", "MaxTTL"},
		{"--limit sessions --dev", "NAME=VALUE"},
		{"--limit doors=3 --dev", `no limit "doors"`},
		{"--limit sessions=0 --dev", "between 1 and"},
		{"--limit name-bytes=513 --dev", "between 1 and 512"},
		{"--tls-cert x --dev", "--tls-key"},
		{"--tls-cert x --tls-key y --dev", "--tls-cert"},
		{"--peer-cert x --peer-key y --dev", "--peer-ca"},
		{"--dev --http-listen 127.0.0.1:0 --http-host http://locks", "--http-host"},
		{"--dev --ops-listen nowhere", "--ops-listen"},
		{"--dev --drain -1s", "--drain"},
		{"--dev --admin-listen 127.0.0.1:0", "AdminListen"},
		{"--dev --admin-client-ca x", "--tls-cert"},
	} {
		t.Run(x.args, func(t *testing.T) {
			start(t, append([]string{"serve"}, strings.Fields(x.args)...)...).
				expectExit(exitUsage, x.want, "fencelock help serve")
		})
	}
}
