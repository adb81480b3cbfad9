package conformance

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/fencing"
)

// electionClauses cover features of the library over any driver: elections, several names at once, a delay after a
// loss.
var electionClauses = []Clause{
	{
		ID: "D10", Group: "core", Slug: "one-leader-at-a-time", needs: needLink, run: oneLeaderAtATime,
		rounds: func() int { _, kills := electionSize(); return kills / 3 },
		Rule:   "of several candidates, at most one leads at a time, while the leaders are cut off one after another",
	},
	{
		ID: "D11", Group: "core", Slug: "several-names-without-deadlock", run: severalNamesWithoutDeadlock,
		Rule: "AcquireAll of overlapping sets in any order succeeds for all contenders, " +
			"and each name has one holder at a time",
	},
	{
		ID: "D12", Group: "core", Slug: "lock-delay-keeps-it-closed", needs: needLink, run: lockDelayKeepsItClosed,
		Rule: "with a lock delay, a name stays held for the delay after its lease is lost, " +
			"and a release frees it immediately",
	},
}

// electionSize returns the number of candidates and of leaders that are cut off: 8 and 3, or the number in
// FENCELOCK_KILLS, and twice as many candidates.
func electionSize() (candidates, kills int) {
	if kills, _ = strconv.Atoi(os.Getenv("FENCELOCK_KILLS")); kills < 1 {
		return 8, 3
	}
	return 2 * kills, kills
}

func oneLeaderAtATime(t *trial) {
	candidates, kills := electionSize()
	name := t.name()
	ctx, stop := context.WithCancel(t.within(time.Duration(kills)*(t.ttl+slack) + 10*slack))
	defer stop()
	var mu sync.Mutex // protects the following fields
	leading := map[*fencelock.Lease]bool{}
	var last fencing.Token
	terms := make(chan fault.Link, candidates*(kills+1))
	var all sync.WaitGroup
	for range candidates {
		d, link := t.linked()
		c := t.core(d, nil)
		all.Go(func() {
			err := c.Lead(ctx, name, func(ctx context.Context, lease *fencelock.Lease) error {
				mu.Lock()
				// On a busy machine a lease's context may end late; Err reads the clock and is exact.
				for other := range leading {
					if other.Err() == nil {
						t.Violatedf("two leases are valid at once; the first for another %v",
							time.Until(other.Deadline()))
					}
				}
				leading[lease] = true
				if token := lease.Grant().Token; token.Valid() {
					if token <= last {
						t.Violatedf("term %v after %v", token, last)
					}
					last = token
				}
				mu.Unlock()
				terms <- link
				<-ctx.Done()
				mu.Lock()
				delete(leading, lease)
				mu.Unlock()
				return ctx.Err()
			})
			if !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Lead = %v, want it to end with its context", err)
			}
		})
	}
	var cut fault.Link
	for kill := range kills + 1 {
		select {
		case leader := <-terms:
			if cut != nil {
				cut.Pass() // the former leader is a candidate again
			}
			if cut = leader; kill < kills {
				leader.Drop(fault.Both)
			}
		case <-ctx.Done():
			t.Latef("no candidate leads after %d leaders were cut off", kill)
		}
	}
	stop()
	all.Wait()
	t.Logf("%d candidates, %d leaders cut off", candidates, kills)
}

func severalNamesWithoutDeadlock(t *trial) {
	const clients, contenders, rounds = 3, 6, 4
	base := t.name()
	names := []string{base + "/a", base + "/b", base + "/c", base + "/d"}
	var mu sync.Mutex
	held := map[string]int{}
	count := func(some []string, n int) {
		mu.Lock()
		defer mu.Unlock()
		for _, name := range some {
			if held[name] += n; held[name] > 1 {
				t.Errorf("%q has %d holders", name, held[name])
			}
		}
	}
	cores := make([]*fencelock.Client, clients)
	for i := range cores {
		cores[i] = t.core(t.client(), func(o *fencelock.Options) { o.TTL = t.long() })
	}
	ctx := t.within(20 * slack)
	var all sync.WaitGroup
	for i := range contenders {
		all.Go(func() {
			for range rounds {
				some := slices.Clone(names)
				rand.Shuffle(len(some), func(i, j int) { some[i], some[j] = some[j], some[i] })
				some = some[:2+rand.IntN(2)]
				err := cores[i%clients].DoAll(ctx, some, func(context.Context, fencelock.Leases) error {
					count(some, 1)
					pause(ctx, time.Millisecond)
					count(some, -1)
					return nil
				})
				if err != nil {
					t.Errorf("contender %d: %v", i, err)
					return
				}
			}
		})
	}
	all.Wait()
	d := t.client()
	for _, name := range names {
		t.opensWithin(d, name, slack, "after all contenders")
	}
}

func lockDelayKeepsItClosed(t *trial) {
	rival := t.client()
	d, link := t.linked()
	delay := max(time.Second, t.desc.TTLGranularity)
	if t.desc.MaxTTL > 0 && t.ttl+delay > t.desc.MaxTTL {
		t.inapplicable("the driver accepts no TTL longer than Harness.TTL, so there is no room for a lock delay")
	}
	c := t.core(d, func(o *fencelock.Options) { o.LockDelay = delay })
	name := t.name()
	lease, err := c.Acquire(t.within(ample), name)
	if err != nil {
		t.Fatalf("Acquire with a lock delay = %v", err)
	}
	if err := lease.Release(t.within(2 * slack)); err != nil {
		t.Errorf("Release = %v", err)
	}
	t.mustBeFree(rival, name, "after a release with a lock delay")
	lease, err = c.Acquire(t.within(ample), name)
	if err != nil {
		t.Fatalf("Acquire with a lock delay = %v", err)
	}
	link.Drop(fault.Both)
	held := lease.Context()
	select {
	case <-held.Done():
	case <-t.within(t.ttl + slack).Done():
		t.FatalLatef("the lease outlives its TTL of %v", t.ttl)
	}
	lost := t.now()
	r := t.request(name)
	r.Wait = true
	g, err := rival.Acquire(t.within(t.ttl+delay+2*slack), r)
	if err != nil {
		t.Fatalf("after the delay the name did not open: %v", err)
	}
	if closed := t.now().Sub(lost); closed < delay {
		t.Latef("the name opened %v after the loss, want at least %v", closed, delay)
	}
	t.release(rival, g, "by the rival")
}
