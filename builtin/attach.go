package builtin

import (
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// attach directs what the service has to tell about the session to the present connection, and asks what hangs on it.
// The requests of the session wait for that on a new connection. The caller holds d.mu.
func (s *session) attach() {
	s.seen, s.seenFrom = map[key]sight{}, s.d.last+1
	s.attachPage("", s.seenFrom)
}

// sessionPage is how much of a session is asked for at a time: each page costs the server a look at all that hangs on
// it.
const sessionPage = 5000

// attachPage asks for the names after one. from is the number of the first page's call. The caller holds d.mu.
func (s *session) attachPage(after string, from uint64) {
	s.d.start(&call{
		request: &lockpb.Request{Call: &lockpb.Request_Attach{Attach: &lockpb.Attach{After: after, Limit: sessionPage}}},
		session: s, attaches: true, once: true, looks: true,
		then: func(r *lockpb.Reply, err error) {
			if err == nil && !s.Ended() && s.seenFrom == from {
				s.attached(r)
			}
		},
	})
}

// attached takes one page of what hangs on the session. The caller holds d.mu.
func (s *session) attached(r *lockpb.Reply) {
	state := r.GetSession()
	if state == nil && r.GetError().GetCode() == lockpb.Code_CODE_SESSION_ENDED {
		s.end(backend.ReasonSessionExpired)
		return
	}
	if state == nil {
		s.attachLater() // it cannot tell yet
		return
	}
	for _, e := range state.Holds {
		s.finds(key{e.Name, e.RequestId}, e.Token)
	}
	for _, e := range state.Waits {
		s.seen[key{e.Name, e.RequestId}] = sight{there: true}
	}
	if state.NextAfter != "" {
		s.attachPage(state.NextAfter, s.seenFrom)
		return
	}
	s.misses()
	s.seen, s.looked = nil, s.proved
	if s.on == s.d.conn {
		return
	}
	s.on = s.d.conn
	for _, x := range s.d.inOrder() {
		if x.session == s && !x.attaches {
			s.d.route(x)
		}
	}
}

// attachLater asks again after a pause. The caller holds d.mu.
func (s *session) attachLater() {
	d, on := s.d, s.d.conn
	d.background(func() {
		if d.pause(d.ctx, busyPause) != nil {
			return
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.conn == on && on != nil && !s.Ended() {
			s.attach()
		}
	})
}

// sight is what the service has told of one request's name since it was asked what hangs on the session.
type sight struct {
	there bool   // it hangs there
	token uint64 // of a hold; zero for a wait
}

// unsee takes note that a hold has ended, of which the service may tell, or has just told, from before. The caller
// holds d.mu.
func (s *session) unsee(k key, token uint64) {
	if s.seen != nil && (s.seen[k] == sight{} || s.seen[k].token == token) {
		s.seen[k] = sight{token: token}
	}
}

// finds takes note of a hold that the service has. The caller holds d.mu.
func (s *session) finds(k key, token uint64) {
	if s.seen[k].token == token {
		return // it has ended meanwhile
	}
	s.seen[k] = sight{there: true, token: token}
	d := s.d
	switch h := d.holds[k]; {
	case h != nil && h.session == s && h.token == token:
	case h != nil && h.session == s && h.born < s.seenFrom && h.busy == 0:
		d.drop(k, h)
		d.tellLost(h, backend.ReasonEvicted)
	case len(s.attempts[k]) > 0:
		for _, a := range s.attempts[k] {
			a.found()
		}
		// The answer to the acquire is on its way, or it is sent again.
	case h == nil && s.leavings[k] == nil:
		if _, known := s.orphans[k]; !known {
			s.orphans[k] = orphan{token, d.clock.Now()}
		}
	}
}

// found decides an attempt that waits, if the service has told that it has all that it waits for. The caller holds
// d.mu.
func (a *attempt) found() {
	s := a.s
	if !a.queued || a.born >= s.seenFrom || a.decided() {
		return
	}
	var grants []*lockpb.Grant
	for _, w := range a.wishes {
		at := s.seen[w.key]
		if !at.there || at.token == 0 {
			return
		}
		grants = append(grants, &lockpb.Grant{Name: w.name, RequestId: w.requestID, Token: at.token})
	}
	s.d.granted(s, grants, 0)
}

// misses takes note of what the service does not have: of all that was there before it was asked.
func (s *session) misses() {
	d := s.d
	for k, h := range d.holds {
		if h.session == s && !s.seen[k].there && h.born < s.seenFrom && h.busy == 0 && !h.unsure {
			d.drop(k, h)
			d.tellLost(h, backend.ReasonEvicted)
		}
	}
	for k, all := range s.attempts {
		for _, a := range all {
			if a.queued && !s.seen[k].there && a.born < s.seenFrom {
				a.decide(nil, errAgain)
			}
		}
	}
	for k := range s.orphans {
		if !s.seen[k].there {
			delete(s.orphans, k)
		}
	}
}
