package engine

import (
	"context"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// hold is a hold of a request on a session, or a possible later one.
type hold struct {
	s           *session
	incarnation string   // "" as long as it is in doubt
	late        []string // attempts of which an Enter went unanswered
	until       backend.Instant
	ended       backend.Reason  // why it is over, if its session is
	loss        backend.Loss    // that the service has reported
	doubted     backend.Instant // when its attempt ended in doubt
}

// adoption is a renewal that moves a hold to a session, or finds it there, until the hold is dropped.
type adoption struct{ _ byte }

// keepHold notes the hold or wait of a request on s, or with late, the possible one of that attempt. It is false if s
// has ended.
func (all *sessions) keepHold(requestID string, s *session, incarnation, late string) bool {
	all.mu.Lock()
	defer all.mu.Unlock()
	h := all.holds[requestID]
	if h == nil || h.s != s {
		if !s.Add(1) {
			return false
		}
		moved := &hold{s: s}
		if h != nil {
			if len(h.late) > 0 && all.table.Abandon(h.s) { // a late Enter lands there
				h.s.outgrow()
			}
			h.s.Leave(1)
			moved.until = h.until
		}
		h = moved
		all.holds[requestID] = h
	}
	if late != "" && !slices.Contains(h.late, late) {
		h.late = append(h.late, late)
	}
	if incarnation != "" {
		h.incarnation = incarnation
	}
	return true
}

// keepPlaces notes the places of an abandoned attempt, until they are removed: a place that cannot be removed ends with
// its session.
func (all *sessions) keepPlaces(rs []backend.Request, s *session) {
	all.mu.Lock()
	defer all.mu.Unlock()
	for _, r := range rs {
		if all.holds[r.RequestID] == nil && s.Add(1) {
			all.holds[r.RequestID] = &hold{s: s}
		}
	}
}

// adopt begins the adoption of the holds that are not known on the session. end ends it.
func (all *sessions) adopt(holds []Holding) (adopted []*adoption, end func()) {
	adopted = make([]*adoption, len(holds))
	if all == nil {
		return adopted, func() {}
	}
	all.mu.Lock()
	defer all.mu.Unlock()
	for i, h := range holds {
		if !h.Known {
			adopted[i] = new(adoption)
			all.adopting[h.RequestID] = adopted[i]
		}
	}
	return adopted, func() {
		all.mu.Lock()
		defer all.mu.Unlock()
		for i, h := range holds {
			if all.adopting[h.RequestID] == adopted[i] {
				delete(all.adopting, h.RequestID)
			}
		}
	}
}

// keepAdopted notes a hold that a renewal has put on s, unless it was dropped meanwhile. It is false if s has ended.
func (all *sessions) keepAdopted(a *adoption, g backend.Grant, s *session) bool {
	all.mu.Lock()
	stands := all.adopting[g.RequestID] == a
	all.mu.Unlock()
	return !stands || all.keepHold(g.RequestID, s, g.Incarnation, "")
}

// answered notes that no Enter of an attempt can take effect late. A caller that has left does not know the answers.
func (all *sessions) answered(rs []backend.Request, attempt string) {
	all.mu.Lock()
	defer all.mu.Unlock()
	for _, r := range rs {
		if h := all.holds[r.RequestID]; h != nil {
			h.late = slices.DeleteFunc(h.late, func(late string) bool { return late == attempt })
		}
	}
}

// settle notes that all Enters of an attempt were answered to its caller.
func (all *sessions) settle(requestID, attempt string) {
	all.mu.Lock()
	defer all.mu.Unlock()
	h := all.holds[requestID]
	if h == nil {
		return
	}
	h.late = slices.DeleteFunc(h.late, func(late string) bool { return late == attempt })
	if h.incarnation == "" && len(h.late) == 0 {
		delete(all.holds, requestID)
		h.s.Leave(1)
	}
}

// hold returns the engine's hold of a grant. A grant without an incarnation names any hold or wait of its request.
func (all *sessions) hold(g backend.Grant) (h hold, known bool) {
	if all == nil {
		return h, false
	}
	all.mu.Lock()
	defer all.mu.Unlock()
	p := all.holds[g.RequestID]
	if p == nil || g.Incarnation != "" && p.incarnation != "" && p.incarnation != g.Incarnation {
		return h, false
	}
	h = *p
	h.late = slices.Clone(p.late)
	return h, true
}

// holdsAnother reports whether a request is known to hold with another incarnation than g's.
func (all *sessions) holdsAnother(g backend.Grant) bool {
	if all == nil {
		return false
	}
	all.mu.Lock()
	defer all.mu.Unlock()
	h := all.holds[g.RequestID]
	return h != nil && h.incarnation != "" && h.incarnation != g.Incarnation
}

// lose notes a loss that the service has reported: a later answer may not have the reason any more. If nobody asks for a
// TTL, the hold is forgotten.
func (all *sessions) lose(g backend.Grant, loss backend.Loss) {
	if all == nil {
		return
	}
	all.mu.Lock()
	defer all.mu.Unlock()
	if h := all.holds[g.RequestID]; h != nil && (g.Incarnation == "" || h.incarnation == g.Incarnation) {
		h.loss = loss
		g.Incarnation = h.incarnation
		time.AfterFunc(h.s.ttl, func() {
			if !all.doubtLate(g) {
				all.drop(g, false)
			}
		})
	}
}

// stay keeps s for a TTL, since holds may have moved to it by a renewal without an answer: until they are renewed
// again, or lost.
func (all *sessions) stay(s *session) {
	if s.Add(1) && !all.d.gate.Go(func(context.Context) {
		_ = kit.Sleep(all.d.gate.Closing(), s.ttl)
		s.Leave(1)
	}) {
		s.Leave(1)
	}
}

// drop removes a hold that has ended. abandoned is for a hold that could not be removed: all others move to another
// session, and this session ends with the last of them.
func (all *sessions) drop(g backend.Grant, abandoned bool) {
	if all == nil {
		return
	}
	all.mu.Lock()
	defer all.mu.Unlock()
	delete(all.adopting, g.RequestID)
	h := all.holds[g.RequestID]
	if h == nil || g.Incarnation != "" && h.incarnation != "" && h.incarnation != g.Incarnation {
		return
	}
	delete(all.holds, g.RequestID)
	if abandoned && all.table.Abandon(h.s) {
		h.s.outgrow()
	}
	h.s.Leave(1)
}

// doubtLate keeps a lost hold in doubt if an Enter of it may take effect late. It reports whether that is so.
func (all *sessions) doubtLate(g backend.Grant) bool {
	if all == nil {
		return false
	}
	all.mu.Lock()
	defer all.mu.Unlock()
	h := all.holds[g.RequestID]
	if h == nil || len(h.late) == 0 || h.s.Ended() ||
		g.Incarnation != "" && h.incarnation != "" && h.incarnation != g.Incarnation {
		return false
	}
	if h.incarnation != "" {
		h.incarnation, h.doubted = "", all.d.clock.Now()
		wake(h.s.doubted)
	}
	return true
}

// doubt notes that an attempt has ended with an unknown outcome. A possible grant is abandoned unless it is released
// or acquired within a quarter of the TTL, which leaves the other holds time to move, and the session to end, within
// about a TTL.
func (all *sessions) doubt(rs []backend.Request) {
	all.mu.Lock()
	defer all.mu.Unlock()
	for _, r := range rs {
		if h := all.holds[r.RequestID]; h != nil && h.incarnation == "" {
			h.doubted = all.d.clock.Now()
			wake(h.s.doubted)
		}
	}
}

// abandonDoubts abandons attempts that are in doubt on s for a quarter of the TTL, and reports whether there are
// more.
func (all *sessions) abandonDoubts(s *session) (more bool) {
	all.mu.Lock()
	var late []backend.Grant
	for id, h := range all.holds {
		switch {
		case h.s != s || h.incarnation != "" || h.doubted.IsZero():
		case all.d.clock.Now().Sub(h.doubted) < s.ttl/4 || all.d.entering(id):
			more = true
		default:
			late = append(late, backend.Grant{RequestID: id})
		}
	}
	all.mu.Unlock()
	for _, g := range late {
		all.drop(g, true)
	}
	return more
}

// promise notes the instant until which a holder may rely on a hold.
func (all *sessions) promise(g backend.Grant, until backend.Instant) {
	all.mu.Lock()
	defer all.mu.Unlock()
	if h := all.holds[g.RequestID]; h != nil && until > h.until {
		h.until = until
	}
}

// sessionOf returns the session on which a hold is renewed, with one user more: its own, or the one to which it moves.
// A renewal with a shorter TTL moves it when the shorter session lasts until the end of the earlier promise. known
// reports whether the engine knows the hold.
func (all *sessions) sessionOf(ctx context.Context, g backend.Grant) (s *session, known bool, err error) {
	h, known := all.hold(g)
	known = known && h.incarnation != ""
	if !known {
		s, err = all.join(ctx, g.TTL)
		return s, false, err
	}
	if h.s.Ended() {
		return nil, true, all.d.notHeld(g, backend.Loss{Reason: h.ended})
	}
	same := g.TTL == h.s.ttl || all.length(g.TTL) == h.s.asked
	early := g.TTL < h.s.ttl && all.d.clock.Now().Add(g.TTL-g.TTL/3) < h.until
	switch {
	case h.s.isOutgrown() && (same || early):
		s, err = all.join(ctx, h.s.asked)
	case (same || early) && h.s.Add(1):
		return h.s, true, nil
	default:
		s, err = all.join(ctx, g.TTL)
	}
	return s, true, err
}
