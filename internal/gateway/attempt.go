package gateway

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/cleanup"
	"github.com/fencelock/fencelock/internal/history"
	"github.com/fencelock/fencelock/internal/principal"
)

// attempt is one acquire, of one name or of several in one step, from its first request until its holds have ended.
// Requests with the same content and the same id share it: a poll that keeps the place in the queue, and a retry after
// a lost answer.
//
// Gateway.mu protects the fields after done.
type attempt struct {
	*ask     // its first request; later requests with the same id must want the same
	key      string
	requests []backend.Request
	cancel   context.CancelFunc
	done     chan struct{} // closed when the driver has answered; holds and err are valid then

	err       error
	holds     []*hold
	polls     int         // pending requests for it
	timer     *time.Timer // ends the attempt if no client polls; may be nil
	abandoned bool        // no client wants it any longer
	cancelled bool        // a DELETE removed it from the queue
	claimed   bool        // a client received the grants
	over      bool        // its holds have ended
}

// hold is one grant that this replica monitors.
//
// Gateway.mu protects the fields.
type hold struct {
	a       *attempt // nil if another replica acquired it
	key     holdKey
	of      string // the principal that it counts for
	grant   backend.Grant
	minHold time.Duration
	until   backend.Instant // when the gateway ends it unless it is renewed
	timer   *time.Timer
	busy    int  // renewals and releases in progress
	ended   bool // it no longer counts in Gateway.held
	freed   bool // it ended by a release
	over    bool // the service ended it, so no other replica has it
	last    bool // the service no longer extends it
}

const (
	attemptTime = 10 * time.Second // the maximum for an attempt that does not wait, and for every other driver call
	waitMost    = 24 * time.Hour   // the maximum for a wait over all of its polls
)

// join returns the attempt for the request, with one more poll. If there is no such attempt, it begins one. The caller
// calls carryOut, which calls the driver; it is nil if another goroutine does so.
func (g *Gateway) join(ctx context.Context, key string, by *ask, rs []backend.Request) (
	a *attempt, carryOut func(), err error,
) {
	a, carryOut, gone, err := g.tryJoin(key, by, rs)
	if gone == nil {
		return a, carryOut, err
	}
	ctx, cancel := context.WithTimeout(ctx, attemptTime)
	defer cancel()
	for gone != nil {
		select {
		case <-gone:
		case <-g.closing.Done():
		case <-ctx.Done():
			return nil, nil, problem(codeUnknown,
				"the cleanup of an earlier request is still in progress").retry(comeAgain)
		}
		a, carryOut, gone, err = g.tryJoin(key, by, rs)
	}
	return a, carryOut, err
}

// tryJoin is join if no cleanup of an earlier request is in progress. Otherwise gone is closed when that has ended.
func (g *Gateway) tryJoin(key string, by *ask, rs []backend.Request) (
	a *attempt, carryOut func(), gone <-chan struct{}, err error,
) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch a = g.attempts[key]; {
	case g.closing.Err() != nil:
		return nil, nil, nil, problem(codeUnavailable, "the gateway is stopping").retry(comeAgain)
	case a != nil && !a.same(by):
		return nil, nil, nil, problem(codeMismatch, "an earlier request with this requestId was different")
	case a != nil && a.abandoned:
		return nil, nil, a.done, nil
	case a != nil:
		a.polls++
		a.stopTimer()
		return a, nil, nil, nil
	case g.finished.has(key, g.clock.Now()):
		return nil, nil, nil, problem(codeDone, "acquire again with another requestId")
	}
	if gone := g.leftOf(rs); gone != nil {
		return nil, nil, gone, nil
	}
	seen, lost := g.history.Now()
	if err := cmp.Or(lost, g.mayGrant()); err != nil {
		return nil, nil, nil, err
	}
	if g.keeps {
		if p := g.sessions.use(by.principal, by.ttl, false, g.clock.Now()); p != nil {
			return nil, nil, nil, p
		}
	}
	if p := g.held.enter(by.principal, len(rs)); p != nil {
		return nil, nil, nil, p
	}
	a, carryOut = g.begin(key, by, rs, seen)
	return a, carryOut, nil, nil
}

