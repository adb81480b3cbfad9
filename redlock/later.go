package redlock

// This file sends votes later. A grant needs a majority, and the servers that were not asked for it vote for the hold 3
// ms afterwards, unless it has been released by then. For a short section on five servers that is 6 requests in place
// of 10; until they follow the hold has no vote to lose (doc.go has the measured cost, and Options.WaitForAll avoids
// it).
//
// The one rule is order: a late vote must never come behind the release of its hold, or it would close that server for
// a TTL. Sending and cancelling exclude each other by later.mu, and both use the same ordered connection.

import (
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// laterTime is the time from a grant until the remaining servers are asked. Most sections of a quick succession are
// over by then, and never ask those servers.
const laterTime = 3 * time.Millisecond

// later knows the holds that some servers have yet to hear of.
type later struct {
	// mu is held while votes are sent, so that a release comes before or behind them. It protects the following field.
	mu sync.Mutex
	// By request id. An entry is removed when its votes were sent or cancelled.
	holds map[string]*laterVotes
}

// laterVotes are the pending votes of one hold.
type laterVotes struct {
	keys  redisscript.Keys
	h     redisscript.Hold
	nodes set
	// When the hold has ended, unless it was renewed, which hastens the votes.
	until backend.Instant
	ttl   time.Duration
	timer *time.Timer
}

// voteLater has the nodes that a poll has not asked vote for the hold that it has won, after laterTime. A later grant
// of the same request takes the place of an earlier one, which does without these votes.
func (s *service) voteLater(a *attempt, v *vote) {
	rest := s.all() &^ v.asked
	if rest == 0 {
		return
	}
	l := &laterVotes{keys: a.keys, h: a.h, nodes: rest, until: s.clock.Now().Add(a.r.TTL), ttl: a.r.TTL}
	o := &s.later
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.holds == nil {
		o.holds = map[string]*laterVotes{}
	}
	o.holds[l.h.Request] = l
	l.timer = time.AfterFunc(s.laterTime, func() { s.sendLater(l.h.Request, l.h.Start()) })
}

// sendLater sends the pending votes for a request's hold now, or only for the hold with the given start: on the
// timer's goroutine, or on that of a renewal, which needs the votes there and shows that the hold is not a short one.
// The votes stand beside waiters on these servers, as the hold does: it exists by its majority. The answers are not
// awaited. If a server refuses, because another request has its vote, the hold does without it; the next renewal finds
// the vote missing and asks for it.
//
// The lines take the steps without waiting for a server, so that mu is held for a few small writes.
func (s *service) sendLater(request, start string) {
	o := &s.later
	o.mu.Lock()
	defer o.mu.Unlock()
	l := o.take(request, start)
	// The timer may be late, as on a machine that slept: a vote for a hold that has ended would close the server.
	if l == nil || s.clock.Now() >= l.until {
		return
	}
	s.round(l.keys, s.nodeTimeout(l.ttl)).to(l.nodes, redisscript.Set, l.h.Value(), redisscript.Millis(l.h.PX))
}

// cancelLater cancels the unsent votes for a request's hold, or only for the hold with the given start, and returns the
// nodes that never hear of it. A release leaves these nodes out.
func (s *service) cancelLater(request, start string) set {
	o := &s.later
	o.mu.Lock()
	defer o.mu.Unlock()
	if l := o.take(request, start); l != nil {
		return l.nodes
	}
	return 0
}

// take removes the pending votes for a request, if they are for the hold with the given start; an empty start is any.
// Another try's votes are not this hold's to send or to cancel. mu is held.
func (o *later) take(request, start string) *laterVotes {
	l := o.holds[request]
	if l == nil || start != "" && l.h.Start() != start {
		return nil
	}
	l.timer.Stop()
	delete(o.holds, request)
	return l
}
