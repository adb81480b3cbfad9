package conformance

import (
	"context"
	"fmt"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
)

var leftoverClauses = []Clause{
	{
		ID: "K1", Group: "leftovers", Slug: "goroutines-end-with-close", serial: true, run: goroutinesEndWithClose,
		Rule: "after Close no goroutine of the driver runs",
	},
	{
		ID: "K2", Group: "leftovers", Slug: "service-keeps-nothing", needs: needLeftovers, serial: true,
		run:  serviceKeepsNothing,
		Rule: "when all locks are released or have ended, the service keeps no data of the driver",
	},
	{
		ID: "K3", Group: "leftovers", Slug: "goroutines-do-not-pile-up", serial: true, run: goroutinesDoNotPileUp,
		Rule: "acquires that have returned, granted or not, leave no goroutine while the driver is open",
	},
}

// use exercises d: it acquires, waits unsuccessfully, waits successfully, renews and releases.
func (t *trial) use(d, other backend.Driver) {
	name := t.name()
	g := t.take(d, t.request(name), "of a free name")
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			r := t.request(name)
			r.Wait = true
			got, err := other.Acquire(ctx, r)
			t.releaseUnknown(other, err, r)
			if err == nil {
				t.release(other, got, "by a waiter")
			}
		})
	}
	all.Wait()
	w := t.wait(t.within(5*slack), other, t.request(name))
	t.queued(d, name, 1)
	if r := t.renew(d, g); r.Err != nil {
		t.Errorf("renewal = %v", r.Err)
	}
	t.release(d, g, "by the holder")
	next := t.got(w, promptly, "after the release")
	t.release(other, next, "by the waiter")
}

func goroutinesEndWithClose(t *trial) {
	t.noneLeft(func(a, b backend.Driver) {
		t.use(a, b)
		for _, d := range []backend.Driver{a, b} {
			if err := closeWithin(d, slack); err != nil {
				t.Errorf("Close = %v", err)
			}
		}
	})
}

// noneLeft runs use, which closes two drivers after some calls, and reports goroutines of theirs that still run.
func (t *trial) noneLeft(use func(a, b backend.Driver)) {
	mine := t.name()
	pprof.Do(t.Context(), pprof.Labels(goroutineLabel, mine), func(context.Context) {
		inner := newRecorder(t.TB)
		defer inner.cleanup() // closes the harness's resources for the driver
		use(t.note(t.h.New(inner), nil), t.note(t.h.New(inner), nil))
		for _, m := range inner.failures {
			t.Errorf("%s", m)
		}
	})
	patience := t.within(slack)
	left := goroutinesOf(t, mine)
	for len(left) > 0 && patience.Err() == nil {
		pause(patience, 20*time.Millisecond)
		left = goroutinesOf(t, mine)
	}
	for _, g := range left {
		t.Latef("left behind after Close: %s", g)
	}
}

func goroutinesDoNotPileUp(t *trial) {
	const first, more, room = 20, 120, 30
	mine := t.name()
	pprof.Do(t.Context(), pprof.Labels(goroutineLabel, mine), func(context.Context) {
		d, held := t.client(), t.name()
		g := t.take(d, t.request(held), "of a free name")
		t.acquires(d, held, first)
		before := countGoroutines(goroutinesOf(t, mine))
		t.acquires(d, held, more)
		// A driver may take one TTL to remove the leftover of a cancelled acquire (clause A4).
		patience := t.within(t.ttl + slack)
		after := goroutinesOf(t, mine)
		for countGoroutines(after) > before+room && patience.Err() == nil {
			pause(patience, 20*time.Millisecond)
			after = goroutinesOf(t, mine)
		}
		if n := countGoroutines(after); n > before+room {
			slices.SortFunc(after, func(x, y string) int {
				return countGoroutines([]string{y}) - countGoroutines([]string{x})
			})
			t.Latef("%d more goroutines after %d more acquires, all of which have returned; most of them at %s",
				n-before, 3*more, after[0])
		}
		t.release(d, g, "by the holder")
	})
}

// countGoroutines counts the goroutines of some stacks; each stack begins with its number of goroutines.
func countGoroutines(stacks []string) (n int) {
	for _, s := range stacks {
		for line := range strings.Lines(s) {
			same := 0
			if _, err := fmt.Sscanf(line, "%d @", &same); err == nil {
				n += same
				break
			}
		}
	}
	return n
}

// goroutineLabel marks the goroutines that a driver starts, directly or not: goroutines inherit labels. Goroutines of
// the harness, such as those of a proxy or an operator's client, come and go without this label.
const goroutineLabel = "fencelock-conformance"

// goroutinesOf returns the stacks of all goroutines with the label value mine.
func goroutinesOf(t *trial, mine string) (stacks []string) {
	var all strings.Builder
	if err := pprof.Lookup("goroutine").WriteTo(&all, 1); err != nil {
		t.Fatalf("the stacks of goroutines: %v", err)
	}
	label := fmt.Sprintf("%q:%q", goroutineLabel, mine)
	for g := range strings.SplitSeq(all.String(), "\n\n") {
		if strings.Contains(g, label) {
			stacks = append(stacks, g)
		}
	}
	return stacks
}

func serviceKeepsNothing(t *trial) {
	a, b := t.client(), t.client()
	t.use(a, b)
	// Earlier clauses have left silent holders: their entries end with the short TTL. Entries of unreleased holds end
	// with the long TTL, and must not exist.
	patience := t.within(3*t.ttl + 2*slack)
	var left []string
	for {
		var err error
		if left, err = t.h.Leftovers(); err != nil {
			t.Fatalf("Leftovers = %v", err)
		}
		if len(left) == 0 {
			return
		}
		if patience.Err() != nil {
			break
		}
		pause(patience, 50*time.Millisecond)
	}
	t.Latef("the service keeps %d entries: %q", len(left), left[:min(len(left), 10)])
}