// begin makes an attempt. If the attempt may wait, begin carries it out in the background; otherwise the caller calls
// carryOut. seen is the position in the history before the attempt. The caller holds g.mu.
func (g *Gateway) begin(key string, by *ask, rs []backend.Request,
	seen uint64) (a *attempt, carryOut func()) {
	bound := attemptTime
	if rs[0].Wait {
		bound = waitMost
	}
	ctx, cancel := context.WithTimeout(principal.For(g.closing, by.sentFor), bound)
	a = &attempt{
		ask: by, key: key, requests: rs, cancel: cancel, done: make(chan struct{}), polls: 1,
	}
	a.holds = make([]*hold, len(rs))
	for i := range rs {
		h := &hold{a: a, of: by.principal, key: keyOf(&rs[i]), minHold: rs[i].MinHold}
		a.holds[i] = h
		rs[i].Lost = func(l backend.Loss) { g.lost(h, l) }
		if !g.meets() { // no other replica shares it, and a new id keeps a late grant from later requests
			rs[i].RequestID = backend.NewRequestID()
			rs[i].HoldID, rs[i].Fresh = backend.HoldID(rs[i].RequestID), true
		}
	}
	g.attempts[key] = a
	g.work.Add(1)
	carryOut = func() {
		defer g.work.Done()
		defer cancel()
		grants, err := g.acquire(ctx, rs)
		if err != nil {
			grants = nil
		} else {
			err = cmp.Or(g.judge(grants, seen), g.mayGrant())
		}
		g.answered(a, grants, err)
	}
	if rs[0].Wait {
		go carryOut()
		return a, nil
	}
	return a, carryOut
}

func (g *Gateway) acquire(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	if len(rs) > 1 {
		return g.multi.AcquireAll(ctx, rs)
	}
	grant, err := g.driver.Acquire(ctx, rs[0])
	return []backend.Grant{grant}, err
}

