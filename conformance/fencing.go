package conformance

import (
	"errors"
	"sync"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

var fencingClauses = []Clause{
	{
		ID: "F1", Group: "fencing", Slug: "increases-across-release", caps: backend.CapFencing,
		run:  increasesAcrossRelease,
		Rule: "a token is greater than every earlier token of the same name, across releases, request ids and clients",
	},
	{
		ID: "F2", Group: "fencing", Slug: "increases-across-expiry", caps: backend.CapFencing, needs: needLink,
		run:  increasesAcrossExpiry,
		Rule: "a token is greater than every earlier token of the same name, across the expiry of a hold",
	},
	{
		ID: "F3", Group: "fencing", Slug: "increases-across-deletion", caps: backend.CapFencing, needs: needEvict,
		run:  increasesAcrossDeletion,
		Rule: "a token is greater than every earlier token of the same name, across the deletion of its entry",
	},
	{
		ID: "F4", Group: "fencing", Slug: "increases-in-the-order-of-grants", caps: backend.CapFencing,
		run:  increasesInTheOrderOfGrants,
		Rule: "under contention, tokens increase in the order of the grants: the grant allocates the token",
	},
	{
		ID: "F5", Group: "fencing", Slug: "stale-write-is-refused", caps: backend.CapFencing, needs: needLink,
		run:  staleWriteIsRefused,
		Rule: "a guard that has admitted a rival's token refuses the write of a holder whose lease has expired",
	},
	{
		ID: "F6", Group: "fencing", Slug: "stays-for-one-hold", caps: backend.CapFencing, run: staysForOneHold,
		Rule: "tokens are exclusive, fit in 63 bits, and stay the same for one hold however often it is acquired or renewed",
	},
	{
		ID: "F7", Group: "fencing", Slug: "one-token-space", caps: backend.CapFencing, run: oneTokenSpace,
		Rule: "after its first grant, every client reports the same token space",
	},
}

// tokens checks that tokens increase.
type tokens struct {
	t    *trial
	last fencing.Token
}

func (k *tokens) next(g backend.Grant, across string) {
	if g.Token <= k.last {
		k.t.Violatedf("across %s: token %v after %v, want a greater one", across, g.Token, k.last)
	}
	k.last = g.Token
}

func increasesAcrossRelease(t *trial) {
	a := t.client()
	name := t.name()
	k := tokens{t: t}
	for range 5 {
		g := t.take(a, t.request(name), "of a free name")
		k.next(g, "release")
		t.release(a, g, "by the holder")
	}
	again := t.request(name)
	for range 3 {
		g := t.take(a, again, "with a repeated request id")
		k.next(g, "release and the same request id")
		t.release(a, g, "by the holder")
	}
	for range 3 {
		fresh := t.client()
		g := t.take(fresh, t.request(name), "from a new client")
		k.next(g, "clients")
		w := t.wait(t.within(5*slack), a, t.request(name))
		t.queued(fresh, name, 1)
		t.release(fresh, g, "by the new client")
		next := t.got(w, promptly, "after the release")
		k.next(next, "a hand-over")
		t.release(a, next, "by the waiter")
		_ = closeWithin(fresh, slack)
	}
}

func increasesAcrossExpiry(t *trial) {
	name := t.name()
	rival := t.client()
	k := tokens{t: t}
	for range 2 {
		_, _, g := t.silent(name)
		k.next(g, "release")
		r := t.request(name)
		r.Wait = true
		next, err := rival.Acquire(t.within(g.TTL+slack), r)
		if err != nil {
			t.Fatalf("acquire after the holder went silent = %v", err)
		}
		k.next(next, "expiry")
		t.release(rival, next, "by the rival")
	}
}

func increasesAcrossDeletion(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()
	k := tokens{t: t}
	for range 3 {
		g := t.take(a, t.request(name), "of a free name")
		k.next(g, "deletion and release")
		t.h.Server.Evict(t, name)
		next := t.take(b, t.request(name), "after the entry was deleted")
		k.next(next, "deletion")
		t.release(b, next, "by the successor")
		t.h.Server.Evict(t, name)
	}
}

func increasesInTheOrderOfGrants(t *trial) {
	const contenders, rounds = 16, 5
	name := t.name()
	ctx := t.within(20 * slack)
	var all sync.WaitGroup
	var mu sync.Mutex // superfluous under the lock, but the race detector needs it
	var seen []fencing.Token
	for range contenders {
		d := t.client()
		all.Go(func() {
			for range rounds {
				r := t.request(name)
				r.Wait = true
				g, err := d.Acquire(ctx, r)
				if err != nil {
					t.Errorf("contender: %v", err)
					return
				}
				mu.Lock()
				seen = append(seen, g.Token)
				mu.Unlock()
				t.release(d, g, "by a contender")
			}
		})
	}
	all.Wait()
	for i := 1; i < len(seen); i++ {
		if seen[i] <= seen[i-1] {
			t.Violatedf("hold %d has token %v, the one before has %v", i, seen[i], seen[i-1])
		}
	}
}

func staleWriteIsRefused(t *trial) {
	name := t.name()
	rival := t.client()
	space := t.desc.TokenSpace
	var guard fencing.Memory
	_, _, sleeper := t.silent(name)
	if err := guard.Check(t.Context(),
		fencing.Claim{Resource: "resource", Token: sleeper.Token, Space: space}); err != nil {
		t.Errorf("write by the holder = %v, want it admitted", err)
	}
	r := t.request(name)
	r.Wait = true
	g, err := rival.Acquire(t.within(sleeper.TTL+slack), r)
	if err != nil {
		t.Fatalf("acquire after the holder went silent = %v", err)
	}
	if err := guard.Check(t.Context(), fencing.Claim{Resource: "resource", Token: g.Token, Space: space}); err != nil {
		t.Errorf("write by the rival = %v, want it admitted", err)
	}
	if err := guard.Check(t.Context(),
		fencing.Claim{Resource: "resource", Token: sleeper.Token, Space: space}); !errors.Is(err, fencing.ErrStale) {
		t.Errorf("write by the holder that slept past its lease = %v, want ErrStale", err)
	}
	t.release(rival, g, "by the rival")
}

func staysForOneHold(t *trial) {
	d := t.client()
	r := t.brief(t.name())
	g := t.take(d, r, "of a free name")
	if !g.Token.Valid() || !g.Token.Exclusive() || g.Token >= 1<<63 {
		t.Errorf("token %d is no exclusive token of 63 bits", uint64(g.Token))
	}
	for range 3 {
		pause(t.within(slack), t.ttl/4)
		if renewal := t.renew(d, g); renewal.Err != nil {
			t.Errorf("renewal = %v", renewal.Err)
		}
		again := t.take(d, r, "with the id of a living hold")
		if again.Token != g.Token {
			t.Errorf("token %v, want %v as before", again.Token, g.Token)
		}
		g = again
	}
	t.release(d, g, "by the holder")
}
