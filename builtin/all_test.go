package builtin_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
)

func setOf(names ...string) []backend.Request {
	var rs []backend.Request
	for _, name := range names {
		rs = append(rs, request(name, time.Minute))
	}
	return rs
}

func takeAll(t *testing.T, d *builtin.Driver, rs []backend.Request) []backend.Grant {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	grants, err := d.AcquireAll(ctx, rs)
	if err != nil {
		t.Fatal(err)
	}
	for i, g := range grants {
		if g.Name != rs[i].Name || g.RequestID != rs[i].RequestID || !g.Token.Exclusive() {
			t.Fatalf("for %s there is %+v", rs[i].Name, g)
		}
	}
	return grants
}

// beginAll begins to wait for a set, and returns when it waits for the last of its names.
func beginAll(t *testing.T, d *builtin.Driver, rs []backend.Request) (<-chan []backend.Grant, context.CancelFunc) {
	t.Helper()
	for i := range rs {
		rs[i].Wait = true
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	out := make(chan []backend.Grant, 1)
	go func() {
		defer close(out)
		grants, err := d.AcquireAll(ctx, rs)
		if err == nil {
			out <- grants
		} else if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}()
	t.Cleanup(func() { cancel(); <-out })
	last := rs[len(rs)-1].Name
	eventually(t, "a set waits for "+last, func() bool { return waitersOf(t, d, last) == 1 })
	return out, cancel
}

func TestSetIsAllOrNone(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	d, rival := attached(t, n), attached(t, n)
	b := take(t, rival, request("b", time.Minute))
	_, err := d.AcquireAll(t.Context(), setOf("a", "b", "c"))
	var held *backend.HeldError
	if !errors.As(err, &held) || held.Name != "b" || held.Holder != "test" {
		t.Fatalf("%v, want that b is held", err)
	}
	giveBack(t, rival, take(t, rival, request("a", time.Minute)), take(t, rival, request("c", time.Minute)))
	granted, _ := beginAll(t, d, setOf("c", "b", "a"))
	if len(holdersOf(t, rival, "a")) != 0 || len(holdersOf(t, rival, "c")) != 0 {
		t.Error("a set that waits holds some of its names")
	}
	refused(t, rival, request("a", time.Minute), backend.ErrHeld) // it came later
	giveBack(t, rival, b)
	grants, ok := <-granted
	if !ok || len(grants) != 3 || !grants[0].Queued {
		t.Fatalf("granted %+v", grants)
	}
	for _, r := range d.Renew(t.Context(), grants) {
		if r.Err != nil {
			t.Error(r.Err)
		}
	}
	giveBack(t, d, grants[1])
	take(t, rival, request("b", time.Minute))
	refused(t, rival, request("a", time.Minute), backend.ErrHeld)
}

func TestSetIsOneByItsRequestIDs(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	d, other := attached(t, n), attached(t, n)
	told := make(chan backend.Reason, 8)
	rs := setOf("x", "y")
	for i := range rs {
		rs[i].Lost = func(loss backend.Loss) { told <- loss.Reason }
	}
	first := takeAll(t, d, rs)
	again := []backend.Request{rs[1], rs[0]}
	again[0].Lost, again[1].Lost = nil, nil
	for i, g := range takeAll(t, d, again) {
		if want := first[1-i]; g.Token != want.Token || g.Name != want.Name {
			t.Errorf("again: %+v, want %+v", g, want)
		}
	}
	for i := range rs {
		rs[i].Lost = func(loss backend.Loss) { told <- loss.Reason }
	}
	takeAll(t, d, rs) // the last caller is notified of the loss
	rs[0].Lost, rs[1].Lost = nil, nil
	for i, g := range takeAll(t, other, rs) {
		if g.Token != first[i].Token {
			t.Errorf("by another client: %+v, want %+v", g, first[i])
		}
	}
	for range rs {
		select {
		case reason := <-told:
			if reason != backend.ReasonEvicted {
				t.Errorf("reason %q", reason)
			}
		case <-time.After(patience):
			t.Fatal("the first client was not notified that another client has its holds")
		}
	}
	// An operator force-releases one name: the driver releases the others and acquires the whole set again.
	if err := d.ForceRelease(t.Context(), backend.ForceRequest{Name: "x", Reason: "maintenance"}); err != nil {
		t.Fatal(err)
	}
	anew := takeAll(t, d, rs)
	if anew[0].Token <= first[1].Token || anew[1].Token <= first[1].Token {
		t.Errorf("tokens %v and %v after %v, want new ones", anew[0].Token, anew[1].Token, first)
	}
	for _, r := range rs {
		if err := d.Release(t.Context(), r.Grant()); err != nil {
			t.Errorf("release of what a request left: %v", err)
		}
	}
	takeAll(t, other, setOf("x", "y"))
}

func TestSetThatStopsWaitingLeavesNothing(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	d, rival := attached(t, n), attached(t, n)
	b := take(t, rival, request("b", time.Minute))
	granted, cancel := beginAll(t, d, setOf("a", "b"))
	cancel()
	if grants, ok := <-granted; ok {
		t.Errorf("granted %+v", grants)
	}
	eventually(t, "its places in both queues are gone", func() bool {
		return waitersOf(t, rival, "a")+waitersOf(t, rival, "b") == 0
	})
	giveBack(t, rival, b)
	takeAll(t, rival, setOf("a", "b"))
	// A request id that waits for a set cannot acquire one of its names alone.
	rs := setOf("b", "free")
	_, cancel = beginAll(t, d, rs)
	if _, err := d.Acquire(t.Context(), rs[1]); !errors.Is(err, backend.ErrInvalidOption) {
		t.Errorf("one name of a set that waits: %v, want ErrInvalidOption", err)
	}
	stillWaiting(t, rival, "b", 1)
	cancel()
}

func TestSetBeyondTheServersLimit(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	d := attached(t, n)
	var names []string
	for i := range 65 {
		names = append(names, fmt.Sprintf("many/%d", i))
	}
	_, err := d.AcquireAll(t.Context(), setOf(names...))
	if !errors.Is(err, backend.ErrUnsupported) || len(holdersOf(t, d, names[0])) != 0 {
		t.Errorf("too many names: %v, want ErrUnsupported, and nothing held", err)
	}
	takeAll(t, d, setOf(names[:64]...))
	parts := []backend.Request{below("shop"), below("shop/eu")} // nobody can hold both
	if _, err := d.AcquireAll(t.Context(), parts); !errors.Is(err, backend.ErrInvalidOption) {
		t.Errorf("a set that excludes itself: %v, want ErrInvalidOption", err)
	}
}

// contenders take overlapping sets of a few names, in any order.
type contenders struct {
	t     *testing.T
	names []string
	owner []atomic.Int64  // the worker that holds a name, 0 for nobody
	last  []atomic.Uint64 // its last token
	grown []atomic.Int64  // grants, by worker
	gaveUp,
	refused atomic.Int64
}

func newContenders(t *testing.T, workers int) *contenders {
	c := &contenders{t: t, names: []string{"s/0", "s/1", "s/2", "s/3", "s/4"}, grown: make([]atomic.Int64, workers)}
	c.owner, c.last = make([]atomic.Int64, len(c.names)), make([]atomic.Uint64, len(c.names))
	return c
}

// work takes sets until stop is closed. Some of its acquires wait without a limit, some only briefly, and some do not
// wait.
func (c *contenders) work(d *builtin.Driver, self int, stop <-chan struct{}) {
	random := rand.New(rand.NewPCG(uint64(self), 7))
	for round := 0; ; round++ {
		select {
		case <-stop:
			return
		default:
		}
		chosen := random.Perm(len(c.names))[:2+random.IntN(2)]
		var rs []backend.Request
		for _, i := range chosen {
			r := request(c.names[i], time.Minute)
			r.Wait = round%4 != 0
			rs = append(rs, r)
		}
		limit := patience
		if round%4 == 1 {
			limit = time.Duration(random.IntN(5)) * time.Millisecond
		}
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		grants, err := d.AcquireAll(ctx, rs)
		cancel()
		switch {
		case err == nil:
			c.check(d, self+1, chosen, grants)
		case errors.Is(err, backend.ErrUnknown):
			for _, r := range rs {
				c.release(d, r.Grant())
			}
			c.gaveUp.Add(1)
		case errors.Is(err, context.DeadlineExceeded) && limit < patience:
			c.gaveUp.Add(1)
		case errors.Is(err, backend.ErrHeld) && !rs[0].Wait, errors.Is(err, backend.ErrUnavailable):
			c.refused.Add(1)
		default:
			c.t.Errorf("worker %d: %v", self, err)
			return
		}
	}
}

// check verifies for a moment that the worker alone holds all names of a set, and releases them.
func (c *contenders) check(d *builtin.Driver, self int, chosen []int, grants []backend.Grant) {
	for at, i := range chosen {
		if !c.owner[i].CompareAndSwap(0, int64(self)) {
			c.t.Errorf("%s was granted to %d and is held by %d", c.names[i], self, c.owner[i].Load())
		}
		if token := uint64(grants[at].Token); c.last[i].Swap(token) >= token {
			c.t.Errorf("%s has token %d, which is not higher than the one before", c.names[i], token)
		}
	}
	c.grown[self-1].Add(1)
	for at, i := range chosen {
		c.owner[i].Store(0)
		c.release(d, grants[at])
	}
}

// release retries until the name is certainly not held.
func (c *contenders) release(d *builtin.Driver, g backend.Grant) {
	for end := time.Now().Add(patience); ; {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		err := d.Release(ctx, g)
		cancel()
		switch {
		case err == nil, errors.Is(err, backend.ErrNotHeld):
			return
		case time.Now().After(end):
			c.t.Errorf("release of %s: %v", g.Name, err)
			return
		}
	}
}

// progress waits until every worker has been granted the given number of further sets.
func (c *contenders) progress(sets int64) {
	c.t.Helper()
	for i := range c.grown {
		goal := c.grown[i].Load() + sets
		eventually(c.t, fmt.Sprintf("worker %d has %d sets more", i, sets), func() bool { return c.grown[i].Load() >= goal })
	}
}

// run runs the workers on the drivers while it calls while.
func (c *contenders) run(drivers []*builtin.Driver, while func()) {
	stop := make(chan struct{})
	var all sync.WaitGroup
	for i := range c.grown {
		all.Go(func() { c.work(drivers[i%len(drivers)], i, stop) })
	}
	func() {
		defer all.Wait()
		defer close(stop)
		while()
	}()
	if c.gaveUp.Load() == 0 || c.refused.Load() == 0 {
		c.t.Errorf("%d gave up and %d were refused: there was no contention", c.gaveUp.Load(), c.refused.Load())
	}
	eventually(c.t, "nothing is left", func() bool {
		for _, name := range c.names {
			if len(holdersOf(c.t, drivers[0], name)) > 0 || waitersOf(c.t, drivers[0], name) > 0 {
				return false
			}
		}
		return true
	})
}

func TestSetsThatOverlap(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	drivers := []*builtin.Driver{attached(t, n), attached(t, n), attached(t, n)}
	c := newContenders(t, 9)
	c.run(drivers, func() { c.progress(10) })
}

// The leader dies while clients take, await, abandon and release sets.
func TestSetsAcrossTheDeathOfTheLeader(t *testing.T) {
	t.Parallel()
	p := startProcesses(t, 3)
	var drivers []*builtin.Driver
	for range 2 {
		d := builtin.New(p.addrs(), nil)
		t.Cleanup(func() { _ = d.Close(context.Background()) })
		drivers = append(drivers, d)
	}
	c := newContenders(t, 6)
	c.run(drivers, func() {
		c.progress(3)
		within(t, func(ctx context.Context) error {
			leader, term, err := p.lead(ctx, 0)
			if err != nil {
				return err
			}
			if err := p.kill(ctx, leader); err != nil {
				return err
			}
			_, _, err = p.lead(ctx, term)
			return err
		})
		c.progress(3)
	})
}
