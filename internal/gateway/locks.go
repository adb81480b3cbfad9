package gateway

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/principal"
)

// pollMost is the maximum wait of one request: less than the 60 s after which load balancers time out.
const pollMost = 50 * time.Second

// pollWithin returns the time for which the gateway keeps a place, or a grant, for a client that does not poll.
func pollWithin(ttl time.Duration) time.Duration {
	return min(max(ttl/3, 200*time.Millisecond), 30*time.Second)
}

// wish is a client's request for one name.
type wish struct {
	Name         string
	Kind         string
	Permits      int
	Limit        int
	Hierarchical bool
	Metadata     map[string]string
}

// ask is one acquire.
type ask struct {
	scope, principal string              // scopeOf and principalOf the request
	sentFor          principal.Principal // the principal of the call to the lock service; empty: the gateway
	owner, requestID string
	fresh            bool // the gateway generated requestID
	ttl, minHold     time.Duration
	wait, keep       bool
	most             time.Duration // the maximum wait of this request
	last             bool          // the client waits no longer than most
	wishes           []wish
}

const maxMillis = math.MaxInt64 / int64(time.Millisecond)

// millis converts a duration from a client, and checks it.
func millis(what string, n int64) (time.Duration, error) {
	if n < 0 || n > maxMillis {
		return 0, problem(codeRequest, what+" is not between 0 and "+strconv.FormatInt(maxMillis, 10))
	}
	return time.Duration(n) * time.Millisecond, nil
}

var kindsIn = map[string]backend.Kind{
	"": backend.KindExclusive, "exclusive": backend.KindExclusive, "shared": backend.KindShared,
	"permits": backend.KindPermits,
}

// requests converts a to the driver's requests, and checks them.
func (g *Gateway) requests(a *ask) (key string, rs []backend.Request, err error) {
	id := a.requestID
	if id == "" {
		id = rand.Text()
	}
	key = g.requestKey(a.scope, a.owner, id, a.wishes...)
	for _, w := range a.wishes {
		kind, known := kindsIn[w.Kind]
		switch {
		case !known:
			return "", nil, problem(codeRequest, fmt.Sprintf("kind %q is not one of exclusive, shared and permits", w.Kind))
		case kind == backend.KindPermits && w.Hierarchical:
			return "", nil, problem(codeRequest, "a hierarchical name has no permits")
		}
		id = key
		if len(a.wishes) > 1 {
			id = g.sealer.requestID("one of several", w.Name, key)
		}
		rs = append(rs, backend.Request{
			Name: w.Name, Owner: a.owner, TTL: a.ttl, Wait: a.wait, Kind: kind, Permits: w.Permits, Limit: w.Limit,
			Hierarchical: w.Hierarchical, Metadata: w.Metadata, MinHold: a.minHold, Fresh: a.fresh || a.requestID == "",
			RequestID: id, HoldID: backend.HoldID(id),
		})
	}
	if len(rs) > 1 && !g.can(backend.CapMultiAcquire) {
		return "", nil, g.lacks(backend.CapMultiAcquire)
	}
	return key, rs, cmp.Or(backend.ValidateOwner(a.owner), kit.ValidateSet(g.driver.Describe(), rs))
}

// same reports whether two requests want the same holds, as a retry must.
func (a *ask) same(b *ask) bool {
	return a.ttl == b.ttl && a.minHold == b.minHold && slices.EqualFunc(a.wishes, b.wishes, func(v, w wish) bool {
		return v.Name == w.Name && v.Kind == w.Kind && v.Permits == w.Permits && v.Limit == w.Limit &&
			v.Hierarchical == w.Hierarchical && maps.Equal(v.Metadata, w.Metadata)
	})
}

// requestKey returns the key of a request for one name or several. All retries of the request have the same key.
func (g *Gateway) requestKey(scope, owner, id string, wishes ...wish) string {
	if len(wishes) > 1 {
		return g.sealer.requestID("several", scope, owner, id)
	}
	return g.sealer.requestID("hold", wishes[0].Name, scope, owner, id)
}

