// Package zookeeper is the driver for ZooKeeper 3.5 and later: the correctness tier on an ensemble that survives the
// loss of a minority.
//
//	driver := zookeeper.New([]string{"zk1:2181", "zk2:2181", "zk3:2181"}, nil)
//	locks, err := fencelock.ForCorrectness(driver, nil)
//
// # Algorithm
//
// Every acquire makes one ephemeral sequential node below the name's node, on a session that all locks with one TTL
// share; the TTL is the session's timeout. A client that has more than a few requests under way at once uses up to
// four sessions per TTL. The node's name starts with the request id, so that a node whose creation was not answered is
// found again. The nodes in the order of their creation are the queue, and the first one holds the lock. A waiter
// watches the node before its own. It says "held" only after it has read the queue with its own node in it, first, on
// the session that made it.
//
// An uncontended acquire takes one round trip: the request for the queue is sent with the creation, and the server
// does one after the other. An attempt without waiting that is not the first removes its node again. A release is one
// deletion.
//
// Shared holds and permits stand in the same queue, and the end of a node's name says what it asks for. An exclusive
// entry holds when it is the first. A shared one holds while no exclusive one stands before it: a writer that waits
// stops the readers behind it, and readers next to each other hold together. A request for n of a limit of permits
// holds while those before it ask for no more than the limit less n, whether they hold or wait: a big request is not
// starved by small ones, and a smaller one behind it waits, too. Entries before one's own only ever leave, so that one
// read of the queue decides.
//
// A waiter watches as few entries as must change before it can be granted, the nearest ones: a writer the last one
// before it, a reader the last writer, a request for n permits as many as have more than the limit less n between them.
//
// The first entry says what a name is in use for: exclusive and shared holds, or permits of one limit. A request that
// does not go with it removes its node and is refused with ErrLimitMismatch. An attempt waits, for a second at most,
// until others that stand before it and are refused have removed theirs.
//
// A session is proved by a transaction that checks a version and changes nothing: what a leader answers alone, such as
// sync and pings, it also answers when it has been overtaken and does not know. The servers log each of these
// transactions as they log a write. Every session makes one per tenth of its TTL, or per 0.4 ticks if that is longer,
// but four per TTL at least: with a TTL of 30 s, 20 per minute and client process, however many locks it holds.
//
// Every session has a connection of its own, which never goes on with another session: requests that were queued when a
// session ended are not sent.
//
// # Promises
//
// The token of an exclusive hold is the zxid that created its node. It increases strictly with every grant of a name,
// also across expiry, crash, leader change, restart, and deletion of all nodes. It does not depend on the sequence
// number in the node's name, which starts again when a name's node was removed and wraps at 2³¹. Shared holds and
// permits have the zxid of their nodes, too, marked as not exclusive: by Token.Order a reader comes between the
// writers before and after it.
//
// The token space is a random id in the node of Options.KeyPrefix. It is made once, by the first client, and no client
// ever writes it a second time.
//
// Grants are FIFO over all kinds, and nobody barges. The permits of a holder that died come back when its session has
// expired, after one TTL. The server grants timeouts between 2 and 20 ticks; a TTL that it would cut short is
// refused with ErrInvalidTTL, which names the bound. A hold ends for its holder one tick before the session may: see
// Options.Tick. An expired session loses its holds and nothing else; the next acquire makes another session.
//
// A deleted node is told to its holder at once, through a watch that costs no goroutine. It is set when the lock has
// been held for 200 ms. Names are container nodes. The driver removes those that it has used and that have been empty
// for 2 s; the servers remove what is left by clients that died.
//
// # Cost
//
// A cycle of acquire and release is three requests, of which the servers log two: the creation and the deletion. On a
// single ZooKeeper 3.8.0 and two processors (bench/RESULTS.md), 64 callers with a name each did 5,661 cycles per
// second through one client. The library's own zk.Lock, which makes the same requests and ignores contexts, did 5,952.
// A hand-over among 16 clients took 0.59 ms at the median, against 0.48 ms there: a waiter reads the queue again
// before it holds.
//
// A held lock costs the client 1.6 KB and no goroutine, and its renewals nothing beside its session's. A waiter costs
// about 23 KB and the goroutine of its caller; when nothing happens it looks for itself ever more seldom, up to twice
// a minute.
//
// # Faults
//
//   - A connection is lost: the library finds another server; waiters keep their places, and holds go on while the
//     session lives. A renewal without an answer is no loss.
//   - The client is cut off: its holds end by its own clock, one tick before the session may. In the bench (TTL 3 s)
//     the holder knew 630 ms before its rival held, at worst.
//   - The client dies: its nodes stay until the session's timeout, and then the next in the queue holds. With a TTL of
//     3 s that took 2.98 to 3.36 s.
//   - The leader dies, or is cut off or frozen: another one is elected, which gives every session its whole timeout
//     again. Grants go on within seconds; docs/RELIABILITY.md has the figures for each fault. The old leader proves
//     nothing to anybody, since it has no majority.
//   - The client is frozen for longer than its TTL: what it asked before is not sent on another session when it goes
//     on, so that a waiter which wakes up late is granted nothing.
//   - A majority is gone: calls answer ErrUnavailable or ErrUnknown, and holds end at their deadlines.
//
// # History
//
// An ensemble that was wiped, restored from a backup, or replaced by another one behind the same addresses would issue
// tokens that were issued before. A client that lived through it notices. It tells every server the highest zxid that
// it has seen, also when it opens a new session; a server that has seen less closes the connection. The driver then
// lets the leader commit a transaction, whose zxid is above everything that the ensemble ever answered, unless it has
// forgotten. Another token space, or none, is the other sign: every session watches the node in which it is kept. So
// the deletion of all nodes counts as the loss of history, too.
//
// From then on all holds of the driver are lost with ReasonHistoryLost (ReasonSessionExpired if the session was found
// missing first), and every call answers ErrHistoryLost, until the driver is made anew. To go on, an operator makes
// sure that nobody still believes in an earlier hold, lets the guards accept the new token space, and restarts the
// clients.
//
// A client that is new cannot know what others saw. If the ensemble was wiped, it finds no token space and makes one.
// If it was restored with its old space, the first client that lived through it and notices gives it a new one. If no
// client did, the operator deletes the node of Options.KeyPrefix before the first client starts.
//
// # What it does not promise
//
// Servers that answer before their disk has a change (forceSync=no) can forget acknowledged holds when all of them lose
// power. They do not tell clients of this setting: Describe says quorum, or durable-server if there is one server, all
// the same.
//
// A hold that is acquired again with its request id from another client, or prolonged with a longer TTL, moves to
// another session: its node is replaced in one transaction, with its place and its token. The former grant then ends. A
// hold that is prolonged with a shorter TTL stays on the session with the longer one: if its client dies, the name
// stays closed for the longer TTL.
//
// The servers cannot take several names, each with its queue, in one step: there is no AcquireAll here. A name's queue
// must fit one answer of a server, 1 MB (jute.maxbuffer): some ten thousand holders and waiters.
//
// # Settings
//
// Set Options.Tick to the servers' tickTime; a shorter one is refused, as far as the servers let it be seen. Raise
// maxClientCnxns (60 by default for one client address) if a process uses many different TTLs. A user needs the right
// to read, create and delete below the prefix, and to create it where it is missing.
//
// Observers serve as the other servers do. Those that follow a server by its observerMasterPort, and not the leader,
// hand on what they heard from clients up to a tick later: where clients may use them, set Options.Tick to two of the
// servers' ticks.
//
// Users authenticate with the digest scheme; the client library has no SASL and so no Kerberos. Tested with ZooKeeper
// 3.8, an observer included; versions 3.5 to 3.7 and 3.9 speak the same protocol and are not tested, nor is
// observerMasterPort.
package zookeeper
