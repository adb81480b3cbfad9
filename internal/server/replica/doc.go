// Package replica is one member's copy of the cluster's state, kept consistent with Raft: the log on its disk, the
// machine that carries it out, the network to the other members, and their membership.
//
//	peers ─ addressed ─ proof ─┐
//	                           raft ─ stores: checksums, disk, compaction
//	membership ────────────────┘ └─► FSM ─► machine
//
// # Promises
//
// If a Term's Propose returns without an error, its entry is on the disks of most members. No replica carries out an
// entry of one term that lands in another (see entry.go).
//
// Confirm proves that this member led at an instant after the question. It rests on the order of events alone, not on
// a clock: most members must acknowledge, in the present term, a message that was sent after it (confirm.go,
// proof.go). Raft's own VerifyLeader does not prove that.
//
// A member with a blocked part, or with a damaged log, is silent towards the others, so that they elect another
// leader. silence.go alone decides that; every heartbeat, entry, snapshot and request for a vote asks there.
//
// A member whose disk refuses a write, or returns data that was never written, stops (disk.go, checksum.go). A member
// trusts only members of the same cluster, each by its own name (peers.go, addressed.go), and nobody gets a vote
// without consent (members.go).
//
// # Boundaries
//
// It knows no client, no session and no lease: the machine gives the commands their meaning, and the leader decides
// when to propose them. It reads the clock only to decide its own silence and the time of a retry.
package replica
