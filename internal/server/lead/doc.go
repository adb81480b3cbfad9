// Package lead implements one term in which a member leads the cluster: the state that only a leader has.
//
//	command ─► lanes ─► proposer ─► replica.Term ─► outcome, in the order of the log
//	                                                   │
//	Timekeeper ◄── grants, ends, minimums ── Deliver ◄─┘─► Listener
//
// # Promises
//
// A session lives for at least its TTL after the receipt of the last request that renewed it, even if the leader
// changes. Only the leader times sessions, from the receipt of requests at the leader (session.go). The log has the old
// leader's promises for the new leader (checkpoint.go).
//
// While earlier log entries are in progress, the leader gathers commands into the next entry (propose.go). Under load
// the entries grow, and one fsync covers hundreds of commands. Senders take turns, and no sender can fill the queue
// (lanes.go). Outcomes come in the order of the log.
//
// A leadership serves clients once all entries of earlier terms are applied, except while its member has stopped
// sending to the other members. The next leadership does not rely on its state.
//
// # Boundaries
//
// The package knows neither connections nor messages: a Listener receives the notices of a session. Package replica
// decides and proves whether this member leads, or led. The package uses a feature level only once the cluster has
// reached it (level.go).
package lead
