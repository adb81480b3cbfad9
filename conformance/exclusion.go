package conformance

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
)

var exclusionClauses = []Clause{
	{
		ID: "X1", Group: "exclusion", Slug: "one-holder-at-a-time", crowd: true, run: oneHolderAtATime,
		Rule: "of a hundred contenders from several clients, one holds the lock at a time, and each acquires it",
	},
	{
		ID: "X2", Group: "exclusion", Slug: "attempt-finds-it-held", run: attemptFindsItHeld,
		Rule: "an attempt returns ErrHeld while another request holds the name, " +
			"even in the same client; other names stay free",
	},
	{
		ID: "X3", Group: "exclusion", Slug: "beliefs-do-not-overlap", run: beliefsDoNotOverlap,
		Rule: "no two grants of a name are valid (until SentAt + validity) at the same time, even when holders die",
	},
}

func oneHolderAtATime(t *trial) {
	const clients, contenders, rounds = 8, 100, 3
	name := t.name()
	drivers := make([]backend.Driver, clients)
	for i := range drivers {
		drivers[i] = t.client()
	}
	ctx, moved := t.whileMoving(10 * slack)
	enough := time.Now().Add(2 * slack) // on a slow machine one round each suffices
	var unprotected, entered, inside atomic.Int64
	var all sync.WaitGroup
	for i := range contenders {
		all.Go(func() {
			d := drivers[i%clients]
			for round := range rounds {
				if round > 0 && time.Now().After(enough) {
					return
				}
				r := t.request(name)
				r.Wait = true
				g, err := d.Acquire(ctx, r)
				if err != nil {
					t.Errorf("contender %d: %v (%v)", i, err, context.Cause(ctx))
					return
				}
				moved()
				if n := inside.Add(1); n != 1 {
					t.Violatedf("%d contenders held the lock at once", n)
				}
				entered.Add(1)
				seen := unprotected.Load()
				runtime.Gosched()
				unprotected.Store(seen + 1)
				inside.Add(-1)
				if err := d.Release(ctx, g); err != nil {
					t.Errorf("contender %d: release: %v", i, err)
				}
			}
		})
	}
	all.Wait()
	if got, want := unprotected.Load(), entered.Load(); got != want {
		t.Violatedf("a counter that only the lock protects is %d after %d increments", got, want)
	}
}

func attemptFindsItHeld(t *trial) {
	a, b := t.client(), t.client()
	name, other := t.name(), t.name()
	g := t.take(a, t.request(name), "of a free name")
	t.mustBeHeld(b, name, "from another client")
	t.mustBeHeld(a, name, "from the holder's own client")
	t.mustBeFree(b, other, "on another name")
	t.release(a, g, "by the holder")
	t.mustBeFree(b, name, "after the release")
}

// belief is the time in which a holder considers its hold valid.
type belief struct{ from, to backend.Instant }

// life is a driver that can die. Without a link its death is that it makes no more calls, which suffices for a driver
// without a session.
type life struct {
	driver backend.Driver
	link   fault.Link
}

// lives returns n lives, or a single one if links cannot be cut.
func (t *trial) lives(n int) []life {
	if t.h.Linked == nil {
		return []life{{driver: t.client()}}
	}
	var all []life
	for range n {
		d, link := t.linked()
		all = append(all, life{d, link})
	}
	return all
}

func beliefsDoNotOverlap(t *trial) {
	const contenders = 6
	name := t.name()
	ctx := t.within(4 * t.ttl)
	var mu sync.Mutex
	var beliefs []belief
	var all sync.WaitGroup
	for range contenders {
		lives := t.lives(3)
		all.Go(func() {
			for ctx.Err() == nil {
				d := lives[0].driver
				r := t.brief(name)
				r.Wait = true
				g, err := d.Acquire(ctx, r)
				switch {
				case err == nil:
				case errors.Is(err, backend.ErrUnknown):
					_ = t.releaseSettled(d, r.Grant()) // a valid answer; its leftover is released
					continue
				case vague(err), errors.Is(err, context.Canceled):
					pause(ctx, 10*time.Millisecond)
					continue
				default:
					t.Errorf("contender: %v", err)
					return
				}
				held := belief{from: t.now(), to: g.SentAt.Add(t.desc.Validity(g.TTL))}
				pause(ctx, rand.N(t.ttl/8))
				switch dies := rand.N(8) == 0; {
				case dies && lives[0].link == nil:
				case dies && len(lives) > 1:
					lives[0].link.Drop(fault.Both)
					lives = lives[1:]
				default:
					held.to = min(held.to, t.now())
					if err := d.Release(t.within(slack), g); err != nil && !errors.Is(err, backend.ErrNotHeld) {
						t.Errorf("release: %v", err)
					}
				}
				mu.Lock()
				beliefs = append(beliefs, held)
				mu.Unlock()
			}
		})
	}
	all.Wait()
	slices.SortFunc(beliefs, func(x, y belief) int { return int(x.from - y.from) })
	for i := 1; i < len(beliefs); i++ {
		if by := beliefs[i-1].to.Sub(beliefs[i].from); by > 0 {
			t.Violatedf("hold %d began %v before the end of the one before", i, by)
		}
	}
	if len(beliefs) < 4 {
		t.Latef("%d grants in %v are too few for a verdict; a slow service or machine needs a longer Harness.TTL",
			len(beliefs), 4*t.ttl)
	}
	t.Logf("%d grants", len(beliefs))
}
