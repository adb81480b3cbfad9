package redlock

// This file sends votes later. A grant needs a majority, and the servers that were not asked for it vote for the hold 3
// ms afterwards, unless it has been given back by then. For a short section on five servers that is 6 requests in place
// of 10; until they follow the hold has no vote to lose (doc.go measures what that costs, and Options.WaitForAll avoids
// it).
//
// The one rule is order: a late vote must never come behind the release of its hold, or it would close that server for
// a TTL. Sending and cancelling exclude each other by laterVotes.mu, and both go on the same ordered connection.

import (
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// laterTime is how long after a grant the servers follow that were not needed for it. Most sections of which many run
// one after another are over by then, and never ask those servers anything.
const laterTime = 3 * time.Millisecond

// later knows the holds that some servers have yet to hear of.
type later struct {
	mu sync.Mutex // protects the following field
	// By request id. An entry is removed when its votes were sent or cancelled.
	holds map[string]*laterVotes
}

// laterVotes are those of one hold.
type laterVotes struct {
	d     *Driver
	keys  redisscript.Keys
	h     redisscript.Hold
	nodes set
	// When the hold has ended, unless it was renewed, which hastens the votes.
	until backend.Instant
	ttl   time.Duration

	// mu is held while the votes are sent, so that a release comes before or behind them. It protects the following
	// fields, and is taken before later.mu.
	mu sync.Mutex
	// The votes were sent, or never will be.
	over  bool
	timer *time.Timer
}

// voteLater has the nodes that a poll has not asked vote for the hold that it has won, after laterTime. The timer is
// set under mu, as it may fire before its field is written.
func (d *Driver) voteLater(c *call, v *vote, g backend.Grant) {
	rest := d.all() &^ v.asked
	if rest == 0 {
		return
	}
	l := &laterVotes{d: d, keys: c.keys, h: v.h, nodes: rest, until: g.SentAt.Add(g.TTL), ttl: g.TTL}
	d.later.mu.Lock()
	if d.later.holds == nil {
		d.later.holds = map[string]*laterVotes{}
	}
	// A later grant of the same request takes the place of an earlier one, whose votes are sent or cancelled by its own
	// timer.
	d.later.holds[v.h.Request] = l
	d.later.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.timer = time.AfterFunc(d.laterTime, l.send)
}

// send asks for the votes, on the timer's goroutine or on that of a renewal. They stand beside those who wait on these
// servers, as the hold does: it exists by its majority. Nobody awaits the answers. A server that refuses, because
// another request has its vote, is one that the hold does without; the next renewal finds it lacking and asks again.
func (l *laterVotes) send() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return
	}
	// Until then a release that finds the hold waits for mu.
	defer l.end()
	// The timer was late, as on a machine that slept: a vote for a hold that has ended would close the server.
	if l.d.clock.Now() >= l.until {
		return
	}
	// Nobody reads the answers, for which there is room.
	sink := make(chan *step, len(l.d.nodes))
	value, px := l.h.Value(), redisscript.Millis(l.h.PX)
	deadline := time.Now().Add(l.d.nodeTimeout(l.ttl))
	for i, n := range l.d.nodes {
		if l.nodes.has(i) {
			s := n.stepFor(sink, l.keys, redisscript.Set, value, px)
			s.Deadline = deadline
			n.ask(s)
		}
	}
}

// end notes that there is nothing more to send. mu is held.
func (l *laterVotes) end() {
	l.over = true
	l.timer.Stop()
	holds := &l.d.later
	holds.mu.Lock()
	defer holds.mu.Unlock()
	if holds.holds[l.h.Request] == l {
		delete(holds.holds, l.h.Request)
	}
}

// find returns what is to follow for a request, or nil.
func (o *later) find(request string) *laterVotes {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.holds[request]
}

// cancel gives up what has not been sent for a request's hold, or only for the one that starts so, and returns the
// nodes that never hear of it. A release leaves these nodes out.
func (o *later) cancel(request, start string) set {
	l := o.find(request)
	// Another attempt's votes are not this hold's to cancel.
	if l == nil || start != "" && l.h.Start() != start {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return 0
	}
	l.end()
	return l.nodes
}

// hasten sends now what is to follow for a request's hold: a renewal needs the votes there, and a hold that is renewed
// is not a short one.
func (o *later) hasten(request string) {
	if l := o.find(request); l != nil {
		l.send()
	}
}
