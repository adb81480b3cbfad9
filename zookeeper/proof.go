// This file is the arithmetic of a session's proofs. It does no I/O and reads no clock, so that TestProof
// checks it with plain numbers.
//
// An example with a tick of 2 s: the session was made by a request that was sent at 0 s, and questions are sent at 0.8
// s and 1.6 s. The answer to the second one shows that the leader has received all that the client's server had up to
// 0.6 s, that is, the request sent at 0 s. So the session lives from 0 s on for its timeout at least. With the margin
// of a tick that Describe declares, it may report up to 2 s, and reports 1.6 s. A question ten seconds after the
// previous one can report no more than a tick beyond that one: proveUntil then asks once more.

package zookeeper

import (
	"time"

	"github.com/fencelock/fencelock/backend"
)

// proof computes the instant from which a session certainly lives for its timeout.
//
// The leader alone ends sessions. It restarts a session's timeout when it makes the session, when a client reconnects,
// and when a server reports, in its answers to the leader's pings twice a tick, that it heard from the client. An
// answer alone proves little: a server that was cut off from the leader still answers reads until it notices, and a
// leader that froze while another one was elected still answers sync, and lets clients reconnect.
//
// The driver therefore asks with a read-only transaction that checks a version. A majority must log it, and the leader
// refuses it for sessions that have ended. When a transaction sent at t is answered, its leader has led until t at
// least, and has received, on the same stream, all reports of the client's server up to half a tick before t. A
// request that was sent at u ≤ t − tick/2 has restarted the session's timeout, and the session lives until u +
// timeout; a later leader restarts the timeouts of all sessions. The driver declares a margin of one tick, so that it
// may report u + tick, and never more than t. While it asks more than twice a tick, it reports t.
type proof struct {
	tick    time.Duration
	base    backend.Instant   // a request that the leader has received
	touches []backend.Instant // answered requests since, in order
	proved  backend.Instant   // the instant to report
}

// made notes that a majority has agreed to the session, in answer to a request sent at sent.
func (p *proof) made(sent backend.Instant) { p.base, p.proved = sent, sent }

// reconnected notes that a leader has taken the session's client in, in answer to a request sent at sent. Only an
// answer over this connection will show whether it still led then; so no later instant may be reported yet.
func (p *proof) reconnected(sent backend.Instant) {
	p.base, p.touches = sent, p.touches[:0] // pings to the previous server may be lost with it
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
