// Package lead is one term in which a member leads the cluster: all that a leader knows and a follower does not.
//
//	command ─► lanes ─► proposer ─► replica.Term ─► outcome, in the order of the log
//	                                                   │
//	Timekeeper ◄── grants, ends, minimums ── Deliver ◄─┘─► Listener
//
// # Promises
//
// A session lives for at least its TTL after the receipt of the last request that renewed it, whichever member led
// meanwhile. Only the leader times sessions, and their time counts from the receipt there (session.go). The log has
// the old leader's promises for the new one (checkpoint.go).
//
// Commands are gathered into log entries while earlier ones are on their way (propose.go): the busier, the larger the
// entries, and one fsync carries hundreds of commands. Senders take turns, and no sender fills the queue (lanes.go).
// Outcomes come in the order of the log.
//
// A leadership serves once everything of earlier terms is applied, and not while its member is silent towards the
// others. The next leadership does not rely on its state.
//
// # Boundaries
//
// It knows no connection and no message: a Listener receives the news of a session. It does not decide whether this
// member leads, or led: package replica does, with the proof. It uses a feature level only when that is reached
// (level.go).
package lead
