package guardtest

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/fencelock/fencelock/fencing"
)

var admitClauses = []Clause{
	{
		ID: "A1", Group: "admits", Slug: "again", run: admitsAgain,
		Rule: "the highest token is admitted repeatedly, and so is every higher token",
	},
	{
		ID: "A2", Group: "admits", Slug: "each-resource-by-itself", run: admitsEachResource,
		Rule: "names that differ in any byte are different resources",
	},
	{
		ID: "A3", Group: "admits", Slug: "all-63-bits", run: admitsAllBits,
		Rule: "tokens up to fencing.MaxToken are distinguished and ordered as numbers",
	},
}

func admitsAgain(t *trial) {
	a, b, name := t.client(), t.client(), t.resource()
	for _, token := range []fencing.Token{1, 1, 2, 2, 2, 9, 10, 10, 100} {
		t.admit(a, name, token)
		t.admit(b, name, token)
	}
}

func admitsEachResource(t *trial) {
	c, base := t.client(), t.resource()
	names := []string{
		base, base + "/x", base + "/X", base + "/x ", " " + base + "/x", base + "/é", base + "/e\u0301", base + "/%",
		base + "/_", base + "/x/",
	}
	long := base + strings.Repeat("x", fencing.MaxResourceBytes-len(base)-1)
	names = append(names, long, long+"x", long+"y") // they differ at the greatest length
	for i, name := range names {
		t.admit(c, name, fencing.Token(100-i)) // a name that was taken for one before it would be stale
	}
	for i, name := range names {
		if highest := t.highest(c, name); highest != fencing.Token(100-i) {
			t.errorf("the guard remembers %v for %q, want %d", highest, name, 100-i)
		}
	}
}

func admitsAllBits(t *trial) {
	c, name := t.client(), t.resource()
	// Numbers where text without leading zeros, or a float, loses the order.
	order := []fencing.Token{
		9, 10, 99, 1<<31 - 1, 1 << 31, 1<<32 + 1, 1 << 53, 1<<53 + 1, 1<<61 + 1, fencing.MaxToken - 1, fencing.MaxToken,
	}
	for i, token := range order {
		t.admit(c, name, token)
		for _, before := range order[:i] {
			t.refuse(c, t.claim(name, before), fencing.ErrStale, "after "+token.String())
		}
	}
}

var monotoneClauses = []Clause{
	{
		ID: "M1", Group: "monotone", Slug: "whatever-the-order", run: monotone,
		Rule: "of thousands of concurrent checks, no check admits a token lower than a token admitted before the check began",
	},
	{
		ID: "M2", Group: "monotone", Slug: "from-the-first-token", run: monotoneFromTheFirst,
		Rule: "of concurrent first tokens of a resource, the highest admitted token is remembered",
	},
}

func monotone(t *trial) {
	const resources = 4
	var names [resources]string
	var known [resources]atomic.Uint64 // the highest token with a returned admission
	for i := range names {
		names[i] = t.resource()
	}
	var left, admitted, stale atomic.Int64
	left.Store(int64(t.h.Checks))
	t.together(t.h.Clients, func(c *Client) {
		for left.Add(-1) >= 0 && !t.failed() {
			i := rand.IntN(resources)
			floor := known[i].Load()
			token := fencing.Token(max(1, floor+rand.Uint64N(6)-min(floor, 2))) // about half of them stale
			err := t.check(c, t.claim(names[i], token))
			switch {
			case errors.Is(err, fencing.ErrStale):
				stale.Add(1)
				continue
			case err != nil:
				t.errorf("check of token %v = %v, want it admitted or ErrStale", token, err)
				return
			case uint64(token) < floor:
				t.errorf("token %v was admitted after %v", token, floor)
			}
			admitted.Add(1)
			raise(&known[i], uint64(token))
		}
	})
	if t.failed() {
		return
	}
	c := t.client()
	for i, name := range names {
		if highest := t.highest(c, name); uint64(highest) != known[i].Load() {
			t.errorf("the guard remembers %v for %q, and has admitted %d", highest, name, known[i].Load())
		}
	}
	t.notef("%d checks by %d clients: %d admitted, %d refused as stale, 0 stale ones admitted",
		t.h.Checks, t.h.Clients, admitted.Load(), stale.Load())
	if admitted.Load() == 0 || stale.Load() == 0 {
		t.errorf("%d were admitted and %d refused, want some of both", admitted.Load(), stale.Load())
	}
}

func monotoneFromTheFirst(t *trial) {
	const rounds, contenders = 25, 6
	var names [rounds]string
	var highest [rounds]atomic.Uint64
	for i := range names {
		names[i] = t.resource()
	}
	var gates [rounds]sync.WaitGroup
	for i := range gates {
		gates[i].Add(contenders)
	}
	t.together(contenders, func(c *Client) {
		for i, name := range names {
			token := fencing.Token(1 + rand.Uint64N(1000))
			gates[i].Done()
			gates[i].Wait()
			switch err := t.check(c, t.claim(name, token)); {
			case err == nil:
				raise(&highest[i], uint64(token))
			case !errors.Is(err, fencing.ErrStale):
				t.errorf("check of token %v = %v, want it admitted or ErrStale", token, err)
			}
		}
	})
	c := t.client()
	for i, name := range names {
		if got := t.highest(c, name); uint64(got) != highest[i].Load() {
			t.errorf("the guard remembers %v, and has admitted %d", got, highest[i].Load())
		}
	}
}

// together calls f in n goroutines, each with its own client, and waits for all.
func (t *trial) together(n int, f func(*Client)) {
	clients := make([]*Client, n)
	for i := range clients {
		clients[i] = t.client()
	}
	var all sync.WaitGroup
	for _, c := range clients {
		all.Go(func() { f(c) })
	}
	all.Wait()
}

// raise makes the number at least n.
func raise(number *atomic.Uint64, n uint64) {
	for {
		old := number.Load()
		if n <= old || number.CompareAndSwap(old, n) {
			return
		}
	}
}

var errorClauses = []Clause{
	{
		ID: "E1", Group: "errors", Slug: "ended-context", run: endedContext,
		Rule: "a check with an ended context admits nothing and returns the context's error",
	},
}

func endedContext(t *trial) {
	c, name := t.client(), t.resource()
	t.admit(c, name, 5)
	ended, cancel := context.WithCancel(t.ctx)
	cancel()
	if err := c.Check(ended, t.claim(name, 6)); !errors.Is(err, context.Canceled) {
		t.errorf("check with an ended context = %v, want context.Canceled", err)
	}
	t.admit(t.client(), name, 6)
}
