// Package server is the bundled lock server: one member of a cluster that replicates the lock state machine (package
// machine) with Raft (package replica), times its sessions while it leads (package lead), and serves it over the
// protocol of package lockpb. This package serves clients, and puts the three together.
//
//	client ─ stream ─► conn ─► call ─► lead ─► replica: raft ─► machine
//	                    ▲               │                         │
//	                    └ reply, pushes ┴─────────────────────────┘
//
// # Promises
//
// Acknowledged changes are on the disks of most members, and survive the loss of the others and the crash of all.
// Without DataDir the server keeps its state in memory alone, and reports that (Welcome.durable).
//
// Tokens increase over all names of the cluster for as long as its data exists.
//
// A session lives for at least its TTL after the receipt of the last request that renewed it, whichever member led
// meanwhile. If a reply is marked renewed, its sender led after it received the request. Reads are linearizable.
//
// # How
//
// Only the leader serves: it alone times sessions, and a session's time counts from the receipt there. Other members
// return the leader's address; they do not forward, since a forwarded request has two instants of receipt. See
// package lead.
//
// Renewals and reads cost no log entry. They wait for a proof of leadership: see replica.Term.Confirm. A leader that
// was paused and replaced cannot produce it.
//
// A leader that is blocked falls silent, so that the other members elect another leader, and disconnects its clients.
//
// A member whose disk refuses a write stops: it acknowledges no change that it may not have. Restarted with a working
// disk, it goes on with its data. After a failed fsync the disk may lose data that it still returns until the machine
// restarts: replace it, and give the member an empty directory.
//
// The server stops reading a connection with too many requests in flight, and ends a connection whose client does not
// read (conn.go, outbox.go).
//
// # Limits
//
// It does not survive the loss of most members' disks, nor members that lie. A member with an older copy of its data
// directory lies: it has forgotten votes and entries that it acknowledged, and nobody can detect that. Give it an
// empty directory; it joins as a new member. A session may outlive its TTL, by a little more than the election of a
// new leader takes; see docs/decisions/2026-11-22-what-is-left-of-a-lease.md.
package server