// acquired is the result of an acquire: grants, or a place in the queue.
type acquired struct {
	grants  []backend.Grant
	minHold time.Duration
	arrived backend.Instant // the client sent the request earlier
	first   bool            // this is the first delivery of the grants
	queued  time.Duration   // not zero: the request keeps its place, and the client must poll within this time
}

// lock acquires the locks, or returns a place in the queue.
func (g *Gateway) lock(ctx context.Context, a *ask) (*acquired, error) {
	arrived := g.clock.Now()
	key, rs, err := g.requests(a)
	if err != nil {
		return nil, err
	}
	if a.wait {
		out, err := g.admit(&g.waits, a.principal)
		if err != nil {
			return nil, err
		}
		defer out()
	}
	if p := g.ownHold(key, a, rs); p != nil {
		return nil, p
	}
	x, carryOut, err := g.join(ctx, key, a, rs)
	if err != nil {
		return nil, err
	}
	if carryOut != nil {
		stay := context.AfterFunc(ctx, func() { g.leave(x, 0) })
		carryOut() // in this goroutine: another one would cost as much as the rest of the gateway's work
		if !stay() {
			return nil, ctx.Err()
		}
	}
	var most <-chan time.Time // an attempt without a wait has its own timeout
	if a.wait {
		timer := time.NewTimer(a.most)
		defer timer.Stop()
		most = timer.C
		defer time.AfterFunc(grantTime, incomingOf(ctx).leaveWork).Stop()
	}
	select {
	case <-x.done:
	case <-ctx.Done():
	case <-most:
		if within := pollWithin(a.ttl); a.keep || !a.last {
			g.leave(x, within)
			return &acquired{queued: within}, nil
		}
		g.leave(x, 0)
		if err := g.left(ctx, x); err != nil {
			return nil, err
		}
		return nil, g.inTheWay(ctx, rs)
	}
	if ctx.Err() != nil { // the client has disconnected
		if a.keep {
			g.leave(x, pollWithin(a.ttl))
		} else {
			g.leave(x, 0)
		}
		return nil, ctx.Err()
	}
	if x.err == nil {
		return g.deliver(x, arrived)
	}
	g.leave(x, 0)
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case x.cancelled:
		return nil, problem(codeCancelled, "the wait was cancelled by DELETE")
	case g.closing.Err() != nil:
		return nil, problem(codeUnavailable, "the gateway is stopping").retry(comeAgain)
	}
	return nil, x.err
}

// left waits until an abandoned attempt has neither a place in a queue nor a hold.
func (g *Gateway) left(ctx context.Context, x *attempt) error {
	ctx, cancel := context.WithTimeout(ctx, attemptTime)
	defer cancel()
	gone := (<-chan struct{})(x.done)
	for gone != nil {
		select {
		case <-gone:
		case <-ctx.Done():
			return problem(codeUnknown, "the gateway is still cleaning up the wait").retry(comeAgain)
		}
		g.mu.Lock()
		gone = nil
		if x.abandoned { // not if another request with the same id uses it
			gone = g.leftOf(x.requests)
		}
		g.mu.Unlock()
	}
	return nil
}

// inTheWay returns the answer to a wait that is over. It names the holder of the first name that is held.
func (g *Gateway) inTheWay(ctx context.Context, rs []backend.Request) error {
	p := problem(codeHeld, "the wait is over")
	for i := range rs {
		s, err := g.look(ctx, rs[i].Name)
		if err != nil || !s.Held {
			continue
		}
		p = p.retry(s.Holders[0].ExpiresIn)
		p.CurrentOwner = s.Holders[0].Owner
		p.SameOwner = p.CurrentOwner == rs[i].Owner
		if len(rs) > 1 {
			p.LockKey = rs[i].Name
		}
		break
	}
	return p
}

