// Package zookeeper is the driver for ZooKeeper 3.5 and later: the correctness tier on an ensemble that survives the
// loss of a minority.
//
//	driver := zookeeper.New([]string{"zk1:2181", "zk2:2181", "zk3:2181"}, nil)
//	locks, err := fencelock.ForCorrectness(driver, nil)
//
// # Algorithm
//
// Every acquire makes one ephemeral sequential node below the name's node, on a session that all locks with one TTL
// share; the TTL is the session's timeout. While a client uses more than eight TTLs, further ones share sessions that
// are up to a quarter longer. The node's name starts with the request id, so that the driver finds a node again after a
// lost answer. The nodes in the order of their creation are the queue, and the first one holds the lock. A waiter
// watches the node before its own. It is granted only after it has read the queue with its own node first in it, on the
// session that made it.
//
// An uncontended acquire takes one round trip: the request for the queue is sent with the creation, and the server
// carries them out in order. An attempt without Wait removes its node if it is not the first. A release is one
// deletion.
//
// Shared holds and permits use the same queue, and the end of a node's name is its kind. An exclusive entry holds
// when it is the first. A shared entry holds while no exclusive entry is before it: a waiting writer stops the
// readers behind it, and readers next to each other hold together. A request for n of a limit of permits holds while
// the entries before it ask for no more than the limit less n, whether they hold or wait: small requests do not
// starve a big one, and a smaller request behind it waits, too. Earlier entries can only leave, so that one read of
// the queue decides.
//
// A waiter watches only the entries that must change before it can be granted, the nearest ones: a writer the last
// entry before it, a reader the last writer, a request for n permits as many entries as have more than the limit less
// n between them.
//
// The first entry determines the use of a name: exclusive and shared holds, or permits of one limit. An incompatible
// request removes its node and fails with ErrLimitMismatch. An attempt waits, for at most a second, until refused
// requests before it have removed their nodes.
//
// A session is proved by a transaction that checks a version without a change: requests that a leader answers alone,
// such as sync and pings, are answered even by a leader that has been overtaken and does not know it. The servers log
// each of these transactions as they log a write. A session makes about three per TTL, and one or two more for each
// renewal of its holds, however many these are. The connection pings every 0.6 ticks.
//
// Every session has a separate connection, which never continues with another session: requests that were queued when a
// session ended are not sent. Requests that were sent over a former connection of a session are done before those of
// the present one, or never. Calls that need no particular session, while there is none, use one of two ticks, which
// ends when it was unused for 10 s.
//
// # Promises
//
// The token of an exclusive hold is the zxid that created its node. It increases strictly with every grant of a name,
// even across expiry, crash, leader change, restart, and deletion of all nodes. It does not depend on the sequence
// number in the node's name, which starts again when a name's node was removed. Shared holds and permits have the zxid
// of their nodes, too, marked as not exclusive: by Token.Order a reader comes between the writers before and after it.
//
// The servers number the requests for a name until its node is removed, and their count ends at 2³¹ - 1, which all
// later entries have. No entry with a number of 2³⁰ or more holds: it leaves when no earlier entry blocks it, and the
// requests begin a new node, and a new count, once the last entry has gone. Until then an attempt is refused and
// waiters wait; the new queue is not in the order of the former one. A name that is always in use reaches that number
// after 2³⁰ requests: at 1,000 per second after 12 days.
//
// The token space is a random id in the node of Options.KeyPrefix. It is made once, by the first client, and no client
// writes it a second time.
//
// Grants are FIFO over all kinds, without barging. The permits of a dead holder are free when its session has
// expired, after one TTL. The server grants timeouts between 2 and 20 ticks; a TTL outside that range is
// ErrInvalidTTL, which names the bound. A hold ends for its holder one tick before the session may: see Options.Tick.
// An expired session loses only its own holds; the next acquire makes another session.
//
// Each server applies its own limits to every session that connects to it. Before a session continues on a server, the
// driver asks that server for both limits, by two short sessions. A server that grants less than the TTL, or that has
// a longer tick than Options.Tick, never sees the session: the holds continue on the other servers, or end at their
// deadlines.
//
// The holder of a deleted node is notified immediately, through a watch that costs no goroutine. It is set when the
// lock has been held for 200 ms. Names are container nodes. The driver removes nodes that it has used and that have
// been empty for 2 s; the servers remove the leftovers of dead clients.
//
// # Cost
//
// A cycle of acquire and release is three requests, of which the servers log two: the creation and the deletion.
// bench/RESULTS.md has the figures beside the library's own zk.Lock, which makes the same requests and ignores
// contexts.
//
// A held lock costs no goroutine, and no renewals beside its session's. A waiter costs the goroutine of its caller and
// one or two that watch. Without notifications it looks after about a second, and then once a minute, at its own entry
// and those before it.
//
// # Faults
//
//   - A connection is lost: the session continues on another server; waiters keep their places, and holds stay while the
//     session lives. A renewal without a reply is not a loss.
//   - A server does not answer for 5 s, or half of the TTL if that is shorter: the client leaves it for another one.
//   - The client is cut off: its holds end by its own clock, one tick before the session may. In the bench (TTL 3 s)
//     the hold ended at least 630 ms before the next grant.
//   - The client dies: its nodes stay until the session's timeout, and then the next in the queue holds. With a TTL of
//     3 s that took 2.98 to 3.36 s.
//   - The leader dies, or is cut off or frozen: another one is elected, which gives every session its whole timeout
//     again. Grants continue within seconds; docs/RELIABILITY.md has the figures for each fault. The old leader cannot
//     confirm a session, since it has no majority.
//   - The client is frozen for longer than its TTL: its earlier requests are not sent on another session when it resumes,
//     so a waiter that resumes late is not granted.
//   - A majority is gone: calls answer ErrUnavailable or ErrUnknown, and holds end at their deadlines.
//
// # History
//
// An ensemble that was wiped, restored from a backup, or replaced by another one behind the same addresses would
// reissue earlier tokens. A client that was running detects that. It sends every server the highest zxid that it has
// seen, even when it opens a new session; a server that has seen less closes the connection. The driver then lets the
// leader commit a transaction: its zxid is above every earlier one, unless the ensemble has lost its history. A
// changed or missing token space is the other sign: every session watches its node. So the deletion of all nodes
// counts as the loss of history, too.
//
// From then on all holds of the driver are lost with ReasonHistoryLost (ReasonSessionExpired if the session was found
// missing first), and every call returns ErrHistoryLost, until a new driver is created. To continue, an operator makes
// sure that no earlier holder is still running, lets the guards accept the new token space, and restarts the clients.
//
// A new client cannot know the earlier history. If the ensemble was wiped, it finds no token space and makes one. If
// the ensemble was restored with its old space, the first client that detects it makes a new one. If no client was
// running, the operator deletes the node of Options.KeyPrefix before the first client starts.
//
// No client can detect the following two faults; the operator has to prevent them. First, the data of one server is
// reverted (its disk is restored from a copy). If a second server is down, the reverted server may be in the majority
// that serves, and acknowledged holds and tokens are lost; later, servers may show different holders without any error.
// So never start a server on earlier data: wipe its dataDir and dataLogDir, except myid, and start it while a majority
// of the others serves, so that it copies the leader's data. Second, the data of a server is copied to another machine,
// and both run with the same myid. Each copy can form a majority with other servers, and two leaders grant the same
// name with the same tokens, in one token space. So never start a copy of a member: a new machine starts with empty
// data.
//
// A client that finds no node of Options.KeyPrefix creates it, with a new token space, and logs a warning with its
// path. A typing mistake in the chroot or the prefix of one program creates such a space.
//
// # Limits
//
// Servers that answer before a change is on disk (forceSync=no) can forget acknowledged holds when all of them lose
// power. Clients cannot read this setting: Describe returns quorum, or durable-server for a single server, regardless
// of it.
//
// A hold that is acquired again with its request id from another client, or prolonged with another TTL, moves to
// another session: its node is replaced in one transaction, with its place and its token. The former grant of another
// client then ends. A shorter TTL never shortens a hold: it moves when the shorter session lasts as long as was
// promised before.
//
// The servers cannot acquire several names, each with its queue, in one step, so AcquireAll is not supported. A name's
// queue is one answer of a server, some 80 bytes for each holder and waiter; servers do not bound answers.
//
// The driver works with a jute.maxbuffer of 8 KB or more where the metadata of holds are small: servers close the
// connection for a longer request.
//
// # Settings
//
// Set Options.Tick to the longest tickTime of all servers; a shorter one is refused if a server's settings show its
// tick when a session connects. Set the same limits in the files of all servers. To lower maxSessionTimeout or
// tickTime, first replace the clients with TTLs above the new limit: their holds end at the deadlines once no server
// grants them. Raise maxClientCnxns (60 by default for one client address) if a process uses many different TTLs. A
// user needs the right to read, create and delete below the prefix, and to create it where it is missing.
//
// Observers serve like the other servers. Observers that follow a server by its observerMasterPort, and not the
// leader, forward clients' keepalives up to a tick later: if clients may use them, set Options.Tick to two of the
// servers' ticks.
//
// Users authenticate with the digest scheme; the driver has no SASL and so no Kerberos. The tests run on ZooKeeper 3.8,
// an observer included. The conformance suite has also passed on 3.9.3. Versions 3.5 to 3.7 speak the same protocol and
// are not tested, nor is observerMasterPort.
package zookeeper
