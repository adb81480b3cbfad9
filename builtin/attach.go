package builtin

// What a session does first on each new connection: it asks what hangs on it, and compares. Only a connection can lose
// pushes and answers, so this is the one place where the driver has to find out what it was not told.

import (
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// attach directs what the service has to tell about the session to the present connection, and compares what hangs on
// the session there with what is believed here: with the connection before, pushes and answers got lost. The requests
// of the session wait for that. The caller holds d.mu.
//
// A list confirms holds and shows what is missing, but nobody is granted anything by it. It comes in pages, which the
// server makes one after the other while pushes go on, so a page may tell of a hold whose loss was pushed before it.
// Granting by pages needs a note of each such push until the last page is there; asking again needs none, and costs one
// request for each waiter that was granted while there was no connection.
//
// What came on this connection is newer than a page that misses it: hold.on and attempt.on are there to tell.
func (s *session) attach() { s.attachPage("") }

// sessionPage is how much of a session is asked for at a time: each page costs the server a look at all that hangs on
// it.
//
// With 100,000 holds the 20 pages are some 9 MB together, and cost the leader a second of its processor
// (BenchmarkSessionPages). All of it in one page would be one message of that size, behind which every other answer on
// the connection waits.
const sessionPage = 5000

// attachPage asks for the names after one. The caller holds d.mu. The answer to a page that was lost with its
// connection is not needed: the next connection begins with the first page.
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

// attached takes one page of what hangs on the session. The caller holds d.mu.
//
//	an error               asked again after a pause, from the first page on; not on another connection, which begins
//	                       with an attachment of its own
//	a page, not the last   noted, and the next one is asked for
//	the last page          what no page has told of is missing; then the session's calls are sent
func (s *session) attached(r *lockpb.Reply) {
	d, state := s.d, r.GetSession()
	if state == nil { // it cannot tell yet
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

// finds takes note of a hold that the service has. A waiter that wants it asks again, in misses. A hold that nobody
// here knows of is a leftover: it may have been granted to an attempt that was given up. The caller holds d.mu.
//
// A hold that is on another session here, or has another token, is left alone: the page is older than what is known
// here, or the answer to a call that is under way will tell.
func (s *session) finds(k key, token uint64) {
	switch h := s.d.holds[k]; {
	case h != nil && h.session == s && h.token == token:
		h.on = s.d.conn
	case h == nil && len(s.attempts[k]) == 0 && s.leftovers[k] == nil:
		s.leave(k, token, 0)
	}
}

// misses takes note of what the service has not told of on the present connection. Such a hold is lost. Such a waiter
// has left the queue, or was granted what it waits for: it asks again, and the same request has the same hold. The
// caller holds d.mu.
//
// A hold with a call on its way that ends or moves it (busy), or of which a move was not answered (unsure), may be
// missing for that reason: the call's own answer decides. The reason that holders are told is backend.ReasonEvicted,
// since the one that the server had was lost with its push.
func (s *session) misses() {
	d := s.d
	for k, h := range d.holds {
		if h.session == s && h.on != d.conn && h.busy == 0 && !h.unsure {
			d.lose(k, h, backend.ReasonEvicted)
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
