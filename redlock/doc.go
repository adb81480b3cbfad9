// Package redlock is the driver for the Redlock algorithm: a lock belongs to the request that has the votes of a
// majority of three, five or more independent Redis or Valkey servers. It serves the efficiency tier: it prevents
// duplicate work while clocks and delays stay within bounds, but does not fence.
//
//	Acquire ─► a majority at once: SET NX PX ─► granted ─► 3 ms later: the other servers, too
//	            (the others if one refuses, fails, or does not answer for 3 ms)
//	waiter  ─► queue of the first server ─► its vote ─► the others' votes
//
// # Guarantees
//
// While fewer than half of the servers are down, hang, or cannot be reached, locks are granted, renewed and released
// without a delay: every call returns when a majority has answered. A call waits for an unresponsive server, for
// Options.NodeTimeout at most, only if the outcome depends on it. A held lock stays held.
//
// At one moment at most one request has the votes of a majority, and a lease is valid for less time than the servers
// keep the votes (TTL − elapsed − 1 % of the TTL − 52 ms), under these conditions:
//
//   - No server's wall clock jumps: Redis counts a time to live by it. Nor do the servers' clocks and this machine's
//     run at rates that differ by more than 1 %.
//   - No server that granted a lock forgets it before its end: by FLUSHALL, an administrator, eviction, a restart
//     without its memory, or a start with earlier data or a copy of another server's data.
//   - The holder's process notices the end of its lease: a frozen process continues afterwards without noticing.
//
// A minority of the servers may break the first two, but not always: a lock with three votes of five cannot lose any.
// No lock can enforce the last condition without fencing, which Redlock lacks: the servers share no order of events
// from which a token could come.
//
// # What breaks it, measured
//
// Rounds in which two clients held one lock at the same time, on five servers. In each round the given number of
// servers, chosen at random, got the fault while the lock was held with all votes, or with three because the holder
// could not reach two servers:
//
//	go test -run TestViolationRate -v ./redlock -violations 200
//
//	clock jumps past the TTL on 1 server,  holder had 5 votes    0 of 200
//	clock jumps past the TTL on 2 servers, holder had 5 votes    0 of 200
//	clock jumps past the TTL on 3 servers, holder had 5 votes  200 of 200
//	clock jumps past the TTL on 1 server,  holder had 3 votes  119 of 200  (60 %)
//	clock jumps past the TTL on 2 servers, holder had 3 votes  175 of 200  (88 %)
//	1 server restarts empty,  holder had 3 votes, quarantine     0 of 66
//	2 servers restart empty,  holder had 3 votes, quarantine     0 of 66
//	1 server restarts empty,  holder had 3 votes, without       42 of 66   (64 %)
//	2 servers restart empty,  holder had 3 votes, without       61 of 66   (92 %)
//
// By default a hold has three votes of five for its first milliseconds: a majority is asked, the others follow 3 ms
// later, and never if the hold has been released by then. So the rows with three votes describe sections shorter than
// that, and faults in the first milliseconds of a longer one; with Options.WaitForAll each hold begins with the votes
// of all servers that answer, for 10 requests on five servers instead of 6. A later vote is sent before the release
// or not at all, and on the same connection, so that it cannot arrive after the release.
//
// # Quarantine
//
// A restarted server may have forgotten its votes. The driver checks run_id and uptime on every new connection, and
// refuses the connection (QuarantineError) until the server has been up for Options.MaxTTL, when all votes that it may
// have forgotten have ended. This is the algorithm's delayed restart, enforced by the client. Servers with appendonly
// yes and appendfsync always vote immediately: to start one with earlier data or without data, wait until it has been
// stopped for MaxTTL. Since a first start looks like a restart, new servers do not vote for
// MaxTTL either, unless Options.TrustFresh declares that they never granted a lock.
//
// # When to use something else
//
// If two holders would corrupt data, use a driver that fences: etcd, ZooKeeper, PostgreSQL, or the bundled server. They
// need no more machines. If an occasional lost lock only wastes work, a single Redis (package redis) is enough, with a
// fifth of the requests. Use Redlock if you have independent servers, the lock should survive the loss of any minority
// of them, and an occasional double run is acceptable.
//
// # Waiting
//
// A waiting request stays in the queue of the first healthy server of the list. That server notifies it of its turn;
// only then does the request ask the other servers. Its turn is an offer, which ends after one second unless it is
// accepted: so a dead waiter delays the waiters behind it by that time, and until the next poll, not by a TTL. Votes
// rarely split. When they do, because clients disagree about the healthy servers, requests without a majority release
// their votes after four polls within a second, and come back after a random pause. Waiters are usually served in the
// order of arrival, but the order is lost with the first server, so the driver does not declare backend.CapFair. All
// clients should list the servers in the same order. While no server can notify a client, its requests poll, in no
// order.
//
// # Connections
//
// For one second after a server failed, or kept a call waiting for 3 ms, the driver asks it last. A release goes to the
// servers that were asked for votes, and returns when the lock is free for others; servers that have not answered by
// then are released in the background.
//
// There is one connection to each server for calls, and one for pushes while a request waits. Requests that are
// submitted while an exchange with a server is in progress leave together behind it, as one pipeline. An exchange ends
// after 3 s. After a refused connection, the driver pauses for 10 ms before it dials that server again, then longer, up
// to 640 ms.
//
// The driver is a binding of backend/engine. An exchange with all servers runs on the goroutine of its caller, and a
// server's later answer is dropped, since connections keep the order: a release always runs behind the votes that were
// requested before. The binding's own goroutines are those of each connection, from the first wait until Close one for
// each subscription, and every half minute one for each server, which looks at its settings. Each grant has a timer of
// 3 ms for the servers that follow, which its release stops. A release that has not reached every server occupies a
// goroutine of the engine until it has, or the TTL is over; there are 1,000 of these at most.
//
// # Renewal
//
// A renewal makes one script call to each server for up to 128 locks. A lock is lost when a majority reports that it
// does not have it; without a majority for either answer the outcome is unknown, and the hold continues until its
// validity ends. If a server lacks a lock that a majority has just confirmed, the driver writes it there again. This
// creates no hold, because the majority already has it.
//
// # Permits and shared holds
//
// Not supported. With two permits and five servers, three clients can each have the votes of a majority, if every
// server grants two: each permit would need separate votes, and without an order of events the servers cannot agree
// which of them granted which.
//
// # Settings checked
//
// Ping, Open and the first call refuse, with errors that wrap backend.ErrInvalidOption or backend.ErrMisconfigured: an
// even number of servers, or fewer than three; the same server twice, by run_id; nodes and clients of a cluster,
// clients of Sentinel; replicas; a maxmemory limit with any policy but noeviction (see Options.AllowVolatileEviction);
// versions before 6.0. A minority may be unreachable: the driver checks its servers when they return, before they vote,
// and excludes unfit ones. It checks all servers again every half minute, in the background: a server that has become
// unfit gets no further requests for votes, but its existing votes can be renewed and released. A user restricted by
// ACL needs the rights of package redis; without +config|get a server counts as volatile, and without +info see
// Options.AssumeVersion.
package redlock
