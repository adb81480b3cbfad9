// Package zookeeper is the driver for ZooKeeper 3.5 and later: the correctness tier on an ensemble that survives the loss
// of a minority.
//
//	driver := zookeeper.New([]string{"zk1:2181", "zk2:2181", "zk3:2181"}, nil)
//	locks, err := fencelock.ForCorrectness(driver, nil)
//
// # Algorithm
//
// Every acquire makes one ephemeral sequential node below the name's node, on a session that all locks with one TTL share;
// the TTL is the session's timeout. The node's name starts with the request id, so that a node whose creation was not
// answered is found again. The nodes in the order of their creation are the queue, and the first one holds the lock. A
// waiter watches the node before its own. It says "held" only after it has read the queue with its own node in it, first,
// on the session that made it. An uncontended acquire takes two round trips: the creation, then the queue. An attempt
// without waiting that is not the first removes its node again. A release is one deletion.
//
// Shared holds and permits stand in the same queue, and the end of a node's name says what it asks for. An exclusive entry
// holds when it is the first. A shared one holds while no exclusive one stands before it: a writer that waits stops the
// readers behind it, and readers next to each other hold together. A request for n of a limit of permits holds while those
// before it ask for no more than the limit less n, whether they hold or wait: a big request is not starved by small ones,
// and a smaller one behind it waits, too. Entries before one's own only ever leave, so that one read of the queue decides.
//
// A waiter watches as few entries as must change before it can be granted, the nearest ones: a writer the last one before
// it, a reader the last writer, a request for n permits as many as have more than the limit less n between them.
//
// The first entry says what a name is in use for: exclusive and shared holds, or permits of one limit. A request that does
// not go with it removes its node and is refused with ErrLimitMismatch. An attempt waits, for a second at most, until
// others that stand before it and are refused have removed theirs.
//
// A session is proved by a transaction that checks a version and changes nothing, a few times per TTL: what a leader answers
// alone, such as sync and pings, it also answers when it has been overtaken and does not know.
//
// Every session has a connection of its own, which never goes on with another session: requests that were queued when a
// session ended are not sent.
//
// # Promises
//
// The token of an exclusive hold is the zxid that created its node. It increases strictly with every grant of a name, also
// across expiry, crash, leader change, restart, and deletion of all nodes, and does not depend on the sequence number, which
// starts again when a name's node was removed and wraps at 2³¹. Shared holds and permits have the zxid of their nodes, too,
// marked as not exclusive: by Token.Order a reader comes between the writers before and after it. TokenSpace is a random id
// that is kept in the root node; it changes when the ensemble is made anew, so that a guard which was given the space
// refuses tokens of the new one.
//
// Grants are FIFO over all kinds, and nobody barges. The permits of a holder that died come back when its session has
// expired, after one TTL. The server grants timeouts between 2 and 20 ticks; a TTL that it would cut short is
// refused with ErrInvalidTTL, which names the bound. A hold ends for its holder one tick before the session may: see
// Options.Tick. An expired session loses its holds and nothing else; the next acquire makes another session.
//
// A deleted node is told to its holder at once, through a watch that costs no goroutine. It is set when the node has stood
// for 200 ms. Names are container nodes, which the servers remove when they are empty.
//
// # What it does not promise
//
// An ensemble whose data were wiped, or restored from a backup, counts its zxids from the past. Set TokenSpace in the guard.
//
// A hold that is acquired again with its request id from another client, or prolonged with another TTL, moves to another
// session: its node is replaced in one transaction, with its place and its token. The former grant then ends.
//
// The servers cannot take several names, each with its queue, in one step: there is no AcquireAll here. A name's queue must
// fit one answer of a server, 1 MB (jute.maxbuffer): some ten thousand holders and waiters.
//
// # Settings
//
// Set Options.Tick to the servers' tickTime. Raise maxClientCnxns (60 by default for one client address) if a process uses
// many different TTLs. A user needs the right to read, create and delete below the root.
package zookeeper
