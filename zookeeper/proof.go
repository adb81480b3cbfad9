// This file is the arithmetic of a session's proofs. It does no I/O and reads no clock, so that TestProof
// checks it with plain numbers.
//
// An example with a tick of 2 s: the session was made by a request that was sent at 0 s, and questions are sent at 0.8
// s and 1.6 s. The answer to the second one shows that the leader has heard of everything that the client's server had
// up to 0.6 s, which is the request sent at 0 s. So the session lives from 0 s on for its timeout at least. With the
// margin of a tick that Describe declares, up to 2 s may be reported, and 1.6 s is. A question that comes ten seconds
// after the one before it can report no more than a tick beyond that one: proveUntil then asks once more.

package zookeeper

import (
	"time"

	"github.com/fencelock/fencelock/backend"
)

// proof says until when a session lives for sure.
//
// The leader alone ends sessions. It starts a session's time anew when it makes the session, when a client reconnects,
// and when a server tells it in one of its answers to the leader's pings, twice a tick, that it heard from the client.
// An answer alone proves little: a server that was cut off from the leader goes on answering reads until it notices,
// and a leader that froze while another one was elected goes on answering sync, and letting clients reconnect.
//
// The driver therefore asks with a read-only transaction that checks a version. A majority must log it, and
// the leader refuses it for sessions that have ended. When a transaction sent at t is answered, its leader has led
// until t at least, and everything that the client's server had to tell up to half a tick before t has reached it, on
// the same stream. A request that was sent at u ≤ t − tick/2 has started the session's time anew, and it lives until u
// + timeout; a later leader starts the time of all sessions anew. The driver declares a margin of one tick, so that it
// may report u + tick, and never more than t. While it asks more than twice a tick, it reports t.
type proof struct {
	tick    time.Duration
	base    backend.Instant   // the leader has heard of this one
	touches []backend.Instant // answered requests since, in order
	proved  backend.Instant   // the instant to report
}

// made notes that a majority has agreed to the session, in answer to a request sent at sent.
func (p *proof) made(sent backend.Instant) { p.base, p.proved = sent, sent }

// reconnected notes that a leader has taken the session's client in, in answer to a request sent at sent. Whether it
// still led then, only an answer over this connection will tell; so no later instant may be reported yet.
func (p *proof) reconnected(sent backend.Instant) {
	p.base, p.touches = sent, p.touches[:0] // pings that the previous server heard may have died with it
}

// answered notes that a majority has answered a request sent at sent, over the present connection. Answers to requests
// sent before that connection do not count here.
func (p *proof) answered(sent backend.Instant) {
	if sent < p.base {
		return
	}
	known, at := p.base, 0
	for i, touch := range p.touches {
		if touch <= sent.Add(-p.tick/2) {
			known, at = touch, i
		}
	}
	p.proved = max(p.proved, min(sent, known.Add(p.tick)))
	p.touches = append(p.touches[at:], sent)
}
