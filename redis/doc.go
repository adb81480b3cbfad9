// Package redis is the driver for one Redis or Valkey server, a master behind Sentinels, or a Redis Cluster. It is of
// the efficiency tier: it keeps two workers from doing the same work, and does not fence.
//
//	Acquire ─► SET NX PX, EXISTS queue ─► granted
//	            │ held, or others wait              release: DEL; where somebody waits
//	            └► the script: RPUSH queue ◄──────── the script: LPOP queue, SET next, PUBLISH
//	waiter  ◄─ one subscription (push.go) ◄──────────┘
//
// # Algorithm
//
// A lock is one key. Its value names the request that holds it, and its time to live is the TTL. A free name is taken
// with SET NX PX, and given back by a script of a few lines that compares and deletes; each is one round trip. One Lua
// script does all else, each step atomically, many names in one call. A name that is held, or was contended for within
// the last second, goes to the script at once; the call that finds out takes a second round trip. Renewing any number
// of grants is one pipeline. The compare-and-delete commands of newer servers are not used: a release must see whether
// somebody waits in the same step.
//
// Where a hold has run out while others wait, SET NX may take the lock before the first of them has it. EXISTS shows
// that, and the request that took it gives way: in one more step it goes to the end of the queue. So nobody is passed
// by, except where the answer is lost between the two steps and while a cluster's slot moves.
//
// Requests that have to wait stand in a list, and the release hands the lock to the first of them: the key is never
// absent between two holders, nobody barges past the list, and only the next one is woken, by a message on its client's
// own channel. A contended grant costs 13 commands at the server in three round trips, those inside the script counted.
// Messages can be lost, so each client also looks after its waiters: on one server at all of its names together, every
// second, with two commands for up to 500 of them; and at each name now and then, the less often the more names there
// are. 200 waiters on 200 names cost some 20 commands a second, 10,000 some 300. With up to 64 names, and always on a
// cluster or for shares, a name is also settled when its hold should have run out, which is otherwise noticed a second
// later.
//
// A waiter may have died meanwhile. So the lock is not given but offered, for one second: the waiter's client accepts,
// in one more round trip, and has it for the whole TTL. If nobody accepts, all places of that client are removed, all
// other clients in the queue are asked whether they live, and the next in line is offered the lock; a client that has
// not answered when that offer ends loses its places too. So processes and hosts that die while they wait, however
// many, cost those behind them two seconds and a little, on one server, behind Sentinels and on a cluster, also when
// somebody listens to PSUBSCRIBE *. The client that made the offer looks after it. If that dies too, the next peek of
// any waiter does, within another second, and on a cluster the next look, within four if it waits for few names. A
// waiter whose client is silent for more than that second, and lives, goes to the end of the queue.
//
// # Shared holds and permits
//
// A name held in shares has a hash for its key, with the end of each hold by the server's clock, so that a holder that
// died gives back its own share after its own TTL. Exclusive requests cost what they cost without it. Acquiring and
// releasing a share is one round trip each; renewing is the same pipeline.
//
// Readers and writers wait in one queue, requests for permits in another, and nobody passes the first in it by: once a
// writer waits, new readers queue behind it, and an attempt without Wait is ErrHeld; once a request for many permits
// waits, free ones are kept for it. Readers next to each other in the queue are granted together. So neither starves
// the other, within what is said above of the queue's order. When a waiter gives up, those that it alone kept out are
// let in.
//
// A name is in use for permits, with one limit, or as a lock, never both: the types of its keys tell, and every request
// of the other use is ErrLimitMismatch as long as somebody holds or waits. A minimum hold keeps its own share closed: a
// reader's keeps writers out and lets readers in.
//
// AcquireAll is one call of the script for up to 128 names of any kinds, all or none. It does not wait: see
// Driver.AcquireAll. On a cluster, where names are on different servers, it is not declared.
//
// # Listing and force-release
//
// List reads through the keys of the database with SCAN, so that nobody pays for an index. ForceRelease marks the holds
// that it ends, in a hash that lives as long as they could have: a renewal that finds its hold gone looks there, and
// tells backend.ReasonForceReleased. Redis has no record of changes, so there is no Watch.
//
// # What it promises, and when
//
// While one server runs, keeps its data and its clock, there is one holder of a name, or as many as their kinds allow.
// Acquire is idempotent by request id, so a lost reply is no lock lost. Where two drivers ask with one id (replicas of
// a gateway), both are granted the one hold, and what either of them gives up or sends late does not end it: see
// Expire. A hold that was deleted, evicted or overwritten is reported by the next Renew. Waiters of live clients are
// served in the order of their arrival, as a rule: the order is lost with the server's memory, and a client that was
// cut off goes to the end, so backend.CapFair is not declared.
//
// # What it does not
//
// It issues no fencing tokens, so it must not protect data that two writers would corrupt. Replication is asynchronous:
// after a failover the new master may not know a lock that the old one granted, and there are two holders for up to one
// TTL. The same happens after FLUSHALL, after a restart without append-only file, or when the server's wall clock, by
// which Redis counts times to live, jumps forward. Any counter kept in Redis can go back for the same reasons. Replicas
// are therefore no protection but a risk, and are accepted only because most servers have some.
//
// Measured, with eight workers of two clients on one name or four, on a busy machine:
//
//	FENCELOCK_DEEP=1 go test -run TestOverlaps -v ./redis
//
//	a cluster's slot moved 50 times, key by key     1,146 grants, 0 overlaps, 0 holds lost, longest wait 0.11 s
//	SENTINEL FAILOVER 10 times, TTL 2 s            40,263 grants, 1 overlap, 23 holds lost, longest wait 2.9 s
//
// Describe says which of these dangers a configuration is open to, as the probe has found it:
// backend.ExclusionDurableServer for one server with appendonly yes, appendfsync always and no replica;
// ExclusionAsyncReplica for such servers with replicas, on a cluster, or behind Sentinels; and ExclusionVolatileServer
// for every server that answers before a write is on disk, whether it has replicas or not.
//
// A server that has lost its memory gives no sign of it: run_id and replication id change with every restart, also when
// nothing is lost, and with a FLUSHALL neither does. The hold itself is the sign. The next Renew or Release of each
// hold that is gone says so (backend.ReasonEvicted), and locks are granted anew at once. backend.ErrHistoryLost is not
// used: it is for services whose tokens could go back.
//
// # Without subscriptions
//
// Where no subscription can be had, because the server or a proxy has none, the user may not subscribe, or the server
// takes no more connections, waiters poll: after 50 ms, then less often, up to once a second, each with its own pace,
// and soon after the present hold should have run out. They stand in no queue, so they are served in no order, and
// after those that do. A subscription that was refused is asked for again every half minute.
//
// # Replicas that confirm
//
// With Options.Replicas a grant or a renewal is an answer only when so many replicas have it too: WAIT, on a cluster on
// the name's own master, in one more round trip. With fewer, the grant is given back and the call ends with a
// ReplicasError, even if it would wait. Replicas that do not answer cost every acquire ReplicaTimeout.
//
// What it buys: a failover to one of the replicas that have confirmed keeps the lock, and an acquire through a master
// that has been cut off from its replicas is refused, as is a renewal, so that its holders stop in time. What it does
// not: nothing makes Sentinel or a cluster promote one of those that have confirmed. With two replicas and Replicas: 1
// the other one may be chosen, and there are two holders; with as many as there are replicas any of them keeps the
// lock, and each that fails stops all grants. A release, and a hold that was taken back, may still be forgotten, which
// closes a name for one TTL. What WAIT says is in the replicas' memory; ReplicaDisk asks for their disks.
// backend.Exclusion is the same with and without it.
//
// It is no reason to count in Redis and call the number a fencing token: a promoted replica that has not seen the last
// INCR gives the same number again, to another holder, and so does a server that comes back without its last second of
// writes. A fence that goes back once lets the older writer in.
//
// # Connections
//
// Lock commands go on one connection to the server, or to each node of a cluster, which the driver makes from the
// client's options: address, credentials, TLS, Dialer, OnConnect. Any number of requests are under way on it; what is
// submitted while it is being written to leaves together. A connection that owes an answer for 250 ms, or whose caller
// was cancelled, carries nothing more, and the next request takes a new one; up to 16 such connections wait for their
// answers, for 3 s at most. MOVED and ASK are followed, TRYAGAIN is waited for. Behind Sentinels the master is looked
// up every second while there are calls, by a connection that is closed again.
//
// A caller that has the connection to itself call after call reads its answers on its own goroutine. The end of its
// context is then noticed up to 10 ms later, and the end of a connection between two of its calls up to 20 ms later.
//
// The client itself finds the nodes of a cluster, asks INFO, scans, and subscribes. Its hooks (AddHook) see one command
// for each step of a lock, or for the renewals of many, named fencelock.take, fencelock.free or by a letter of the
// script, with the lock's key. The arguments that could move the lock are not shown. A hook that does not pass the
// command on makes the call fail with nothing sent. Hooks for dialling and pipelines see nothing of the driver's own
// connections.
//
// # Settings checked
//
// Ping, Open and the first call ask INFO, and later calls have it asked in the background: after a fault, with a new
// connection, and every half minute. What it says holds from the next Acquire on; renewing and releasing go on in any
// case. They refuse, with an error that wraps backend.ErrMisconfigured: versions before 6.0; a server that is a
// replica; a maxmemory limit together with any maxmemory-policy but noeviction (see Options.AllowVolatileEviction); a
// node of a cluster reached by a client that is not a cluster client; clients with unfit settings, see New.
//
// A user restricted by ACL needs +info, +evalsha, +eval, +subscribe, +ping, +set, +exists, the commands in
// internal/redisscript/*.lua, and keys and channels under the prefix; for List, +scan; for Options.Replicas, +wait or
// +waitaof. Without +info, state the server's version (Options.Assume); without channels, waiters poll. That is also
// enough behind a proxy that answers INFO and SUBSCRIBE with an error, as Envoy's does. One that closes the connection
// for a command that it does not know, as Twemproxy does, cannot be used: go-redis begins every connection with HELLO.
//
// # Versions
//
// Developed and measured on Redis 7.0. The tests on other servers, Redis 6.2, 7.2, 7.4 and 8 and Valkey 7.2 and 8, are
// those of .github/workflows/ci.yml. On 7.0 they try WAITAOF, which came with 7.2, through a proxy that has WAIT answer
// for it. SPUBLISH, which came with 7.0, is not used: a channel of its kind belongs to a slot, and a waiting client has
// one channel for all its names, in whatever slots. So on a cluster each push goes to all nodes.
//
// # Escape hatches
//
// Keys are KeyPrefix{name}, KeyPrefix{name}:q and KeyPrefix{name}:s, with %, { and } in the name written as %25, %7B
// and %7D; deleting all three frees a name, and so does ForceRelease. Look tells who holds it.
package redis
