//go:build unix

package main

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/builtin"
)

// Three programs that hold one lock each and wait for the next one's, in acquires that do not say so: the server cannot
// refuse that. explain names the cycle, with holders, traces, queue and the last forced release.
func TestExplainDeadlock(t *testing.T) {
	t.Parallel()
	url := startServer(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	names := []string{"a", "b", "c"}
	clients := make([]*fencelock.Client, len(names))
	for i, name := range names {
		d, err := builtin.Open(ctx, url)
		if err != nil {
			t.Fatal(err)
		}
		clients[i], err = fencelock.ForCorrectness(d, &fencelock.Options{Owner: "program-" + name, TTL: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = clients[i].Close(context.Background()) })
		trace := fencelock.Metadata(map[string]string{"traceparent": "00-trace-of-" + name})
		if _, err := clients[i].Acquire(ctx, name, trace); err != nil {
			t.Fatal(err)
		}
	}
	for i := range names {
		go func() { _, _ = clients[i].Acquire(ctx, names[(i+1)%len(names)]) }()
	}
	eventually(t, "all three wait", func() bool {
		all := objects[explainedName](t, succeed(t, "explain", "a", "--backend", url, "--json"))
		return len(all) == 3 && all[0].Waiters == 1 && all[1].Waiters == 1 && all[2].Waiters == 1
	})
	text := succeed(t, "explain", "a", "--backend", url)
	for _, want := range []string{
		"a is held by program-a (address 127.0.0.1), exclusive, since ", "this holder waits for b",
		"traceparent: 00-trace-of-a", "CYCLE: a -> b -> c -> a", "1. program-c (address 127.0.0.1), exclusive, since ",
		"c is held by program-c",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("explain a lacks %q:\n%s", want, text)
		}
	}
	succeed(t, "force-release", "a", "--backend", url, "--reason", "a cycle")
	eventually(t, "the cycle is gone", func() bool {
		all := objects[explainedName](t, succeed(t, "explain", "a", "--backend", url, "--json"))
		return all[0].Cycle == nil && all[0].Forced != nil && all[0].Forced.Reason == "a cycle" &&
			len(all[0].Holders) == 1 && all[0].Holders[0].Owner == "program-c"
	})
	start(t, "explain", "nothing", "--backend", url).expectExit(exitNobody, "is not held")
	start(t, "explain", "a", "--backend", "redis://127.0.0.1:1").expectExit(exitUsage, "only the bundled server")
}

// nested starts a "fencelock run" of name that runs another one of next once its standard input is closed.
func nested(t *testing.T, url, name, next string) *program {
	t.Helper()
	p := start(t, "run", "--backend", url, "--name", name, "--owner", "program-"+name, "--", "sh", "-c",
		"echo "+name+"; cat; "+asProgram+"=1 exec \"$@\"", "sh",
		executable(t), "run", "--backend", url, "--name", next, "--owner", "inside-"+name, "--", "echo", "inner "+next)
	p.await(name)
	return p
}

// waits reports whether each holder waits for the name after its own.
func waits(t *testing.T, url string, names ...string) bool {
	t.Helper()
	all := objects[explainedName](t, succeed(t, "explain", names[0], "--backend", url, "--json"))
	for i := range names[:len(names)-1] {
		if len(all) <= i+1 || all[i].Name != names[i] || len(all[i].Holders) != 1 || all[i+1].Waiters != 1 ||
			!slices.Equal(all[i].Holders[0].WaitsFor, names[i+1:i+2]) {
			return false
		}
	}
	return true
}

// A deadlock over three names, between two nested runs and a program that does not report its holds.
func TestExplainNestedRuns(t *testing.T) {
	t.Parallel()
	url := startServer(t)
	d, err := builtin.Open(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	locks, err := fencelock.ForCorrectness(d, &fencelock.Options{Owner: "program-c", TTL: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = locks.Close(context.Background()) }()
	c, err := locks.Acquire(t.Context(), "c")
	if err != nil {
		t.Fatal(err)
	}
	a, b := nested(t, url, "a", "b"), nested(t, url, "b", "c")
	a.CloseStdin()
	b.CloseStdin()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { _, err := locks.Acquire(ctx, "a"); ended <- err }()
	eventually(t, "all three wait", func() bool { return waits(t, url, "a", "b", "c") && waits(t, url, "c", "a") })
	text := succeed(t, "explain", "a", "--backend", url)
	for _, want := range []string{
		"a is held by program-a (address 127.0.0.1)", "this holder waits for b", "CYCLE: a -> b -> c -> a",
		"1. program-c (address 127.0.0.1)", "1. inside-a (address 127.0.0.1)", "1. inside-b (address 127.0.0.1)",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("explain a lacks %q:\n%s", want, text)
		}
	}
	cancel()
	<-ended
	if err := c.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	a.await("inner b")
	a.expectExit(exitOK)
	b.expectExit(exitOK)
}

// The run that would close the cycle is refused, however deep it is.
func TestNestedRunsDoNotDeadlock(t *testing.T) {
	t.Parallel()
	url := startServer(t)
	a, b, c := nested(t, url, "a", "b"), nested(t, url, "b", "c"), nested(t, url, "c", "a")
	a.CloseStdin()
	b.CloseStdin()
	eventually(t, "two of them wait", func() bool { return waits(t, url, "a", "b", "c") })
	c.CloseStdin()
	c.expectExit(exitHeld, "deadlock", `inside-c has "c" and wants "a"`)
	b.await("inner c")
	b.expectExit(exitOK)
	a.await("inner b")
	a.expectExit(exitOK)

	again := nested(t, url, "x", "x")
	again.CloseStdin()
	again.expectExit(exitHeld, "deadlock")

	// Over a run between the two.
	deep := start(t, "run", "--backend", url, "--name", "y", "--", "sh", "-c", asProgram+"=1 exec \"$@\"", "sh",
		executable(t), "run", "--backend", url, "--name", "z", "--", "sh", "-c", asProgram+"=1 exec \"$@\"", "sh",
		executable(t), "run", "--backend", url, "--name", "y", "--", "true")
	deep.expectExit(exitHeld, "deadlock")
}

func TestTop(t *testing.T) {
	t.Parallel()
	url := startServer(t)
	for _, name := range []string{"first", "second"} {
		start(t, "run", "--backend", url, "--name", name, "--", "sh", "-c", "echo ready; sleep 60").await("ready")
	}
	start(t, "run", "--backend", url, "--name", "second", "--", "true")
	eventually(t, "the longest queue is at the top", func() bool {
		all := objects[lock](t, succeed(t, "top", "--once", "--backend", url, "--json"))
		return len(all) == 2 && all[0].LockKey == "second" && all[0].Waiters == 1
	})
	all := objects[lock](t, succeed(t, "top", "--once", "--by-age", "--lines", "1", "--backend", url, "--json"))
	if len(all) != 1 || all[0].LockKey != "first" {
		t.Errorf("the oldest is %+v", all)
	}
}