// ownHold refuses the wait of an owner that already holds the name by another request through this replica: the owner
// would wait for itself.
func (g *Gateway) ownHold(key string, a *ask, rs []backend.Request) *Problem {
	if !a.wait {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range rs {
		h := g.owned[ownedKey{a.scope, a.owner, rs[i].Name}]
		if h == nil || h.a.key == key || rs[i].Kind != backend.KindExclusive && h.grant.Kind != backend.KindExclusive {
			continue
		}
		p := problem(codeHeld, "this owner already holds the lock through another request: renew or release it with "+
			"that lock token").
			retry(h.until.Sub(g.clock.Now()))
		p.CurrentOwner, p.SameOwner, p.own = a.owner, true, true
		if len(rs) > 1 {
			p.LockKey = rs[i].Name
		}
		return p
	}
	return nil
}

// deliver returns the grants of an attempt to a client. A retry gets the same grants after a renewal, which proves
// them.
func (g *Gateway) deliver(x *attempt, arrived backend.Instant) (*acquired, error) {
	g.mu.Lock()
	x.polls--
	first := !x.claimed
	fresh := first
	if x.over || x.abandoned {
		g.mu.Unlock()
		return nil, problem(codeDone, "the hold has ended; acquire again with another requestId")
	}
	x.claimed = true
	x.stopTimer()
	grants := make([]backend.Grant, len(x.holds))
	about, now := g.driver.Describe(), g.clock.Now()
	for i, h := range x.holds {
		grants[i] = h.grant
		fresh = fresh && now.Sub(h.grant.SentAt) < about.Validity(h.grant.TTL)/4
	}
	minHold := x.holds[0].minHold
	g.mu.Unlock()
	out := &acquired{grants: grants, minHold: minHold, arrived: arrived, first: first}
	if fresh {
		return out, nil
	}
	ctx, cancel := context.WithTimeout(g.closing, attemptTime)
	defer cancel()
	for i := range grants {
		renewed, err := g.renew(ctx, x.principal, grants[i], minHold, grants[i].TTL)
		switch {
		case err == nil:
			grants[i].SentAt, grants[i].TTL = renewed.SentAt, renewed.TTL
		case errors.Is(err, backend.ErrNotHeld):
			return nil, problem(codeDone, "the hold has ended; acquire again with another requestId")
		case about.Validity(grants[i].TTL)-g.clock.Now().Sub(grants[i].SentAt) <= 0:
			return nil, err
		}
	}
	return out, nil
}

// renew renews a client's grant.
func (g *Gateway) renew(
	ctx context.Context, principal string, grant backend.Grant, minHold, ttl time.Duration,
) (backend.Renewal, error) {
	if err := g.driver.Describe().ValidateTTL(ttl); err != nil {
		return backend.Renewal{}, err
	}
	if g.keeps { // a quota must not end a hold: a renewal with the TTL of the grant always succeeds here
		g.mu.Lock()
		p := g.sessions.use(principal, ttl, ttl == grant.TTL, g.clock.Now())
		g.mu.Unlock()
		if p != nil {
			return backend.Renewal{}, p
		}
	}
	h, grant := g.mine(grant, minHold)
	defer g.unbusy(h)
	if h == nil && !g.wanders {
		g.mu.Lock()
		e, over := g.past.get(pastKey(&grant), g.clock.Now())
		g.mu.Unlock()
		if over {
			return backend.Renewal{}, e.NotHeld(grant.Name)
		}
		return backend.Renewal{}, problem(codeElsewhere,
			"the replica that was granted the lock renews it, and this one does not; try again").retry(comeAgain)
	}
	if h == nil {
		if err := g.awaitLeaving(ctx, holdKey{grant.Name, grant.RequestID}); err != nil {
			return backend.Renewal{}, err
		}
	}
	grant.TTL = ttl
	out := g.driver.Renew(ctx, []backend.Grant{grant})[0]
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case errors.Is(out.Err, backend.ErrNotHeld):
		if h != nil {
			g.end(h)
		}
	case out.Err != nil:
	case h == nil || h.ended:
		if !g.keeps || g.closing.Err() != nil {
			break
		}
		key := holdKey{grant.Name, grant.RequestID}
		if h = g.holds[key]; h == nil || h.ended || h.grant.Token != grant.Token || h.grant.Incarnation != grant.Incarnation {
			h = &hold{key: key, of: principal, grant: grant, minHold: minHold}
			g.held.add(principal, 1) // a quota must not end a hold
			g.holds[key] = h
		} // otherwise another renewal was first
		g.prolong(h, out)
	default:
		g.prolong(h, out)
	}
	return out, g.why(&grant, out.Err)
}

