// This file keeps the driver's holds, and releases and renews them. Driver.holds is this client's record of its holds,
// by name and request id, each on its session; the table holds is authoritative. The two can differ: a call that was
// not answered may have moved a hold to another session, a standby that lagged may have lost one or brought one back.
// A renewal returns which holds have ended and which have moved, and updates Driver.holds.
//
// A hold counts as one user of its session, from keep to forget, so that the session is renewed as long as it has
// holds. It leaves Driver.holds in one of four ways: Release forgets it, with any answer; Renew or checkHolds finds it
// gone; its session ends (holdsOf); or a second grant of the same request replaces it. Only the second and the third
// are losses. Renew returns its loss; checkHolds and the end of the session report it to Request.Lost.
//
// There is no lock between the driver's record and the table: each statement names its expectation (name, request id
// and token), and the server compares.

package postgres

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// key names a request: its name and its id.
type key struct{ name, requestID string }

// hold is a grant of this driver that has not been released. session changes when the hold moves to another TTL.
type hold struct {
	grant   backend.Grant
	session *session // protected by Driver.mu
	// Request.Lost; nil if the caller set no callback.
	lost func(backend.Loss)
}

// lose notifies the holder of a loss. It is called without Driver.mu, since the core may call the driver back.
func (h *hold) lose(loss backend.Loss) {
	if h.lost != nil {
		h.lost(loss)
	}
}

// keep remembers a grant: its session lives as long as it does. A second grant of the same request replaces the entry,
// and with it the callback. The first holder with a callback starts the connection that listens.
func (d *Driver) keep(s *session, r *backend.Request, g backend.Grant) {
	d.mu.Lock()
	defer d.mu.Unlock()
	k := key{g.Name, g.RequestID}
	// A second grant of the same request: the new hold counts as its own user.
	if old := d.holds[k]; old != nil {
		old.session.Leave(1)
	}
	s.Add(1)
	d.holds[k] = &hold{grant: g, session: s, lost: r.Lost}
	if r.Lost != nil {
		d.listen()
	}
}

// forget drops a hold that has ended. A grant with a token drops only the hold with that token: the same request may
// have a new hold by now.
func (d *Driver) forget(g *backend.Grant) {
	d.mu.Lock()
	defer d.mu.Unlock()
	k := key{g.Name, g.RequestID}
	// A grant without a token names any hold of the request.
	if h := d.holds[k]; h != nil && (g.Token == 0 || h.grant.Token == g.Token) {
		h.session.Leave(1)
		delete(d.holds, k)
	}
}

// holdsOf returns the holds on s, and forgets them. The caller holds d.mu, and s has ended, so that its users no
// longer count.
func (d *Driver) holdsOf(s *session) (all []*hold) {
	for k, h := range d.holds {
		if h.session == s {
			all = append(all, h)
			delete(d.holds, k)
		}
	}
	return all
}

// loseAll ends every session of the driver, without asking the server, which no longer has them.
func (d *Driver) loseAll(reason backend.Reason) {
	for _, s := range d.sessions.Live() {
		s.ended(reason)
	}
}

// abandon forgets a hold after a failed release. Its session sweeps unknown holds after each renewal, so that the hold
// ends with the next one. If the server refused the release, it may refuse the sweep: the session then takes no new
// holds, so that the hold ends with it at the latest. A release that only ended with its context costs no session.
func (d *Driver) abandon(g *backend.Grant, refused bool) {
	d.mu.Lock()
	h := d.holds[key{g.Name, g.RequestID}]
	if h == nil || g.Token != 0 && h.grant.Token != g.Token {
		d.mu.Unlock()
		return
	}
	s := h.session
	s.doubt = true
	d.mu.Unlock()
	if refused {
		d.sessions.Abandon(s)
	}
	d.forget(g)
}

// known lists the requests that this client has, or may get: requests of holds, and of calls in progress. It lists
// them for every session, since a hold that moves is on either until the answer has come. A sweep spares them.
func (d *Driver) known() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	// Not nil, which would be null in SQL and make every request unknown.
	known := []string{}
	for k := range d.holds {
		known = append(known, k.requestID)
	}
	for id := range d.calls {
		known = append(known, id)
	}
	return known
}

