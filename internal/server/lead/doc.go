// Package lead is one term in which a member leads the cluster: all that a leader knows and a follower does not.
//
//	command ─► lanes ─► proposer ─► replica.Term ─► outcome, in the order of the log
//	                                                   │
//	Timekeeper ◄── grants, ends, minimums ── Deliver ◄─┘─► Listener
//
// # What it promises
//
// A session lives for at least its TTL after the last request that renewed it was received, whichever member led
// meanwhile. Only the leader times sessions, and their time counts from the receipt there (session.go). What a new
// leader has to know of the old one's promises is in the log (checkpoint.go).
//
// Commands are gathered into log entries while earlier ones are on their way (propose.go): the busier, the larger the
// entries, and one fsync carries hundreds of commands. Who sends them takes turns with the others, and nobody fills the
// queue (lanes.go). Outcomes come in the order of the log.
//
// A leadership serves once everything of earlier terms is applied, and not while its member is silent towards the
// others. Nothing of it is believed in the next one.
//
// # What it never does
//
// It knows no connection and no message: who hears of a session is a Listener. It does not decide whether this member
// leads, or led: that is package replica's, with the proof. It proposes nothing of a feature level that is not reached
// (level.go).
package lead