// judge checks fencing tokens before any client gets them. A service that issues a token twice, or a smaller token, has
// lost its history: this replica then stops granting locks.
func (g *Gateway) judge(grants []backend.Grant, seen uint64) error {
	space := g.driver.Describe().TokenSpace
	var errs []error
	for i := range grants {
		err := g.history.Judge(seen, &grants[i], space)
		switch {
		case errors.Is(err, history.ErrOvertaken):
			err = problem(codeUnavailable, "the hold ended before the response was sent").retry(comeAgain)
		case err != nil && g.history.Lose(err):
			g.o.Log.Error("the lock service has lost its history; "+
				"this replica grants no more locks until it is restarted",
				"err", err)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// answered handles the driver's answer. If err is not nil, it releases the grants.
func (g *Gateway) answered(a *attempt, grants []backend.Grant, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	defer close(a.done)
	if a.err = err; err != nil {
		a.stopTimer()
		a.over = true
		delete(g.attempts, a.key) // a retry makes a new attempt
		for _, h := range a.holds {
			if !h.ended {
				h.ended = true
				g.held.leave(h.of, 1)
			}
		}
		for i := range grants {
			g.giveBack(a.holds[i].key, grants[i])
		}
		// If replicas share requests, a possible hold expires within a TTL. The gateway must not release it: another replica
		// may have delivered it to the same request in the meantime.
		if grants == nil && cleanup.Ambiguous(err) && !g.meets() {
			for i, h := range a.holds {
				g.giveBack(h.key, a.requests[i].Grant())
			}
		}
		return
	}
	now := g.clock.Now()
	for i, h := range a.holds {
		h.grant = grants[i]
		if !h.ended {
			g.holds[holdKey{h.grant.Name, h.grant.RequestID}] = h
			g.owned[ownedKey{a.scope, a.owner, h.grant.Name}] = h
			g.watch(h, now.Add(h.grant.TTL))
		}
	}
	if a.abandoned || g.closing.Err() != nil {
		g.giveUp(a)
	}
}

// leave removes a poll. The gateway keeps the place, or the grant, for the duration keep, in which the client may poll
// again. If keep is zero, leave abandons the attempt when no poll remains.
func (g *Gateway) leave(a *attempt, keep time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	a.polls--
	switch {
	case a.polls > 0 || a.over || a.claimed:
	case keep > 0:
		a.stopTimer()
		a.timer = time.AfterFunc(keep, func() { g.unpolled(a) })
	default:
		g.abandon(a)
	}
}

// unpolled abandons an attempt that no client has polled in time.
func (g *Gateway) unpolled(a *attempt) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if a.polls == 0 && !a.claimed && !a.over && a.timer != nil {
		g.abandon(a)
	}
}

// abandon releases a place, or a grant that no client has received. The caller holds g.mu.
func (g *Gateway) abandon(a *attempt) {
	if a.abandoned {
		return
	}
	a.abandoned = true
	a.stopTimer()
	a.cancel()
	select {
	case <-a.done:
		if a.err == nil {
			g.giveUp(a)
		}
	default:
	}
}

// giveUp ends all holds of a. The caller holds g.mu.
func (g *Gateway) giveUp(a *attempt) {
	for _, h := range a.holds {
		g.expire(h)
	}
}

func (a *attempt) stopTimer() {
	if a.timer != nil {
		a.timer.Stop()
		a.timer = nil
	}
}

// holdKey identifies a client's hold of one name. Unless replicas share requests (see meets), the driver gets another
// requestID.
type holdKey struct{ name, requestID string }

// ownedKey identifies an owner's hold of one name.
type ownedKey struct{ scope, owner, name string }

func keyOf(r *backend.Request) holdKey { return holdKey{r.Name, r.RequestID} }

// watch makes the gateway end h at an instant, unless h ends or is renewed earlier. The caller holds g.mu.
func (g *Gateway) watch(h *hold, until backend.Instant) {
	h.until = max(h.until, until)
	left := h.until.Sub(g.clock.Now())
	if h.timer == nil {
		h.timer = time.AfterFunc(left, func() { g.overdue(h) })
	} else {
		h.timer.Reset(left)
	}
}

// busyTime is the pause before the gateway ends a hold that is being renewed or released.
const busyTime = 100 * time.Millisecond

// overdue ends a hold that was not renewed.
func (g *Gateway) overdue(h *hold) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if left := h.until.Sub(g.clock.Now()); !h.ended && (left > 0 || h.busy > 0) {
		h.timer.Reset(max(left, busyTime))
		return
	}
	g.expire(h)
}

// expire ends a hold that its client has abandoned or has not renewed. If the hold has expired in the service too,
// expire only forgets it. The caller holds g.mu.
func (g *Gateway) expire(h *hold) {
	if h.ended {
		return
	}
	over := g.clock.Now() >= h.until
	if over && g.keeps {
		reason := backend.ReasonExpired
		if h.last {
			reason = backend.ReasonMaxHold
		}
		g.remember(h, ended{Loss: backend.Loss{Reason: reason}})
	}
	g.end(h)
	if over && !g.keeps {
		return
	}
	g.giveBack(h.key, h.grant)
}

// giveBack releases a grant, or a possible hold, in the background. Until that is done, no attempt with the same key
// begins: the answer could be the hold that is being released. The caller holds g.mu.
func (g *Gateway) giveBack(k holdKey, grant backend.Grant) {
	job := g.cleaner.Add(context.Background(), grant, cleanup.Granted, 0)
	g.leaving[k] = job
	go func() {
		<-job.Done
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.leaving[k] == job {
			delete(g.leaving, k)
		}
	}()
}

// unreleased logs that the service refuses a release.
func (g *Gateway) unreleased(_ context.Context, grant *backend.Grant, err error) {
	g.refused.Do(func() {
		g.o.Log.Warn("locks that no client holds any longer cannot be released", "lock", grant.Name, "error", err)
	})
}

// awaitLeaving waits until this replica has finished releasing a hold. Otherwise the release could follow a renewal.
func (g *Gateway) awaitLeaving(ctx context.Context, k holdKey) error {
	g.mu.Lock()
	job := g.leaving[k]
	g.mu.Unlock()
	if job == nil {
		return nil
	}
	g.cleaner.Hurry(job)
	select {
	case <-job.Done:
		return nil
	case <-ctx.Done():
		return problem(codeUnknown, "the hold is still being released").retry(comeAgain)
	}
}

// leftOf returns a channel that is closed when the release of a hold of rs is done; nil if no release is in progress.
// The caller holds g.mu.
func (g *Gateway) leftOf(rs []backend.Request) <-chan struct{} {
	for i := range rs {
		if job := g.leaving[keyOf(&rs[i])]; job != nil {
			g.cleaner.Hurry(job)
			return job.Done
		}
	}
	return nil
}

// drop releases a grant of this replica, unless another replica has taken it over.
func (g *Gateway) drop(ctx context.Context, grant backend.Grant) error {
	if g.expirer != nil {
		return g.expirer.Expire(ctx, grant)
	}
	return g.driver.Release(ctx, grant)
}

// lost handles the driver's notification that this replica has lost a hold.
func (g *Gateway) lost(h *hold, l backend.Loss) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !h.ended && h.grant.Name != "" {
		h.over = l.Reason == backend.ReasonExpired || l.Reason == backend.ReasonSessionExpired ||
			l.Reason == backend.ReasonForceReleased || l.Reason == backend.ReasonMaxHold
		g.remember(h, ended{Loss: l})
	}
	g.end(h)
}

