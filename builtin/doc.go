// Package builtin is the driver for the bundled lock server: the correctness tier without another lock service.
//
//	fencelock serve                                  one durable server on this machine
//
//	locks, err := fencelock.ForCorrectness(builtin.New([]string{"127.0.0.1:7480"}, nil), nil)
//	locks, err := fencelock.Open(ctx, "fencelock://a:7480,b:7480,c:7480", fencelock.Correctness, nil)
//
// Three servers survive the loss of any one. Package embedded runs one inside a program instead, without a socket.
//
// # Algorithm
//
// The servers replicate one state machine by Raft; its leader serves. A client keeps one connection to the leader for
// all its traffic: concurrent requests of callers are sent together, answers come in any order, and the server pushes
// grants to waiters, losses to holders and events to watchers. See package lockpb for the protocol.
//
// The driver is a binding of package engine, which repeats, waits, releases what abandoned requests have left, and
// renews. Requests are idempotent by their id. The binding has goroutines for the connection: one finds the leader, one
// writes, one reads, and at the beginning one attaches each session.
//
// Notifications are lost only with their connection. On the next connection, the driver compares its records with the
// server's list, in pages of 5,000: missing holds are lost, and missing waiters repeat their requests. If a bug of the
// server loses a notification, the reply to the next keepalive shows this, and the driver closes the connection.
//
// All locks of one client with one TTL belong to one session, which the driver renews while it is in use. That takes
// one small request per third of the TTL, however many locks and TTLs there are. Beyond eight TTLs, similar ones share
// a session. A hold is valid for the TTL from the instant before the driver sent the last request that renewed the
// session. The leader answers such a request only after most servers have confirmed that it still led when the request
// arrived, so an overtaken leader confirms no renewal. A hold that can neither be claimed nor released ends with its
// session, which the other holds leave.
//
// # Promises
//
// The token is the server's count of changes at the grant. It is part of the log entry that grants, and increases
// strictly over all names of the cluster: across releases, expiries, crashes, restarts and changes of leader. Grants
// are FIFO: no later request overtakes a waiter. The server notifies holders of a loss.
//
// TokenSpace is the cluster's id. A driver that has had a reply from a durable cluster notices if that cluster has
// lost acknowledged changes: its id has changed (it was wiped or replaced), it was restored from a backup, or its
// revision has decreased (its data directory is an old copy, or was truncated). Then every hold of the driver is lost
// with backend.ReasonHistoryLost, and every later call returns backend.ErrHistoryLost, until a new driver is created.
// A new driver accepts the cluster as it is: a restored cluster issues greater tokens than before in the same token
// space, a wiped cluster has a new one.
//
// Identity. A repetition of a request, with the same name and Request.RequestID, gets the hold of the request, with
// the same token. The server does not show the id; Look shows Request.HoldID. A renewal for less time than before
// leaves the hold as it is until the longer time is over.
//
// A request has no effect after its caller has left and the request has been cleaned up: a session speaks through one
// connection, in order, and late messages of an abandoned connection have no effect.
//
// # Kinds of holds
//
// Queues are strict for every kind: no request passes an earlier waiter with which it is incompatible. So a waiting
// writer stops later readers, and a request for few permits does not overtake one for many. Permits become free when
// their holder releases them or its session ends. Tokens of shared holds and of permits are marked
// (fencing.Token.Exclusive): guards refuse them.
//
// Names do not change their use while they are held or waited for: permits with another limit, permits beside other
// kinds, and hierarchical beside flat requests are backend.ErrLimitMismatch. For hierarchical requests this applies to
// the name and its ancestors: while "a" is held flatly, a hierarchical request for "a/b" is refused, and the other way
// round. But a flat hold of "a/b" does not touch "a": an application that wants a hierarchy has to ask hierarchically
// throughout. Looking at a name, watching it and force-releasing it concern its own holds, not those below it.
//
// AcquireAll is one log entry with one place in all queues, so sets that overlap cannot deadlock each other. A
// repetition with the same request ids is the same set; if only part of it is left, because an administrator
// force-released one name, the rest is released and the whole set is acquired again. After an attempt without Wait and
// without an answer, Release removes its holds, as for Acquire.
//
// Deadlocks. A request made under holds (backend.Request.Under) that would have to wait is refused with a
// *backend.DeadlockError if one of these holds blocks it, directly or through any number of other requests that wait
// under holds, of any client and TTL, whether they hold the name or wait ahead. Two requests under one hold that want
// the same name just queue. The server visits at most 10,000 holders and waiters per request by default; a longer
// cycle is not found. Options.Under names the holds of other processes; "fencelock run" passes its own to a fencelock
// inside of it. A holder of permits counts in the search only if no other holder could make room instead. A waiter
// that queues again because its session had ended is examined again.
//
// # Bounds
//
// A holder that dies frees its names when its session ends: one TTL and 50 ms after its last request. If the leader
// changes meanwhile, that may be an election later, which takes one to two seconds, and 1 s in which clients find the
// new leader; and if both die at about the same time, 10 ms more for each session, and up to half a TTL with many
// sessions.
//
// The driver leaves a server that has not answered for a quarter of the shortest TTL in use, between 500 ms and 3 s. A
// session outlives a change of leader if its TTL is longer than that time and the election together: hence the
// servers' minimum TTL of 3 s by default (--min-ttl). If its session ends, a waiter takes a new place at the end of
// the queue.
//
// Calls fail with backend.ErrUnavailable once all servers have refused connections for half a second, or there was no
// leader for 10 s, or no answer for 5 s. An acquire without Wait tries three times; while a server is busy, other calls
// repeat their requests for 10 s. An acquire with Wait waits until its context ends, unless a limit of the server refuses
// it.
//
// # Limits
//
// A server without a data directory (fencelock serve --dev) restarts its tokens with its process. Its holds have no
// tokens, and the correctness tier refuses it: Open immediately, New at its first acquire.
//
// Hierarchical permits are refused before anything is sent, and so are sets of requests that differ in TTL, Wait or
// Under.
//
// # Settings
//
// Give the addresses of all members, or of some: the driver asks them for the others. If clients reach members by
// other names than the members report, Options.Dial can translate them. A Driver links neither the servers nor Raft.
package builtin
