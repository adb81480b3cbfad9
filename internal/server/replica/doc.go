// Package replica is one member's copy of the cluster's state, kept the same as the others' with Raft: the log on its
// disk, the machine that carries it out, the network to the other members, and who they are.
//
//	peers ─ addressed ─ proof ─┐
//	                           raft ─ stores: checksums, disk, compaction
//	membership ────────────────┘ └─► FSM ─► machine
//
// # What it promises
//
// What a Term's Propose returns without an error is on the disks of most members. What it wrote in one term is carried
// out by no replica if it lands in another (see entry.go).
//
// Confirm proves that this member led at an instant after the question. It rests on the order of events alone, no
// clock: most members must acknowledge, in the present term, a message that was sent after it (confirm.go, proof.go).
// Raft's own VerifyLeader does not prove that.
//
// A member of which a part stands still, or whose log is damaged, is silent towards the others, so that they elect
// another leader. That is decided in one place, silence.go; every heartbeat, entry, snapshot and request for a vote
// asks there.
//
// A member whose disk refuses a write, or gives back what it did not write, stops (disk.go, checksum.go). Only members
// of the same cluster, each by its own name, are believed (peers.go, addressed.go), and nobody gets a vote without
// consent (members.go).
//
// # What it never does
//
// It knows no client, no session and no lease: what the commands mean is the machine's, when they are proposed is the
// leader's. It reads no clock to decide anything but its own silence and when to try again.
package replica
