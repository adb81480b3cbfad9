package builtin

// A session's first step on each new connection: it asks the server for its holds and waits, and compares them with
// the driver's records. Pushes and answers are lost only with a connection, so the driver looks for missed ones only
// here.

import (
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// attach directs the session's pushes to the present connection, and compares the session at the server with the
// driver's own records: the previous connection may have lost pushes and answers. The requests of the session wait
// until this is done. The caller holds d.mu.
//
// A list confirms holds and shows missing ones, but does not grant. It comes in pages, which the server makes one by
// one while pushes continue, so a page may list a hold after the push of its loss. To grant by pages, the driver would
// have to record each such push until the last page has come; a repeated request needs no record, and costs one
// request for each waiter that was granted while there was no connection.
//
// A push or an answer on this connection is newer than a page that lacks its hold: hold.on and attempt.on show that.
func (s *session) attach() { s.attachPage("") }

// sessionPage bounds the names of a session in one page: for each page the server visits the whole session.
//
// With 100,000 holds the 20 pages are some 9 MB together, and cost the leader a second of its processor
// (BenchmarkSessionPages). All of it in one page would be one message of that size, which delays every other answer on
// the connection.
const sessionPage = 5000

// attachPage asks for the page of names after the given one. The caller holds d.mu. The answer to a page that was lost
// with its connection is not needed: the next connection begins with the first page.
func (s *session) attachPage(after string) {
	s.d.start(&call{
		request: &lockpb.Request{Call: &lockpb.Request_Attach{
			Attach: &lockpb.Attach{After: after, Limit: sessionPage},
		}},
		session: s, attaches: true, once: true, looks: true,
		then: func(r *lockpb.Reply, err error) {
			if err == nil && !s.Ended() {
				s.attached(r)
			}
		},
	})
}

// attached handles one page of a session. The caller holds d.mu.
//
//	DENIED                 the session ends here: the server refuses this client's further requests for it
//	another error          asked again after a pause, from the first page on; not on another connection, which begins
//	                       with its own attachment
//	a page, not the last   noted, and the next one is asked for
//	the last page          the holds and waits that no page has listed are missing; then the session's calls are sent
func (s *session) attached(r *lockpb.Reply) {
	d, state := s.d, r.GetSession()
	if r.GetError().GetCode() == lockpb.Code_CODE_DENIED { // the certificate of this client has another name by now
		s.end(backend.ReasonSessionExpired)
		return
	}
	if state == nil { // no answer yet
		on := d.conn
		d.later(func() {
			if d.conn == on && on != nil && !s.Ended() {
				s.attach()
			}
		})
		return
	}
	for _, e := range state.Holds {
		s.finds(key{e.Name, e.RequestId}, e.Token)
	}
	for _, e := range state.Waits {
		for _, a := range s.attempts[key{e.Name, e.RequestId}] {
			a.on = d.conn
		}
	}
	if state.NextAfter != "" {
		s.attachPage(state.NextAfter)
		return
	}
	s.misses()
	s.on = d.conn
	for _, x := range d.inOrder() {
		if x.session == s && !x.attaches {
			d.route(x)
		}
	}
}

// finds notes a hold that the service has. If an attempt waits for that hold, misses repeats its request. A hold that
// is unknown here is a leftover: it may have been granted to an abandoned attempt. The caller holds d.mu.
//
// finds ignores a hold that is on another session here, or has another token: the page is older than this driver's
// records, or the answer to a call in progress will settle it.
func (s *session) finds(k key, token uint64) {
	switch h := s.d.holds[k]; {
	case h != nil && h.session == s && h.token == token:
		h.on = s.d.conn
	case h == nil && len(s.attempts[k]) == 0 && s.leftovers[k] == nil:
		s.leave(k, token, 0)
	}
}

// misses handles holds and waiters that the service has not listed on the present connection. Such a hold is lost.
// Such a waiter has lost its place in the queue, or was granted: it repeats its request, and the same request gets the
// same hold. The caller holds d.mu.
//
// A hold with a call in progress that ends or moves it (busy), or with an unanswered move (unsure), may be missing for
// that reason: the call's own answer decides. Holders get backend.ReasonEvicted, since the server's own reason was
// lost with its push.
func (s *session) misses() {
	d := s.d
	for k, h := range d.holds {
		if h.session == s && h.on != d.conn && h.busy == 0 && !h.unsure {
			d.lose(k, h, backend.Loss{Reason: backend.ReasonEvicted})
		}
	}
	for _, all := range s.attempts {
		for _, a := range all {
			if a.queued && a.on != d.conn {
				a.repeat()
			}
		}
	}
}
