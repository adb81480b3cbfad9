// Package replica implements one member's copy of the cluster's state, which Raft keeps consistent: the log on disk,
// the state machine that applies it, the network to the other members, and the membership.
//
//	peers ─ addressed ─ proof ─┐
//	                           raft ─ stores: checksums, disk, compaction
//	membership ────────────────┘ └─► FSM ─► machine
//
// # Promises
//
// If a Term's Propose returns without an error, its entry is on the disks of most members. No replica applies an entry
// of one term that commits in another term (see entry.go).
//
// Confirm proves that this member led at an instant after the question. It relies on the order of events only, not on a
// clock: most members must acknowledge, in the current term, a message that was sent after the question (confirm.go,
// proof.go). Raft's own VerifyLeader does not prove that.
//
// A member with a blocked part, or with a damaged log, stops sending to the others, so that they elect another leader.
// Only silence.go decides that; every heartbeat, entry, snapshot and vote request checks it.
//
// A member whose disk refuses a write, or returns data that was never written, stops (disk.go, checksum.go). A member
// trusts only members of the same cluster, each by its own name (peers.go, addressed.go), and no server gets a vote
// without approval (members.go).
//
// # Boundaries
//
// The package knows neither clients nor sessions nor leases: the machine defines the commands, and the leader decides
// when to propose them. The package uses clocks for timeouts, retries and the cluster's clock (clock.go), but never as
// a proof of leadership.
package replica
