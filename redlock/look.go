package redlock

// This file holds the timed actions of a waiter, without a push: it looks at its places, renews votes that have become
// old, replaces an unresponsive leader, and drops votes that stay split. It also counts the votes.
//
// One timer serves all of it (due), and tick performs the due actions. There is no timer for the end of a hold in the
// way: a look is brought forward to that moment, since a look also has the server hand over. A separate step for that
// would save the server little and cost every waiter a second schedule.
//
// How often it looks depends on where it stands. In the leader's queue a look every few seconds is enough, because a
// push is on its way and the look only shows that this client lives. With the leader's vote it looks after 40 ms and
// then every half second, because now others wait for the same votes.

import (
	mathrand "math/rand/v2"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// majority returns the instant from which a majority's votes are proved, or zero. It counts only votes that a node has
// confirmed to this try; an unaccepted offer has no instant and does not count.
//
// Votes may be older than a good part of the validity, when the last of them took long. A look then makes them whole,
// and shows that they are still there: a grant by such votes would begin with little of its time left.
func (x *waiter) majority() backend.Instant {
	proved := make([]backend.Instant, len(x.places))
	for i := range x.places {
		if x.places[i].state == voted {
			proved[i] = x.places[i].proved
		}
	}
	d := x.a.d
	at := nth(proved, d.quorum)
	if at == 0 || d.clock.Now().Sub(at) <= x.a.r.TTL/4 {
		return at
	}
	x.soon(reachLook) // not at once, as the answers to a look may be on their way
	return 0
}

// due is when to do something unasked: the next look, or the end of the leader's time to answer.
func (x *waiter) due() time.Time {
	at := x.look
	if !x.asked.IsZero() {
		if end := x.asked.Add(x.a.patience); end.Before(at) {
			at = end
		}
	}
	return at
}

// lookIn sets the next look, sooner or later than it was.
func (x *waiter) lookIn(d time.Duration) { x.look = time.Now().Add(d) }

// soon brings the next look forward and never puts it off. The few milliseconds of jitter let waiters of several
// clients arrive apart.
func (x *waiter) soon(d time.Duration) {
	if at := time.Now().Add(d + mathrand.N(5*time.Millisecond)); at.Before(x.look) {
		x.look = at
	}
}

// tick performs the due actions. A look asks each node for the state of this waiter's place or vote, which keeps it
// alive, and once the others were asked also for the holder in the way there. Nodes without either are asked for their
// votes anew.
func (x *waiter) tick() error {
	now := time.Now()
	// The leader does not answer: its possible place is removed in the end, and another node leads.
	if !x.asked.IsZero() && now.Sub(x.asked) >= x.a.patience {
		x.asked = time.Time{}
		x.places[x.leader].state = absent
		return x.failed(x.leader)
	}
	if now.Before(x.look) {
		return nil
	}
	if x.reached && x.split() {
		return errSplit
	}
	if x.reached {
		x.lookIn(redisscript.Jitter(min(reachEvery, x.h.PX/3)))
	} else {
		x.lookIn(redisscript.NextLook(0))
	}
	if cap(x.sink)-x.flying < 2*len(x.places) {
		return nil
	}
	for i := range x.places {
		n, p := x.a.d.nodes[i], &x.places[i]
		switch {
		case p.state == queued || p.state == voted:
			x.submit(i, n.stepFor(x.sink, x.a.keys, redisscript.Look, x.a.d.identity, x.h.Nonce))
			// Who is in the way matters for split votes only.
			if x.reached {
				x.submit(i, n.stepFor(x.sink, x.a.keys, redisscript.Inform))
			}
		// A node that did not answer, or has lost the vote, is asked anew: the majority may need it.
		case p.state == absent && x.reached && i != x.leader:
			x.queue(i)
		}
	}
	return nil
}

// split reports whether votes have been split for some looks: neither this waiter nor anybody else has a majority. The
// last looks name the holders of the other votes (place.holder); a node that has not answered counts for nobody.
//
// Dropping one's votes is always safe; with jitter, one of the waiters is then alone the next time. It waits for some
// looks because a release that has reached only some servers looks the same.
func (x *waiter) split() bool {
	mine := 0
	others := map[string]int{}
	for i := range x.places {
		p := &x.places[i]
		switch {
		case p.state == voted:
			mine++
		case p.holder != "" && p.holder != x.h.Request:
			others[p.holder]++
			if others[p.holder] >= x.a.d.quorum {
				x.looks = 0
				return false
			}
		}
	}
	x.looks++
	return mine < x.a.d.quorum && x.looks > patientFor
}

// unsure reports whether some node may have an entry without an answer about it. Unsent steps are taken back.
func (x *waiter) unsure() bool {
	unsure := false
	for i := range x.places {
		p := &x.places[i]
		// The line has not taken it: the server never hears of it.
		if p.state == asking && p.step.Drop() {
			p.unsure, p.state = false, absent
		}
		unsure = unsure || p.unsure
	}
	return unsure
}

// left returns the nodes that may have an entry to remove: every node that was ever asked for a place in this try. An
// answer that there is none may be older than a request that came late.
func (x *waiter) left() (nodes set) {
	for i := range x.places {
		if x.places[i].step != nil {
			nodes |= only(i)
		}
	}
	return nodes
}
