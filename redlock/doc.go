// Package redlock is the driver for the Redlock algorithm: a lock belongs to the request that has the votes of a
// majority of three, five or more independent Redis or Valkey servers. It is of the efficiency tier: it keeps two
// workers from doing the same work as long as clocks and delays behave, and does not fence.
//
//	Acquire ─► a majority at once: SET NX PX ─► granted ─► 3 ms later: the other servers, too
//	            (the others if one refuses, fails, or is silent for 3 ms)
//	waiter  ─► queue of the first server ─► its vote ─► the others' votes
//
// # What it guarantees
//
// While fewer than half of the servers are down, hang, or cannot be reached, locks are granted, renewed and given back,
// and the others' silence costs no time: every call returns when a majority has answered. A silent server is waited
// for, for Options.NodeTimeout at most, only where the outcome depends on it. A lock that is held stays held.
//
// At one moment at most one request has the votes of a majority, and a holder believes in them for less time than the
// servers keep them (TTL − elapsed − 1 % of the TTL − 52 ms), if all of this holds:
//
//   - No server's wall clock jumps: Redis counts a time to live by it. Nor do the servers' clocks and this machine's
//     run at rates that differ by more than 1 %.
//   - No server that granted a lock forgets it before its end: by FLUSHALL, an administrator, eviction, or a restart
//     without what it had in memory.
//   - The holder's process notices the end of its time: one that is frozen goes on afterwards as if nothing had
//     happened.
//
// The first two can be broken on a minority of the servers, but not always: a lock that was taken with three votes of
// five has none to lose. No lock can enforce the last one without fencing, and there is none here: the servers share no
// order of events from which a token could come.
//
// # What breaks it, measured
//
// Rounds in which two clients held one lock at once, on five servers of which as many as told were struck, at random,
// while the lock was held with all votes, or with three because two servers were out of the holder's reach:
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
// later, and never if the hold has been given back by then. So the rows with three votes describe sections shorter than
// that, and faults in the first milliseconds of a longer one; Options.WaitForAll has each hold begin with the votes of
// all servers that answer, for 10 requests on five servers instead of 6. A vote that follows is sent before the release
// or not at all, and on the same connection, so that none arrives after it.
//
// # Quarantine
//
// A server that restarted may have forgotten whom it gave its vote to. The driver looks at run_id and uptime on every
// new connection, and refuses the connection (QuarantineError) until the server has been up for Options.MaxTTL, when
// all that it may have forgotten has ended. That is the delayed restart of the algorithm, enforced by the client.
// Servers with appendonly yes and appendfsync always vote at once. Since nobody can tell a first start from a restart,
// servers that have just been set up grant nothing for MaxTTL either, unless Options.TrustFresh says that they never
// granted anything.
//
// # When to use something else
//
// Where two holders at once would corrupt data, use a driver that fences: etcd, ZooKeeper, PostgreSQL, or the bundled
// server. They need no more machines. Where a lost lock now and then only wastes work, one Redis (package redis) does
// with a fifth of the requests. Redlock is for the case between: there are independent servers, the lock shall survive
// the loss of any minority of them, and a rare double run is bearable.
//
// # Waiting
//
// A request that has to wait stands in the queue of one server, the first of the list that is well. A push tells it
// when its turn has come there; only then does it ask the others. Its turn is an offer, which ends after one second
// unless it is accepted: so a waiter that died costs those behind it that long, and until the next look, not a TTL.
// Votes hardly ever split. When they do, because clients disagree about which server is well, those without a majority
// give up their votes after three looks, and come back after a random pause. The order is that of arrival as a rule,
// and is lost with the first server: backend.CapFair is not declared. All clients should list the servers in the same
// order.
//
// # Connections
//
// A server that kept a call waiting for 3 ms, or failed, is asked last for a second. A release asks the servers that
// were asked for their votes, and returns when the lock is free for others; a server that has not answered by then is
// dealt with in the background.
//
// There is one connection to each server for calls, which carries any number of requests at a time, and one for pushes
// as soon as somebody waits. Behind a request that is unanswered for 250 ms nothing more is sent. The client library
// sets connections up and is not on the path of a call. A server that refuses a connection is left alone for 10 ms,
// then longer, up to 640 ms.
//
// # Renewal
//
// One script call a server for 128 locks. A lock is lost when a majority says that it does not have it; without a
// majority for either answer the outcome is unknown, and no loss. A server that lacks a lock which a majority has just
// confirmed is given it again. That is not a hold made by renewing: it exists already, by its majority.
//
// # Permits and shared holds
//
// There are none. With two permits and five servers, three clients can each have the votes of a majority, if every
// server gives two: each permit would need votes of its own, and without an order of events the servers cannot agree
// which of them gave which.
//
// # Settings checked
//
// Ping, Open and the first call refuse, with errors that wrap backend.ErrInvalidOption or backend.ErrMisconfigured: an
// even number of servers, or fewer than three; the same server twice, by run_id; nodes and clients of a cluster,
// clients of Sentinel; replicas; a maxmemory limit with any policy but noeviction (see Options.AllowVolatileEviction);
// versions before 6.0. A minority that cannot be reached is no obstacle. Its servers are looked at when they come back,
// before they vote, and kept out if they are unfit. All are looked at again every half minute, beside the calls: one
// that has become unfit is asked for no more votes, while those that it has given can be kept and given back. A user
// restricted by ACL needs what package redis needs; without +config|get a server counts as one that forgets, and
// without +info see Options.AssumeVersion.
package redlock
