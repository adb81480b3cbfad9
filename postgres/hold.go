// This file keeps the driver's holds, and releases and renews them. Driver.holds is what this client believes it has,
// by name and request id, each on the session that keeps it; the table holds is what counts. The two can differ: a
// call that was not answered may have moved a hold to another session, a standby that lagged may have lost one or
// brought one back. A renewal says which holds are gone and which have moved, and Driver.holds follows.
//
// A hold counts as one user of its session, from keep to forget, so that the session is renewed as long as it has
// holds. It leaves Driver.holds in one of four ways: Release forgets it, whatever the answer, as long as there is one;
// Renew or checkHolds finds it gone; its session ends (holdsOf); or the same request is granted again and replaces it.
// Only the second and the third are losses. Renew answers with its loss, the other two tell it to Request.Lost.
//
// Between the driver's note and the table there is no lock: each statement says what it expects (name, request id and
// token), and the server compares.

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

// hold is a grant of this driver's that nobody has released yet. session changes when the hold moves to another TTL.
type hold struct {
	grant   backend.Grant
	session *session // protected by Driver.mu
	// Request.Lost; nil if the caller asked for none.
	lost func(backend.Reason)
}

// lose tells the holder. It is called without Driver.mu, since the core may call the driver back.
func (h *hold) lose(reason backend.Reason) {
	if h.lost != nil {
		h.lost(reason)
	}
}

