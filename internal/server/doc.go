// Package server is the bundled lock server: one member of a cluster that replicates the lock state machine (package
// machine) with Raft (package replica), times its sessions while it leads (package lead), and serves it over the
// protocol of package lockpb. This package is the serving, and puts the three together.
//
//	client ─ stream ─► conn ─► call ─► lead ─► replica: raft ─► machine
//	                    ▲               │                         │
//	                    └ reply, pushes ┴─────────────────────────┘
//
// # What it promises
//
// What is acknowledged is on the disks of most members, and survives the loss of the others and the crash of all.
// Without DataDir nothing is kept, and the server says so (Welcome.durable).
//
// Tokens increase over all names of the cluster for as long as its data exists.
//
// A session lives for at least its TTL after the last request that renewed it was received, whichever member led
// meanwhile. A reply that says renewed was sent by a member that led after it received the request. Reads are
// linearizable.
//
// # How
//
// Only the leader serves: it alone times sessions, and a session's time counts from the receipt there. Other members
// say who leads; they do not forward, since a forwarded request has two instants of receipt. See package lead.
//
// Renewals and reads cost no log entry. They wait for a proof of leadership: see replica.Term.Confirm. A leader that
// was paused and succeeded fails it, whatever it believes.
//
// A leader that stands still falls silent, so that the others elect another, and sends its clients away.
//
// A member whose disk refuses a write stops: it acknowledges nothing that it may not have. Started again with a disk
// that works it goes on with what is there. After a failed fsync the disk may not have what it gives back until the
// machine is started anew: replace it, and give the member an empty directory.
//
// Of a connection that has too much on its way no more is read, and one whose client does not read is ended (conn.go,
// outbox.go).
//
// # What it does not do
//
// It does not survive the loss of most members' disks, nor members that lie. A member that is given an older copy of
// its data directory is one that lies: it has forgotten votes and entries that it acknowledged, and nobody can tell.
// Give it an empty directory; it joins as a new member. A session may outlive its TTL: by the time that the election of
// a new leader takes, and a little more; see docs/decisions/2026-11-22-what-is-left-of-a-lease.md.
package server