// doubted notes that a request on the session may take effect although no caller receives its answer. Its hold could
// then live as long as the session, so that the session sweeps unknown holds after each renewal. err is the request's
// error, or nil if no caller received the answer; an error that excludes an effect leaves no doubt.
func (s *session) doubted(err error) {
	// It had no effect, or was never sent.
	if rolledBack(err) || errors.Is(err, backend.ErrUnavailable) {
		return
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	s.doubt = true
}

// Release ends a hold if it is still the granted one: name, request id and token must match, so that a late release
// ends no later hold. In the same transaction the lock goes to the head of the queue. A hold with a minimum time stays
// closed to others until that time is over.
//
// With a grant that Request.Grant made it removes the hold of that request, or its place in the queue, and first
// waits for the answer to an acquire of it in progress. If there is neither, it returns a *backend.NotHeldError, with
// the reason if the server knows it. After a commit without an answer it retries until ctx ends, and then returns
// ErrUnknown. Release is safe for concurrent use, even for one grant.
func (d *Driver) Release(ctx context.Context, g backend.Grant) error {
	err := backend.ValidateName(g.Name)
	if err == nil {
		err = d.enterHeld(ctx)
	}
	if err != nil {
		return callError("release", g.Name, err)
	}
	defer d.gate.Leave()
	// A grant released by its request id alone may still be in flight.
	if g.Token == 0 {
		d.answered(ctx, key{g.Name, g.RequestID})
	}
	// keep: the minimum still binds by the holder's clock; the server decides by its own clock when the minimum is over.
	keep := g.MinHoldUntil > d.clock.Now()
	for {
		a, err := d.releases.ask(ctx, g.Token != 0, g.Name, g.RequestID, int64(g.Token.Order()), keep,
			d.clockKnown())
		switch {
		case err == nil && a.state == "ended":
			d.forget(&g)
			return nil
		case err == nil:
			d.forget(&g)
			loss := backend.Loss{Reason: backend.Reason(a.reason), Text: a.why, By: a.by, Principal: a.principal}
			return callError("release", g.Name, loss.NotHeld(g.Name))
		case again(err) && d.pause(ctx, giveUpTime):
			continue // a second answer "not held" is right too: the first may have been carried out
		case ctx.Err() != nil && !errors.Is(err, ctx.Err()):
			// The caller gets both the end of its context and the error of the last try.
			err = fmt.Errorf("%w: %w: %w", backend.ErrUnknown, ctx.Err(), err)
		}
		d.abandon(&g, ctx.Err() == nil)
		return callError("release", g.Name, err)
	}
}

// Renew prolongs grants, and returns a result for each of them, in order: one statement for each TTL among them,
// however many there are, and all TTLs concurrently. The server's clock sets the new end, which is never earlier.
//
// A grant with a longer TTL than its session's moves to the session of that TTL, with its minimum hold; a grant with
// a shorter TTL stays: a renewal never shortens. A missing hold is a *backend.NotHeldError with the reason and is
// never recreated. Any other failure is ErrUnavailable or ErrUnknown: the hold may still exist. Renew returns with
// the end of ctx. It may be called for the same grants concurrently, and beside Release.
func (d *Driver) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	r := &renewals{d: d, grants: grants, out: make([]backend.Renewal, len(grants))}
	if err := d.enterHeld(ctx); err != nil {
		for i := range grants {
			r.fail(err, i)
		}
		return r.out
	}
	defer d.gate.Leave()
	bySession := map[*session][]int{}
	d.mu.Lock()
	for i := range grants {
		h := d.holds[key{grants[i].Name, grants[i].RequestID}]
		if h == nil || h.grant.Token != grants[i].Token {
			r.fail(&backend.NotHeldError{Name: grants[i].Name, Reason: d.goneWhy()}, i)
			continue
		}
		bySession[h.session] = append(bySession[h.session], i)
	}
	d.mu.Unlock()
	var all sync.WaitGroup
	// Concurrently: a slow session must not use up the time of another.
	for s, at := range bySession {
		all.Go(func() { r.on(ctx, s, at) })
	}
	all.Wait() // each is bounded by ctx
	return r.out
}

// goneWhy returns the reason for a hold that this driver no longer has. The caller holds d.mu.
func (d *Driver) goneWhy() backend.Reason {
	if d.lost != nil {
		return backend.ReasonHistoryLost
	}
	return backend.ReasonSessionExpired
}

// renewals is one call of Renew. Its goroutines, one for each session, write their own elements of out, so that they
// need no mutex.
type renewals struct {
	d      *Driver
	grants []backend.Grant
	out    []backend.Renewal
}

// fail answers for the grants at some places with err.
func (r *renewals) fail(err error, at ...int) {
	for _, i := range at {
		r.out[i] = backend.Renewal{Err: callError("renew", r.grants[i].Name, err)}
	}
}