// keep remembers a grant: its session lives as long as it does. The same request granted again replaces the entry, and
// with it the callback. The first holder who wants to be told of losses starts the connection that listens.
func (d *Driver) keep(s *session, r *backend.Request, g backend.Grant) {
	d.mu.Lock()
	defer d.mu.Unlock()
	k := key{g.Name, g.RequestID}
	// The same request, granted again: the new hold has a user of its own.
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
// hold again by now.
func (d *Driver) forget(g *backend.Grant) {
	d.mu.Lock()
	defer d.mu.Unlock()
	k := key{g.Name, g.RequestID}
	// A grant without a token names whatever the request has.
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

// loseAll ends every session of the driver's, without asking the server: it has forgotten them.
func (d *Driver) loseAll(reason backend.Reason) {
	for _, s := range d.sessions.Live() {
		s.ended(reason)
	}
}

// known lists the requests that somebody here knows, or may come to know: those that are held, and those of calls
// under way. It lists them for every session, since a hold that moves is on either until the answer has come. A sweep
// spares them.
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

// doubted notes that a request on the session may be carried out although nobody will know its answer. It could then
// live as long as the session does, so that the session looks after each renewal for what nobody knows. err is what
// became of the request, and nil if the answer came to nobody; one that certainly left nothing leaves no doubt.
func (s *session) doubted(err error) {
	// It left nothing, or was never sent.
	if rolledBack(err) || errors.Is(err, backend.ErrUnavailable) {
		return
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	s.doubt = true
}

// Release gives a hold back if it still is the one that was granted: name, request id and token must match, so that a
// release which is delivered late ends no later hold. In the same transaction the lock goes to the head of the queue.
// A hold with a minimum time that is not over stays closed to others until it is.
//
// With a grant that Request.Grant made it removes whatever that request has, its hold or its place in the queue, and
// waits first for the answer to an acquire of it that is under way. What is not held is a *backend.NotHeldError, with
// the reason if the server knows it. A commit without an answer is asked about again until ctx ends, and is then
// ErrUnknown. Release is safe for concurrent use, also for one grant.
func (d *Driver) Release(ctx context.Context, g backend.Grant) error {
	if err := d.enterFor(ctx, g.Name); err != nil {
		return callError("release", g.Name, err)
	}
	defer d.gate.Leave()
	// What is released by its request alone may still be on its way.
	if g.Token == 0 {
		d.answered(ctx, key{g.Name, g.RequestID})
	}
	// Whether its own minimum still binds, as the holder believes; the server decides by its own clock when that is
	// over.
	keep := g.MinHoldUntil > d.clock.Now()
	for {
		a, err := d.releases.ask(ctx, g.Token != 0, g.Name, g.RequestID, int64(g.Token.Order()), keep)
		switch {
		case err == nil && a.state == "ended":
			d.forget(&g)
			return nil
		case err == nil:
			d.forget(&g)
			return callError("release", g.Name, &backend.NotHeldError{Name: g.Name, Reason: backend.Reason(a.reason)})
		case again(err) && d.pause(ctx, giveUpTime):
			// A second answer "not held" is right too: the first may have been carried out.
			continue // a second answer "not held" is right too: the first may have been carried out
		case ctx.Err() != nil && !errors.Is(err, ctx.Err()):
			// The caller sees both, why it ended and what the last try said.
			err = fmt.Errorf("%w: %w: %w", backend.ErrUnknown, ctx.Err(), err)
		}
		return callError("release", g.Name, err)
	}
}

// Renew prolongs grants, and answers for each of them, in order: one statement for each TTL among them, however many
// there are, and all TTLs side by side. The server's clock sets the new end, and only ever to a later one.
//
// A grant with a longer TTL than its session's moves to the session of that TTL, with what it had as a minimum; one
// with a shorter TTL stays: a renewal never shortens. A hold that is gone is a *backend.NotHeldError with the reason
// and is never made again. Everything else is ErrUnavailable or ErrUnknown and says nothing about the hold. Renew
// returns with the end of ctx. It may be called for the same grants concurrently, and beside Release.
func (d *Driver) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	r := &renewals{d: d, grants: grants, out: make([]backend.Renewal, len(grants))}
	if err := d.enter(ctx); err != nil {
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
	// Side by side: a session that is slow to answer must not use up the time of another.
	for s, at := range bySession {
		all.Go(func() { r.on(ctx, s, at) })
	}
	all.Wait() // each is bounded by ctx
	return r.out
}

// goneWhy is the reason for a hold that this driver no longer has. The caller holds d.mu.
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

// on renews the grants at some places, which live on s, and those that turn out to live on another session, there. A
// hold on a session that this driver does not know is in the middle of a move, or another client's: ErrUnavailable,
// since the next renewal will find it. To answer "not held" there would be a loss that was none, and holders stop
// their work for it (TestHoldMovesUnheard).
func (r *renewals) on(ctx context.Context, s *session, at []int) {
	d := r.d
	for ttl, some := range s.longer(r.grants, at) {
		if err := r.move(ctx, s, ttl, some); err != nil {
			r.fail(err, at...)
			return
		}
	}
	d.mu.Lock()
	// A hold that a call has moved or released since is answered where it is, or not at all.
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
		r.fail(&backend.NotHeldError{Name: r.grants[i].Name, Reason: seen.reason(j)}, i)
	}
	// Grouped, so that each other session costs one statement.
	elsewhere := map[*session][]int{}
	for j, place := range seen.moved {
		i := stay[place-1]
		// Moved by a call whose answer was lost, or that has not noted it yet.
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

// sessionOf returns the session with that id, or nil if it is none of this driver's that lives.
func (d *Driver) sessionOf(id string) *session {
	for _, s := range d.sessions.Live() {
		if s.id == id {
			return s
		}
	}
	return nil
}

// moved notes that grants at some places live on another session, whose users they become. One that has been released
// or moved elsewhere meanwhile is left alone.
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

// longer finds the grants that want a longer TTL than their session has, by that TTL. One that wants a shorter one
// stays: a renewal never shortens.
func (s *session) longer(grants []backend.Grant, at []int) map[time.Duration][]int {
	some := map[time.Duration][]int{}
	for _, i := range at {
		if ttl := grants[i].TTL; ttl > s.ttl {
			some[ttl] = append(some[ttl], i)
		}
	}
	return some
}

// move brings grants to the session for another TTL, and renews them there. If the answer to the move is lost, the
// holds may be on either session: the target looks for what nobody knows (doubted), and the next renewal finds them
// wherever they are.
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
	// Moving an unanswered move again changes nothing.
	if err := d.write(ctx, d.sql.move, to.id, names, ids, tokens); err != nil {
		to.doubted(err)
		return err
	}
	d.moved(from, to, r.grants, at)
	r.on(ctx, to, at)
	return nil
}

// checkHolds looks whether the holds with a hold id are still there, and tells their holders if not; all holds if the
// id is empty. It is what a notification leads to: the notification itself is no proof of anything. What cannot be
// asked is left to the next renewal.
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
			// Released, or granted anew, while we asked.
			if h == nil || h.grant.Token != g.Token {
				continue
			}
			d.forget(g)
			h.lose(seen.reason(j))
		}
	}
}
