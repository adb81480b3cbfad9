//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/gateway"
	"github.com/fencelock/fencelock/internal/server"
)

// Drivers that the program finds when the test binary is the program.
func init() {
	backend.Register("bare", func(ctx context.Context, _ string) (backend.Driver, error) {
		d, err := backend.Open(ctx, "memory://")
		return bareDriver{d}, err
	})
	backend.Register("forgetful", func(ctx context.Context, _ string) (backend.Driver, error) {
		d, err := backend.Open(ctx, "memory://")
		return forgetfulDriver{bareDriver{d}}, err
	})
}

// bareDriver implements no optional interface, and its description says so.
type bareDriver struct{ backend.Driver }

func (bareDriver) Describe() backend.Description { return backend.Description{Name: "bare"} }

// forgetfulDriver keeps no history.
type forgetfulDriver struct{ backend.Driver }

func (forgetfulDriver) Describe() backend.Description {
	return backend.Description{
		Name: "forgetful", Capabilities: backend.CapInspect | backend.CapWatch | backend.CapWatchReplay,
	}
}

func (forgetfulDriver) Look(_ context.Context, name string) (backend.State, error) {
	return backend.State{Name: name, Revision: 4711}, nil
}

func (forgetfulDriver) Watch(context.Context, string, uint64) iter.Seq2[backend.Change, error] {
	return func(yield func(backend.Change, error) bool) { yield(backend.Change{}, backend.ErrCompacted) }
}

// startServer starts a bundled server in this process, and returns the URL at which programs find it.
func startServer(t *testing.T) string {
	t.Helper()
	return startServerAt(t, "127.0.0.1:0")
}

func startServerAt(t *testing.T, addr string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, err := server.Start(ctx, server.Config{
		DataDir: t.TempDir(), Listen: addr, Version: "test", Log: slog.New(slog.DiscardHandler),
	})
	if err == nil {
		t.Cleanup(func() {
			if err := s.Close(context.Background()); err != nil {
				t.Error(err)
			}
		})
		err = s.WaitLeader(ctx)
	}
	if err != nil {
		t.Fatal(err)
	}
	return "fencelock://" + s.Addr().String()
}

// hold takes a lock, which is released with the test if it was not lost before.
func hold(t *testing.T, url, owner, name string) *fencelock.Lease {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	locks, err := fencelock.Open(ctx, url, fencelock.Correctness, &fencelock.Options{Owner: owner})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { locks.Close(context.Background()) })
	lease, err := locks.TryAcquire(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	return lease
}

// objects reads one JSON object from each line.
func objects[T any](t *testing.T, text string) (all []T) {
	t.Helper()
	for line := range strings.Lines(text) {
		var x T
		if err := json.Unmarshal([]byte(line), &x); err != nil {
			t.Fatalf("%v in line %q", err, line)
		}
		all = append(all, x)
	}
	return all
}

// succeed runs the program and returns its output.
func succeed(t *testing.T, args ...string) string {
	t.Helper()
	p := start(t, args...)
	text := p.output()
	p.expectExit(0)
	return text
}

func TestList(t *testing.T) {
	url := startServer(t)
	if text := succeed(t, "ls", "--backend", url, "--json"); text != "" {
		t.Errorf("nothing is held, and it prints:\n%s", text)
	}
	lease := hold(t, url, "pod-1", "orders/1")
	hold(t, url, "pod-22", "orders/22")
	hold(t, url, "pod-3", "accounts/3")

	all := objects[lock](t, succeed(t, "ls", "--backend", url, "--prefix", "orders/", "--json"))
	if len(all) != 2 || all[0].LockKey != "orders/1" || all[1].LockKey != "orders/22" || !all[0].Locked ||
		len(all[0].Holders) != 1 {
		t.Fatalf("orders/ has %+v", all)
	}
	got := all[0].Holders[0]
	if got.OwnerID != "pod-1" || got.FencingToken != lease.Token().Order() || got.Kind != "exclusive" || got.Since == 0 ||
		time.Since(time.UnixMilli(got.Since)).Abs() > time.Hour || got.ExpiresInMillis <= 0 || got.HoldID == "" {
		t.Errorf("orders/1 is held by %+v", got)
	}

	t.Setenv("FENCELOCK_BACKEND", url)
	lines := strings.Split(succeed(t, "ls"), "\n")
	if len(lines) != 4 || !strings.HasPrefix(lines[0], "NAME ") ||
		strings.Index(lines[0], "OWNER") != strings.Index(lines[3], "pod-22") {
		t.Errorf("not four aligned lines:\n%s", strings.Join(lines, "\n"))
	}
}