// on renews the grants at some places on s, and grants that are on another session, there. A hold on a session that
// this driver does not know is in the middle of a move, or another client's: ErrUnavailable, since the next renewal
// will find it. "Not held" would be a false loss, and holders stop their work for it (TestHoldMovesUnheard).
func (r *renewals) on(ctx context.Context, s *session, at []int) {
	d := r.d
	for ttl, some := range s.longer(r.grants, at) {
		if err := r.move(ctx, s, ttl, some); err != nil {
			r.fail(err, at...)
			return
		}
	}
	d.mu.Lock()
	// A hold that another call has moved or released since is renewed on its new session, or not at all.
	var stay []int
	var holds []backend.Grant
	for _, i := range at {
		if h := d.holds[key{r.grants[i].Name, r.grants[i].RequestID}]; h != nil && h.session == s {
			stay, holds = append(stay, i), append(holds, r.grants[i])
		}
	}
	d.mu.Unlock()
	// All have moved away with the longer TTLs above.
	if len(stay) == 0 {
		return
	}
	seen, err := s.renew(ctx, holds, 0)
	if errors.Is(err, errNoSession) {
		err = &backend.NotHeldError{Reason: backend.ReasonSessionExpired}
	}
	if err != nil {
		r.fail(err, at...)
		return
	}
	proved := s.provedAt()
	for _, i := range stay {
		r.out[i] = backend.Renewal{SentAt: proved, TTL: s.ttl}
	}
	for j, place := range seen.gone {
		i := stay[place-1]
		d.forget(&r.grants[i])
		r.fail(seen.loss(j).NotHeld(r.grants[i].Name), i)
	}
	// The grants are grouped, so that each other session costs one statement.
	elsewhere := map[*session][]int{}
	for j, place := range seen.moved {
		i := stay[place-1]
		// A call moved the hold and lost its answer, or has not noted it yet.
		other := d.sessionOf(seen.sessions[j])
		if other == nil {
			r.fail(fmt.Errorf("%w: the hold is on another session", backend.ErrUnavailable), i)
			continue
		}
		elsewhere[other] = append(elsewhere[other], i)
	}
	for other, some := range elsewhere {
		d.moved(s, other, r.grants, some)
		r.on(ctx, other, some)
	}
}

// sessionOf returns the session with that id, or nil if it is not a live session of this driver.
func (d *Driver) sessionOf(id string) *session {
	for _, s := range d.sessions.Live() {
		if s.id == id {
			return s
		}
	}
	return nil
}

// moved notes that the grants at these places live on another session, and become its users. A grant that has been
// released or moved elsewhere meanwhile is left alone.
func (d *Driver) moved(from, to *session, grants []backend.Grant, at []int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, i := range at {
		if h := d.holds[key{grants[i].Name, grants[i].RequestID}]; h != nil && h.session == from {
			h.session.Leave(1)
			h.session = to
			to.Add(1)
		}
	}
}

// longer returns the grants with a longer TTL than their session has, by that TTL. A grant with a shorter TTL stays: a
// renewal never shortens.
func (s *session) longer(grants []backend.Grant, at []int) map[time.Duration][]int {
	some := map[time.Duration][]int{}
	for _, i := range at {
		if ttl := grants[i].TTL; ttl > s.ttl {
			some[ttl] = append(some[ttl], i)
		}
	}
	return some
}

// move moves grants to the session for another TTL, and renews them there. If the answer to the move is lost, the
// holds may be on either session: the target sweeps unknown holds (doubted), and the next renewal finds them wherever
// they are. A late move does not move a hold that has left its session since.
func (r *renewals) move(ctx context.Context, from *session, ttl time.Duration, at []int) error {
	d := r.d
	to, err := d.join(ctx, ttl)
	if err != nil {
		return err
	}
	defer to.Leave(1)
	// The arrays that the SQL function takes.
	some := make([]backend.Grant, len(at))
	for j, i := range at {
		some[j] = r.grants[i]
	}
	names, ids, tokens := columns(some)
	// Repeating an unanswered move has no effect.
	if err := d.write(ctx, d.sql.move, to.id, from.id, names, ids, tokens, d.clockKnown()); err != nil {
		to.doubted(err)
		return err
	}
	d.moved(from, to, r.grants, at)
	r.on(ctx, to, at)
	return nil
}

// checkHolds checks that the holds with a hold id still exist, and notifies their holders if not; it checks all holds
// if the id is empty. A notification triggers it, and alone is no proof. A failed check is left to the next renewal.
func (d *Driver) checkHolds(ctx context.Context, holdID string) {
	// One statement for each session, as in Renew.
	bySession := map[*session][]backend.Grant{}
	d.mu.Lock()
	for _, h := range d.holds {
		if holdID == "" || h.grant.HoldID == holdID {
			bySession[h.session] = append(bySession[h.session], h.grant)
		}
	}
	d.mu.Unlock()
	for s, grants := range bySession {
		seen, err := s.renew(ctx, grants, 0)
		for j, place := range seen.gone {
			if err != nil {
				break
			}
			g := &grants[place-1]
			d.mu.Lock()
			h := d.holds[key{g.Name, g.RequestID}]
			d.mu.Unlock()
			// The hold was released, or granted again, during the check.
			if h == nil || h.grant.Token != g.Token {
				continue
			}
			d.forget(g)
			h.lose(seen.loss(j))
		}
	}
}
