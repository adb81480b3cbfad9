// Package redis is the driver for one Redis or Valkey server, a master behind Sentinels, or a Redis Cluster. It is of
// the efficiency tier: it keeps two workers from doing the same work, and does not fence.
//
//	Acquire ─► flights (batch.go) ─► the script: SET NX PX | RPUSH queue
//	            concurrent calls                      │
//	            share round trips                     │ release: LPOP queue, SET next, PUBLISH
//	waiter  ◄─ one subscription (push.go) ◄───────────┘
//
// # Algorithm
//
// A lock is one key. Its value names the request that holds it, and its time to live is the TTL. One Lua script does
// every step atomically, for many names in one call; an acquire and a release without contention are one round trip
// each. Renewing any number of grants is one pipeline.
//
// Who has to wait stands in a list, and the release hands the lock to the first in it: the key is never absent between
// two holders, nobody barges past the list, and only the next one is woken, by a message on its client's own channel.
// A contended grant costs six commands at the server, those inside the script counted. Messages can be lost, so each
// client also looks after its waiters of a name, together, every three seconds or more, and shortly after the present
// hold should have run out.
//
// Whoever waits may have died meanwhile. A waiter without a subscription is passed by. To every other one the lock is
// not given but offered, for two seconds: its client accepts, in one more round trip, and has it for the whole TTL. If
// nobody accepts, all places of that client are removed, and the next in line is offered the lock. So a process or a
// host that dies while it waits, with however many waiters, costs those behind it two seconds, on one server as on a
// cluster: the client that made the offer looks after it, and if that dies too, the next look of any waiter does,
// within four. Only holds shorter than a second, on one server, are handed over without the offer, which costs a short
// critical section more than it is worth; a host that vanishes from such a queue without closing its connections, or
// whose waiters died while somebody listens to PSUBSCRIBE *, closes the name for one TTL.
//
// # Shared holds and permits
//
// A name held in shares has a hash for its key, with the end of each hold by the server's clock, so that a holder that
// died gives back its own share after its own TTL. Exclusive requests cost what they cost without it. Acquiring and
// releasing a share is one round trip each; renewing is the same pipeline.
//
// Readers and writers wait in one queue, holders of permits in theirs, and nobody passes the first in it by: once a
// writer waits, new readers queue behind it, and an attempt without Wait is ErrHeld; once a request for many permits
// waits, free ones are kept for it. Readers next to each other in the queue are granted together. So neither starves
// the other, within what is said above of the queue's order. A waiter that gives up lets in those whom it alone kept
// out.
//
// A name is in use for permits, with one limit, or as a lock, never both: the types of its keys tell, and every request
// of the other use is ErrLimitMismatch as long as somebody holds or waits. A minimum hold keeps its own share closed:
// that of a reader keeps writers out and lets readers in.
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
// Acquire is idempotent by request id, so a lost reply is no lock lost. A hold that was deleted, evicted or overwritten
// is reported by the next Renew. Waiters of live clients are served in the order of their arrival, as a rule: the order
// is lost with the server's memory, and a client that was cut off goes to the end, so backend.CapFair is not declared.
//
// # What it does not
//
// It issues no fencing tokens and must not protect what two writers would corrupt. Replication is asynchronous: after a
// failover the new master may not know a lock that the old one granted, and there are two holders for up to one TTL.
// The same after FLUSHALL, after a restart without append-only file, or when the server's wall clock, by which Redis
// counts times to live, jumps forward. Any counter kept in Redis can go back for the same reasons. Replicas are
// therefore no protection but a risk, and are accepted only because most servers have some.
//
// Describe tells which of these a configuration is open to, as the probe found it: backend.ExclusionDurableServer for
// one server with appendonly yes, appendfsync always and no replica; ExclusionAsyncReplica for such servers with
// replicas, on a cluster, or behind Sentinels; and ExclusionVolatileServer for every server that answers before a write
// is on disk, whether it has replicas or not.
//
// A server that has lost its memory gives no sign of it: run_id and replication id change with every restart, also when
// nothing is lost, and with a FLUSHALL neither does. The hold itself is the sign. The next Renew or Release of each
// hold that is gone says so (backend.ReasonEvicted), and locks are granted anew at once: backend.ErrHistoryLost is for
// services that issue tokens, which could go back.
//
// # Without subscriptions
//
// Where no subscription can be had, because the server or a proxy has none, the user may not subscribe, or the server
// takes no more connections, waiters poll: after 50 ms, then less often, up to once a second, each with its own pace,
// and soon after the present hold should have run out. They stand in no queue, so they are served in no order, and
// after those who do. A subscription that was refused is asked for again every half minute.
//
// # Settings checked
//
// Ping, Open and the first call ask INFO, as do later ones in the background: after a fault, with a new connection, and
// every half minute. What that finds holds from the next Acquire on; renewing and releasing go on whatever it finds.
// They refuse, with an error that wraps backend.ErrMisconfigured: versions before 6.0; a server that is a replica; a
// maxmemory limit together with any maxmemory-policy but noeviction (see Options.AllowVolatileEviction); a node of a
// cluster reached by a client that is not a cluster client; clients with unfit settings, see New.
//
// A user restricted by ACL needs +info, +evalsha, +eval, +subscribe, +ping, the commands in internal/redisscript/*.lua,
// and keys and channels under the prefix; for List, +scan. Without +info state the server's version (Options.Assume);
// without channels, see above. That is also enough behind a proxy that answers INFO and SUBSCRIBE with an error, as
// Envoy's does. One that closes the connection for a command that it does not know, as Twemproxy does, cannot be used:
// go-redis begins every connection with HELLO.
//
// # Escape hatches
//
// Keys are KeyPrefix{name}, KeyPrefix{name}:q and KeyPrefix{name}:s, with %, { and } in the name written as %25, %7B
// and %7D; deleting all three frees a name, and so does ForceRelease. Look tells who holds it.
package redis