func TestHolder(t *testing.T) {
	t.Parallel()
	url := startServer(t)
	p := start(t, "holder", "orders/1", "--backend", url, "--json")
	if free := objects[lock](t, p.output()); len(free) != 1 || free[0].Locked || free[0].LockKey != "orders/1" ||
		len(free[0].Holders) != 0 {
		t.Errorf("nobody holds it: %+v", free)
	}
	p.expectExit(exitNobody, `"orders/1" is not held`)

	lease := hold(t, url, "pod-1", "orders/1")
	text := succeed(t, "holder", "--backend", url, "orders/1")
	for _, part := range []string{"orders/1", "pod-1", lease.Token().String(), "exclusive"} {
		if !strings.Contains(text, part) {
			t.Errorf("no %q in:\n%s", part, text)
		}
	}
}

func TestForceRelease(t *testing.T) {
	t.Parallel()
	url := startServer(t)
	lease := hold(t, url, "pod-1", "orders/1")
	args := []string{"force-release", "orders/1", "--backend", url, "--reason", "pod-1 is gone"}
	start(t, append(args, "--nonce", fencing.NewNonce().String())...).expectExit(exitNobody, "no hold of \"orders/1\"")
	start(t, append(args, "--token", (lease.Token()+1).String())...).expectExit(exitNobody, "no hold of \"orders/1\"")
	if err := lease.Err(); err != nil {
		t.Errorf("a condition that no hold meets ended one: %v", err)
	}
	args = append(args, "--token", lease.Token().String(), "--nonce", lease.Grant().Nonce.String(), "--by", "Ann")
	if text := succeed(t, args...); !strings.Contains(text, "force-released") {
		t.Errorf("it prints:\n%s", text)
	}
	select {
	case <-lease.Context().Done():
	case <-time.After(patience):
		t.Error("the holder does not learn of it")
	}
	if lost := (*fencelock.LostError)(nil); !errors.As(lease.Err(), &lost) || lost.By != "Ann" {
		t.Errorf("the holder learns %v, want who asked", lease.Err())
	}
	start(t, args[:6]...).expectExit(exitNobody, `"orders/1" is not held`)
}

