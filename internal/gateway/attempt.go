package gateway

import (
	"context"
	"errors"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/history"
)

// attempt is one acquire, of one name or of several in one step, from its first request until its holds have ended.
// Requests that say the same with the same id meet in it: a poll for the place in the queue, and a repeat after a lost
// answer.
//
// The fields after done are protected by Gateway.mu.
type attempt struct {
	key      string
	print    string // what was asked for; a request with the same id must ask for the same
	named    bool   // the client gave a request id, and may come again
	requests []backend.Request
	cancel   context.CancelFunc
	done     chan struct{} // closed when the driver has answered; holds and err are valid then

	err       error
	holds     []*hold
	polls     int         // requests that wait for it
	timer     *time.Timer // ends what nobody polls for; nil if there is none
	abandoned bool        // nobody wants it any more
	claimed   bool        // the grant was delivered
	over      bool        // its holds have ended
}

// hold is one grant that this replica looks after.
//
// The fields are protected by Gateway.mu.
type hold struct {
	a       *attempt // nil if another replica was granted it
	key     holdKey
	grant   backend.Grant
	minHold time.Duration
	until   backend.Instant // when the gateway ends it, unless it is renewed
	timer   *time.Timer
	busy    int // renewals and releases under way
	ended   bool
	freed   bool // it ended by a release
}

const (
	attemptTime = 10 * time.Second // bounds an attempt that does not wait, and every other call of the driver
	waitMost    = 24 * time.Hour   // bounds a wait over all of its polls
)

// join returns the attempt for what is asked, which it begins if there is none, with a poll more. carryOut asks the
// driver; it is nil if somebody else does.
func (g *Gateway) join(ctx context.Context, key, print string, named bool, rs []backend.Request) (
	a *attempt, carryOut func(), err error,
) {
	var bound <-chan time.Time
	for {
		var gone <-chan struct{}
		g.mu.Lock()
		a = g.attempts[key]
		switch {
		case g.closing.Err() != nil:
			g.mu.Unlock()
			return nil, nil, problem(codeUnavailable, "the gateway ends").retry(comeAgain)
		case a == nil && g.finished.has(key):
			g.mu.Unlock()
			return nil, nil, problem(codeDone, "acquire again with another requestId")
		case a == nil && g.leftOf(rs) != nil:
			gone = g.leftOf(rs)
		case a == nil:
			seen, lost := g.history.Now()
			if lost != nil {
				g.mu.Unlock()
				return nil, nil, lost
			}
			a, carryOut = g.begin(key, print, named, rs, seen)
			a.polls++
			g.mu.Unlock()
			return a, carryOut, nil
		case a.print != print:
			g.mu.Unlock()
			return nil, nil, problem(codeMismatch, "a request with this requestId asked for something else")
		case !a.abandoned:
			a.polls++
			a.stopTimer()
			g.mu.Unlock()
			return a, nil, nil
		default: // its place is being given up
			gone = a.done
		}
		g.mu.Unlock()
		if bound == nil {
			timer := time.NewTimer(attemptTime)
			defer timer.Stop()
			bound = timer.C
		}
		select {
		case <-gone:
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		case <-g.closing.Done():
		case <-bound:
			return nil, nil, problem(codeUnknown,
				"what an earlier request left is still being given back").retry(comeAgain)
		}
	}
}