// prolong records a renewal of a hold. The caller holds g.mu.
func (g *Gateway) prolong(h *hold, out backend.Renewal) {
	h.grant.SentAt, h.last = max(h.grant.SentAt, out.SentAt), out.Last
	g.watch(h, g.clock.Now().Add(out.TTL))
}

// free releases a hold. again reports that this replica has released it before.
func (g *Gateway) free(ctx context.Context, grant backend.Grant, minHold time.Duration) (again bool, err error) {
	h, grant := g.mine(grant, minHold)
	defer g.unbusy(h)
	err = g.driver.Release(ctx, grant)
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case err == nil:
		g.remember(cmp.Or(h, &hold{grant: grant}), ended{released: true})
	case !errors.Is(err, backend.ErrNotHeld):
		return false, err
	}
	if h != nil {
		h.freed = h.freed || err == nil
		g.end(h)
	}
	if err == nil {
		return false, nil
	}
	if e, _ := g.past.get(pastKey(&grant), g.clock.Now()); e.released {
		return true, nil
	}
	return false, g.why(&grant, err)
}

// mine returns this replica's hold of a grant, which does not expire until unbusy, and the grant with the details that
// only this replica knows. Without such a hold it returns nil and the grant.
func (g *Gateway) mine(grant backend.Grant, minHold time.Duration) (*hold, backend.Grant) {
	g.mu.Lock()
	defer g.mu.Unlock()
	h := g.holds[holdKey{grant.Name, grant.RequestID}]
	if h != nil && h.grant.Incarnation == grant.Incarnation && h.grant.Token == grant.Token {
		h.busy++
		own := h.grant
		own.TTL = grant.TTL
		return h, own
	}
	if minHold > 0 { // this replica does not know its start; a longer minimum is safe
		grant.MinHoldUntil = g.clock.Now().Add(minHold)
	}
	return nil, grant
}

func (g *Gateway) unbusy(h *hold) {
	if h == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	h.busy--
}

// cancelWait removes a request from the queue. If a client has already received the grant, cancelWait returns the hold
// with an error.
func (g *Gateway) cancelWait(key string) (*hold, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	a := g.attempts[key]
	switch {
	case a == nil || a.abandoned || a.over:
		return nil, problem(codeNoWait, "this replica has no such wait")
	case a.claimed:
		granted := *a.holds[0]
		return &granted, problem(codeGranted, "release it")
	}
	a.cancelled = true
	g.abandon(a)
	return nil, nil
}

// readable opens a lock token, and checks that it belongs to the name, to the owner unless that is empty, and to the
// sender of the request.
func (g *Gateway) readable(ctx context.Context, token, name, owner string) (backend.Grant, time.Duration, error) {
	grant, minHold, of, err := g.sealer.Open(token)
	switch {
	case err != nil:
		return grant, 0, problem(codeNotOwner, err.Error())
	case grant.Name != name:
		return grant, 0, problem(codeNotOwner, "the lock token belongs to another lock")
	case owner != "" && grant.Owner != owner:
		return grant, 0, problem(codeNotOwner, "the lock token belongs to another owner")
	case g.o.Access != nil && of != "" && of != scopeOf(requestOf(ctx)):
		return grant, 0, problem(codeNotOwner, "the lock token was issued to another principal")
	}
	return grant, minHold, nil
}
