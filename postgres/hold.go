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

// hold is a grant of this driver's that nobody has released yet.
type hold struct {
	grant   backend.Grant
	session *session // protected by Driver.mu
	lost    func(backend.Reason)
}

func (h *hold) lose(reason backend.Reason) {
	if h.lost != nil {
		h.lost(reason)
	}
}

// keep remembers a grant: its session lives as long as it does.
func (d *Driver) keep(s *session, r *backend.Request, g backend.Grant) {
	d.mu.Lock()
	defer d.mu.Unlock()
	k := key{g.Name, g.RequestID}
	if old := d.holds[k]; old != nil {
		old.session.Leave(1)
	}
	s.Add(1)
	d.holds[k] = &hold{grant: g, session: s, lost: r.Lost}
	if r.Lost != nil {
		d.listen()
	}
}

// forget drops a hold that has ended.
func (d *Driver) forget(g *backend.Grant) {
	d.mu.Lock()
	defer d.mu.Unlock()
	k := key{g.Name, g.RequestID}
	if h := d.holds[k]; h != nil && (g.Token == 0 || h.grant.Token == g.Token) {
		h.session.Leave(1)
		delete(d.holds, k)
	}
}

// holdsOf returns the holds on s, and forgets them. The caller holds d.mu.
func (d *Driver) holdsOf(s *session) (all []*hold) {
	for k, h := range d.holds {
		if h.session == s {
			all = append(all, h)
			delete(d.holds, k)
		}
	}
	return all
}

// loseAll ends every session of the driver's, without asking the server.
func (d *Driver) loseAll(reason backend.Reason) {
	for _, s := range d.sessions.Live() {
		s.ended(reason)
	}
}

// known lists the requests that somebody here knows, or may come to know: on every session, since one that moves is on
// either.
func (d *Driver) known() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
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
// live as long as the session does, so the session looks after each renewal for what nobody knows.
// Err is nil if the answer came to nobody.
func (s *session) doubted(err error) {
	if rolledBack(err) || errors.Is(err, backend.ErrUnavailable) {
		return
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	s.doubt = true
}

// Release gives a hold back if it still is the one that was granted; in the same transaction the lock goes to the head
// of the queue. With a grant that Request.Grant made it removes whatever that request has, its hold or its place in the
// queue. What is not held is backend.ErrNotHeld; a commit without an answer is ErrUnknown.
func (d *Driver) Release(ctx context.Context, g backend.Grant) error {
	if err := d.enterFor(ctx, g.Name); err != nil {
		return callError("release", g.Name, err)
	}
	defer d.gate.Leave()
	if g.Token == 0 {
		d.answered(ctx, key{g.Name, g.RequestID})
	}
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
			continue // a second answer "not held" is right too: the first may have been carried out
		case ctx.Err() != nil && !errors.Is(err, ctx.Err()):
			err = fmt.Errorf("%w: %w: %w", backend.ErrUnknown, ctx.Err(), err)
		}
		return callError("release", g.Name, err)
	}
}

// Renew prolongs grants, and answers for each of them, in order: one round trip for each TTL among them, however many
// there are. A hold that is gone is a backend.NotHeldError and is never made again.
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

// renewals is one call of Renew.
type renewals struct {
	d      *Driver
	grants []backend.Grant
	out    []backend.Renewal
}

// fail answers for the grants at some places.
func (r *renewals) fail(err error, at ...int) {
	for _, i := range at {
		r.out[i] = backend.Renewal{Err: callError("renew", r.grants[i].Name, err)}
	}
}

// on renews the grants at some places, which live on s.
func (r *renewals) on(ctx context.Context, s *session, at []int) {
	d := r.d
	for ttl, some := range s.longer(r.grants, at) {
		if err := r.move(ctx, s, ttl, some); err != nil {
			r.fail(err, at...)
			return
		}
	}
	d.mu.Lock()
	var stay []int
	var holds []backend.Grant
	for _, i := range at {
		if h := d.holds[key{r.grants[i].Name, r.grants[i].RequestID}]; h != nil && h.session == s {
			stay, holds = append(stay, i), append(holds, r.grants[i])
		}
	}
	d.mu.Unlock()
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
	elsewhere := map[*session][]int{}
	for j, place := range seen.moved {
		i := stay[place-1]
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

// sessionOf returns the session with that id, if it is one of this driver's in use.
func (d *Driver) sessionOf(id string) *session {
	for _, s := range d.sessions.Live() {
		if s.id == id {
			return s
		}
	}
	return nil
}

// moved notes that grants at some places live on another session now.
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

// longer finds the grants that want a longer TTL than their session has. One that wants a shorter one stays: a renewal
// never shortens.
func (s *session) longer(grants []backend.Grant, at []int) map[time.Duration][]int {
	some := map[time.Duration][]int{}
	for _, i := range at {
		if ttl := grants[i].TTL; ttl > s.ttl {
			some[ttl] = append(some[ttl], i)
		}
	}
	return some
}

// move brings grants to the session for another TTL, and renews them there.
func (r *renewals) move(ctx context.Context, from *session, ttl time.Duration, at []int) error {
	d := r.d
	to, err := d.join(ctx, ttl)
	if err != nil {
		return err
	}
	defer to.Leave(1)
	some := make([]backend.Grant, len(at))
	for j, i := range at {
		some[j] = r.grants[i]
	}
	names, ids, tokens := columns(some)
	if err := d.write(ctx, d.sql.move, to.id, names, ids, tokens); err != nil {
		to.doubted(err)
		return err
	}
	d.moved(from, to, r.grants, at)
	r.on(ctx, to, at)
	return nil
}

// checkHolds looks whether the holds with a hold id are still there, and tells their holders if not. All holds if it is
// empty.
func (d *Driver) checkHolds(ctx context.Context, holdID string) {
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
			if h == nil || h.grant.Token != g.Token {
				continue
			}
			d.forget(g)
			h.lose(seen.reason(j))
		}
	}
}