// memory returns the key, the principal and the expiry of a record about a hold.
func (g *Gateway) memory(h *hold, key string) remembered {
	return remembered{key: key, principal: h.of, until: g.clock.Now().Add(max(2*h.grant.TTL, finishedTime))}
}

// ended is how a hold ended: released through this replica, lost for a reason, or else unknown.
type ended struct {
	backend.Loss
	released bool
}

func pastKey(g *backend.Grant) string { return g.Name + "\x00" + g.RequestID + "\x00" + g.Incarnation }

// remember records how a hold ended. The caller holds g.mu.
func (g *Gateway) remember(h *hold, e ended) { g.past.add(g.memory(h, pastKey(&h.grant)), e) }

// why adds to an ErrNotHeld the reason why the hold ended, if this replica has recorded it. The caller holds g.mu.
func (g *Gateway) why(grant *backend.Grant, err error) error {
	var told *backend.NotHeldError
	if !errors.Is(err, backend.ErrNotHeld) || errors.As(err, &told) && told.Reason != "" {
		return err
	}
	if e, _ := g.past.get(pastKey(grant), g.clock.Now()); e.Reason != "" {
		return e.NotHeld(grant.Name)
	}
	return err
}

// end forgets a hold, and an attempt without other holds. The caller holds g.mu.
func (g *Gateway) end(h *hold) {
	if h.ended {
		return
	}
	h.ended = true
	g.held.leave(h.of, 1)
	if !g.wanders && !g.past.has(pastKey(&h.grant), g.clock.Now()) {
		g.remember(h, ended{})
	}
	if h.timer != nil {
		h.timer.Stop()
	}
	if k := (holdKey{h.grant.Name, h.grant.RequestID}); g.holds[k] == h {
		delete(g.holds, k)
	}
	a := h.a
	if a == nil {
		return
	}
	if owned := (ownedKey{a.scope, a.owner, h.grant.Name}); g.owned[owned] == h {
		delete(g.owned, owned)
	}
	for _, other := range a.holds {
		if !other.ended {
			return
		}
	}
	a.over = true
	a.stopTimer()
	if g.attempts[a.key] == a {
		delete(g.attempts, a.key)
		if a.requestID != "" && (h.freed || a.claimed && (h.over || !g.wanders)) {
			g.finished.add(g.memory(h, a.key), struct{}{})
		}
	}
}