func TestWatch(t *testing.T) {
	t.Parallel()
	url := startServer(t)
	hold(t, url, "pod-9", "orders/9")
	before := objects[lock](t, succeed(t, "holder", "orders/9", "--json", "--backend", url))[0]
	first := hold(t, url, "pod-1", "orders/1")
	p := start(t, "watch", "orders/1", "--since", strconv.FormatUint(before.Revision, 10), "--json", "--backend", url)
	next := func() gateway.Change {
		t.Helper()
		return objects[gateway.Change](t, p.await(""))[0]
	}
	acquired := next()
	if acquired.Type != "acquired" || acquired.OwnerID != "pod-1" || acquired.FencingToken != first.Token().Order() ||
		acquired.LockKey != "orders/1" {
		t.Errorf("first event: %+v", acquired)
	}
	succeed(t, "force-release", "orders/1", "--reason", "it hangs", "--backend", url)
	if e := next(); e.Type != "force-released" || e.Reason != "it hangs" || e.Revision <= acquired.Revision {
		t.Errorf("second event: %+v", e)
	}
	if err := syscall.Kill(p.Pid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.expectExit(0)

	// Without JSON, and going on where the first one stood.
	p = start(t, "watch", "--since", strconv.FormatUint(acquired.Revision, 10), "--backend", url, "orders/1")
	p.await("TIME")
	if line := p.await(""); !strings.Contains(line, "force-released") || !strings.Contains(line, "it hangs") {
		t.Errorf("event: %q", line)
	}
	if err := syscall.Kill(p.Pid(), syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	p.expectExit(0)
}

func TestWatchReportsCompaction(t *testing.T) {
	t.Parallel()
	start(t, "watch", "x", "--since", "12", "--backend", "forgetful://").
		expectExit(exitCompacted, "after revision 12", "--since 4711")
}

func TestLookExitCodes(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		args   []string
		code   int
		stderr string
	}{
		"ls lacks":     {[]string{"ls", "--backend", "bare://"}, 64, "the bare driver lacks the capability list"},
		"holder lacks": {[]string{"holder", "x", "--backend", "bare://"}, 64, "lacks the capability inspect"},
		"watch lacks":  {[]string{"watch", "x", "--backend", "bare://"}, 64, "lacks the capability watch"},
		"force-release lacks": {
			[]string{"force-release", "x", "--reason", "y", "--backend", "bare://"}, 64,
			"lacks the capability force-release",
		},
		"ls with a name":        {[]string{"ls", "x"}, 64, `"x": ls takes no such argument`},
		"holder without name":   {[]string{"holder"}, 64, "NAME is missing"},
		"holder of two":         {[]string{"holder", "x", "y"}, 64, `"y": holder takes no such argument`},
		"holder of a bad name":  {[]string{"holder", "a\nb", "--backend", "memory://"}, 64, "name"},
		"watch without name":    {[]string{"watch"}, 64, "NAME is missing"},
		"watch since what":      {[]string{"watch", "x", "--since", "yesterday"}, 64, "-since"},
		"force without reason":  {[]string{"force-release", "x"}, 64, "--reason is missing"},
		"force without name":    {[]string{"force-release", "--reason", "x"}, 64, "NAME is missing"},
		"unknown flag":          {[]string{"ls", "--frobnicate"}, 64, "-frobnicate"},
		"unknown flag, after":   {[]string{"holder", "x", "--frobnicate"}, 64, "-frobnicate"},
		"unknown scheme":        {[]string{"ls", "--backend", "carrier-pigeon://loft"}, 64, "carrier-pigeon"},
		"nobody answers":        {[]string{"ls", "--backend", "fencelock://127.0.0.1:1"}, 69, "unavailable"},
		"help of ls":            {[]string{"help", "ls"}, 0, ""},
		"help of holder":        {[]string{"holder", "--help"}, 0, ""},
		"help of watch":         {[]string{"watch", "-h"}, 0, ""},
		"help of force-release": {[]string{"help", "force-release"}, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := start(t, c.args...)
			p.expectExit(c.code, c.stderr)
			if text := p.Stderr(); c.stderr == "" && text != "" {
				t.Errorf("standard error:\n%s", text)
			}
		})
	}
}

func TestLookHelpListsExitCodes(t *testing.T) {
	t.Parallel()
	for word, codes := range map[string][]int{
		"ls":            {exitOK, exitUsage, exitUnavailable},
		"holder":        {exitOK, exitNobody, exitUsage, exitUnavailable},
		"watch":         {exitOK, exitUsage, exitCompacted, exitUnavailable},
		"force-release": {exitOK, exitNobody, exitUsage, exitUnavailable},
		"status":        {exitOK, exitUsage, exitUnavailable},
		"member":        {exitOK, exitRefused, exitUsage, exitUnavailable},
	} {
		help := succeed(t, "help", word)
		for _, code := range codes {
			if !strings.Contains(help, fmt.Sprintf("%5d  ", code)) {
				t.Errorf("no exit code %d in the help of %s", code, word)
			}
		}
	}
}

func TestCell(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"": "-", "pod-1": "pod-1", "zwölf Uhr": "zwölf Uhr", "a\tb": `"a\tb"`, "\x1b[2J": `"\x1b[2J"`,
	} {
		if got := cell(text); got != want {
			t.Errorf("cell(%q) = %q; want %q", text, got, want)
		}
	}
}