// begin makes an attempt, which carryOut carries out: in the background if it may wait, else it is for the caller to
// call. seen is the moment in the history before it. The caller holds g.mu.
func (g *Gateway) begin(key, print string, named bool, rs []backend.Request,
	seen uint64) (a *attempt, carryOut func()) {
	bound := attemptTime
	if rs[0].Wait {
		bound = waitMost
	}
	ctx, cancel := context.WithTimeout(g.closing, bound)
	a = &attempt{key: key, print: print, named: named, requests: rs, cancel: cancel, done: make(chan struct{})}
	a.holds = make([]*hold, len(rs))
	for i := range rs {
		h := &hold{a: a, key: keyOf(&rs[i]), minHold: rs[i].MinHold}
		a.holds[i] = h
		rs[i].Lost = func(backend.Reason) { g.lost(h) }
		if !g.meets() { // no other replica needs to meet it, so that what is left of it meets no later one
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
			err = g.judge(grants, seen)
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

// judge looks at tokens before anybody gets them. A service that grants one a second time, or a smaller one, has lost
// its history: this replica grants nothing more.
func (g *Gateway) judge(grants []backend.Grant, seen uint64) error {
	space := g.driver.Describe().TokenSpace
	var errs []error
	for i := range grants {
		err := g.history.Judge(seen, &grants[i], space)
		switch {
		case errors.Is(err, history.ErrOvertaken):
			err = problem(codeUnavailable, "its hold was over before it was answered").retry(comeAgain)
		case err != nil && g.history.Lose(err):
			g.o.Log.Error("the lock service has lost its history; "+
				"nothing more is granted until this replica is started anew",
				"err", err)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// answered takes the driver's answer. Grants with an error are given back.
func (g *Gateway) answered(a *attempt, grants []backend.Grant, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	defer close(a.done)
	if a.err = err; err != nil {
		a.stopTimer()
		a.over = true
		delete(g.attempts, a.key) // the same request makes a new attempt
		for i := range grants {
			g.giveBack(a.holds[i].key, grants[i], always)
		}
		// Where requests meet, what may be left ends by itself within a TTL: the same request may have been granted
		// through another replica meanwhile.
		if errors.Is(err, backend.ErrUnknown) && !g.meets() {
			for i, h := range a.holds {
				g.giveBack(h.key, a.requests[i].Grant(), always)
			}
		}
		return
	}
	now := g.clock.Now()
	for i, h := range a.holds {
		h.grant = grants[i]
		if !h.ended {
			g.holds[holdKey{h.grant.Name, h.grant.RequestID}] = h
			g.watch(h, now.Add(h.grant.TTL))
		}
	}
	if a.abandoned || g.closing.Err() != nil {
		g.giveUp(a)
	}
}

// leave takes a poll away. keep says for how long the place, or the grant, is kept for the next one; zero: not at all.
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

// unpolled ends an attempt for which nobody has come in time.
func (g *Gateway) unpolled(a *attempt) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if a.polls == 0 && !a.claimed && !a.over && a.timer != nil {
		g.abandon(a)
	}
}

// abandon gives up a place, or a grant that nobody has seen. The caller holds g.mu.
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

// giveUp gives back all holds of a. The caller holds g.mu.
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

// holdKey names what a client's request gets of one name. Where holds do not wander, requestID is not the one that the
// driver knows.
type holdKey struct{ name, requestID string }

func keyOf(r *backend.Request) holdKey { return holdKey{r.Name, r.RequestID} }

// watch has the gateway end h at an instant, unless it ends or is renewed before. The caller holds g.mu.
func (g *Gateway) watch(h *hold, until backend.Instant) {
	h.until = max(h.until, until)
	left := h.until.Sub(g.clock.Now())
	if h.timer == nil {
		h.timer = time.AfterFunc(left, func() { g.overdue(h) })
	} else {
		h.timer.Reset(left)
	}
}

// retryTime is the pause before something that failed or was busy is tried again.
const retryTime = 100 * time.Millisecond

// overdue ends a hold that was not renewed.
func (g *Gateway) overdue(h *hold) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if left := h.until.Sub(g.clock.Now()); !h.ended && (left > 0 || h.busy > 0) {
		h.timer.Reset(max(left, retryTime))
		return
	}
	g.expire(h)
}

// expire ends a hold whose holder is gone. Where holds end by themselves that is only forgotten. The caller holds g.mu.
func (g *Gateway) expire(h *hold) {
	if h.ended {
		return
	}
	over := g.clock.Now() >= h.until
	g.end(h)
	if over && !g.keeps {
		return
	}
	g.giveBack(h.key, h.grant, func() bool { return g.keeps || g.clock.Now() < h.until })
}

// giveBack gives back, in the background, what an attempt got or may have got, as long as needed says so. Until that is
// done no attempt begins with the same key: it could be answered with the very hold that is being given back. The
// caller holds g.mu.
func (g *Gateway) giveBack(k holdKey, grant backend.Grant, needed func() bool) {
	done := make(chan struct{})
	g.leaving[k] = done
	g.work.Go(func() {
		defer func() {
			g.mu.Lock()
			defer g.mu.Unlock()
			if g.leaving[k] == done {
				delete(g.leaving, k)
			}
			close(done)
		}()
		for {
			ctx, cancel := context.WithTimeout(g.stopping, attemptTime)
			err := g.drop(ctx, grant)
			cancel()
			if err == nil || errors.Is(err, backend.ErrNotHeld) || errors.Is(err, backend.ErrClosed) {
				return
			}
			if !needed() || kit.Sleep(g.stopping, retryTime) != nil {
				return
			}
		}
	})
}

func always() bool { return true }

// leftOf returns what ends when something of rs has been given back; nil if nothing is. The caller holds g.mu.
func (g *Gateway) leftOf(rs []backend.Request) <-chan struct{} {
	for i := range rs {
		if done := g.leaving[keyOf(&rs[i])]; done != nil {
			return done
		}
	}
	return nil
}

// drop gives back a grant that this replica has, unless another replica has it by now.
func (g *Gateway) drop(ctx context.Context, grant backend.Grant) error {
	if g.expirer != nil {
		return g.expirer.Expire(ctx, grant)
	}
	return g.driver.Release(ctx, grant)
}

// lost is the driver's news that a hold is gone from here.
func (g *Gateway) lost(h *hold) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.end(h)
}

// end forgets a hold. The caller holds g.mu.
func (g *Gateway) end(h *hold) {
	if h.ended {
		return
	}
	h.ended = true
	if !g.wanders() {
		g.finished.add(overOf(&h.grant))
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
	for _, other := range a.holds {
		if !other.ended {
			return
		}
	}
	a.over = true
	a.stopTimer()
	if g.attempts[a.key] == a {
		delete(g.attempts, a.key)
		if a.named && h.freed {
			g.finished.add(a.key)
		}
	}
}

// overOf is what a replica remembers of a hold that it had and that is over.
func overOf(g *backend.Grant) string { return "over " + g.Name + "\x00" + g.RequestID }

// recent is a bounded set of the attempts that are over, so that a late repeat does not acquire again.
type recent struct {
	in   map[string]struct{}
	ring []string
	next int
}

// finishedMost bounds how many attempts that are over a replica remembers.
const finishedMost = 1 << 16

func (m *recent) has(key string) bool {
	_, ok := m.in[key]
	return ok
}

func (m *recent) add(key string) {
	if m.has(key) {
		return
	}
	if m.in == nil {
		m.in = map[string]struct{}{}
	}
	if len(m.ring) < finishedMost {
		m.ring = append(m.ring, key)
	} else {
		delete(m.in, m.ring[m.next])
		m.ring[m.next] = key
		m.next = (m.next + 1) % finishedMost
	}
	m.in[key] = struct{}{}
}
