// Package redis is the driver for one Redis or Valkey server, a master behind Sentinels, or a Redis Cluster. It
// serves the efficiency tier: it prevents duplicate work, but does not fence.
//
//	Acquire ─► SET NX PX, EXISTS queue ─► granted
//	            │ held, or others wait              release: DEL; where somebody waits
//	            └► the script: RPUSH queue ◄──────── the script: LPOP queue, SET next, PUBLISH
//	waiter  ◄─ one subscription (push.go) ◄──────────┘
//
// # Algorithm
//
// A lock is one key. Its value names the request that holds it, and its time to live is the TTL. A free name is
// acquired with SET NX PX, and released by a short script that compares and deletes; each is one round trip. One Lua
// script does everything else, each step atomically, many names in one call. Requests for a name that is held, or was
// contended within the last second, go to the script first; the call that finds a name held takes a second round
// trip. Renewing any number of grants is one pipeline. The compare-and-delete commands of newer servers are not used:
// a release must check for waiters in the same step.
//
// If a hold has expired while others wait, SET NX may take the lock before the first waiter has it. EXISTS shows that,
// and in one more step the request releases the lock and joins the end of the queue. So it overtakes no waiter, unless
// the answer is lost between the two steps or a cluster's slot moves.
//
// Waiting requests form a list, and a release hands the lock to the first of them: the key is never absent between two
// holders, no request overtakes the list, and only the next waiter is woken, by a message on its client's channel. A
// contended grant costs 13 commands at the server in three round trips, those inside the script counted. Messages can
// be lost, so each client also polls for its waiters: on one server all of its names together, every second, with two
// commands for up to 500 of them; and each name separately, less often the more names there are. 200 waiters on 200
// names cost at most some 20 commands a second, 10,000 some 300. With up to 64 names, and always on a cluster or for
// shares, a name is also settled when its hold should have run out, which is otherwise noticed a second later. On a
// cluster that takes some 40 commands a second for 200 names with a TTL of 30 s.
//
// A waiter may have died while it waited. So the script offers the lock for one second: the waiter's client accepts, in
// one more round trip, and holds the lock for the whole TTL. If it does not accept, the script removes all its places,
// asks all other clients in the queue whether they are alive, and offers the lock to the next waiter. A client that has
// not answered by the end of that offer loses its places too. So processes and hosts that die while they wait, however
// many, delay the waiters behind them by a little over two seconds, on one server, behind Sentinels and on a cluster,
// even with other subscribers to PSUBSCRIBE *. The client that made the offer monitors it. If that client dies too, the
// next peek of any waiter does, within another second, and on a cluster the next poll, within four if it waits for few
// names. A live waiter whose client does not answer within that second goes to the end of the queue.
//
// # Shared holds and permits
//
// A name held in shares has a hash for its key, with the end of each hold by the server's clock, so that the share of
// a dead holder ends after its own TTL. Exclusive requests cost the same as without it. Acquiring and releasing a
// share is one round trip each; renewing is the same pipeline.
//
// Readers and writers wait in one queue, requests for permits in another, and no request overtakes the first in it:
// once a writer waits, new readers queue behind it, and an attempt without Wait is ErrHeld; once a request for many
// permits waits, free ones are kept for it. Readers next to each other in the queue are granted together. So neither
// starves the other, within the limits of the queue's order above. When a waiter leaves, the requests that it alone
// blocked are granted.
//
// While a name has a holder or a waiter, it is used either for permits, with one limit, or as a lock; a request for the
// other use returns ErrLimitMismatch. A minimum hold keeps its own share closed: a reader's keeps writers out and lets
// readers in.
//
// AcquireAll is one call of the script for up to 128 names of any kinds, all or nothing. It does not wait: a set with
// Wait that cannot be granted immediately is ErrUnsupported without a change, and the core acquires the names one after
// the other. Otherwise the set would close some names while it waits for the rest, or starve. On a cluster, where names
// are on different servers, it is not supported.
//
// # Listing and force-release
//
// List reads all keys of the database with SCAN, on a cluster of each master in turn, 1000 at a time, so that acquires do
// not pay for an index: it is slow on a server with many other keys, but does not block it. Names that are held from its
// beginning to its end are yielded once, except names with keys that move to another node meanwhile. ForceRelease marks the
// holds that it ends, in a hash that lives as long as they could have: a renewal that finds its hold gone looks
// there, and returns backend.ReasonForceReleased. Redis has no record of changes, so there is no Watch.
//
// # Promises and their conditions
//
// While one server runs, keeps its data and its clock, there is one holder of a name, or as many as their kinds
// allow. Acquire is idempotent by request id, so a lost reply loses no lock: a repeat returns the hold that the request
// has. After ErrUnknown there may be a hold, and the core releases it. If two drivers use one id (replicas of a
// gateway), both are granted the one hold, and neither an expiry nor a late request of either ends it: see Expire. A
// hold that was deleted, evicted or overwritten is reported by the next Renew. Waiters of live clients are served in
// the order of their arrival, as a rule: the order is lost with the server's memory, and a client that was cut off
// goes to the end, so backend.CapFair is not declared.
//
// # Limits
//
// The driver issues no fencing tokens, so do not use it to protect data that two writers would corrupt. Replication is
// asynchronous: after a failover the new master may not know a lock that the old one granted, and there are two holders
// for up to one TTL. The same happens after FLUSHALL, after a restart without append-only file or with an old dump, when
// a copy takes the server's place, or when the server's wall clock, by which Redis counts times to live, jumps forward. Any counter kept in Redis can go back for the same
// reasons. Replicas therefore add a risk; the driver accepts them because most servers have some.
//
// Measured, with eight workers of two clients on one name or four, on a busy machine:
//
//	FENCELOCK_DEEP=1 go test -run TestOverlaps -v ./redis
//
//	a cluster's slot moved 50 times, key by key     1,162 grants, 0 overlaps, 0 holds lost, longest wait 0.31 s
//	SENTINEL FAILOVER 10 times, TTL 2 s            26,214 grants, 1 overlap, 26 holds lost, longest wait 7.3 s
//
// Describe returns which of these risks apply to a configuration, by the result of the probe:
// backend.ExclusionDurableServer for one server with appendonly yes, appendfsync always and no replica;
// ExclusionAsyncReplica for such servers with replicas, on a cluster, or behind Sentinels; and ExclusionVolatileServer
// for every server that answers before a write is on disk, whether it has replicas or not.
//
// A server that has lost its memory cannot be recognized: run_id and replication id change with every restart, even
// without a loss, and a FLUSHALL changes neither. Only the missing holds show the loss. The next Renew or Release of
// each missing hold reports it (backend.ReasonEvicted), and the locks can be granted again immediately.
// backend.ErrHistoryLost is not used: it is for services with tokens that could go back.
//
// # Without subscriptions
//
// Without a subscription, because the server or a proxy has none, the user may not subscribe, or the server takes no
// more connections, waiters poll: after 50 ms, then less often, up to once a second, each at its own pace, and soon
// after the current hold should have expired. They have no place in the queue, so they are served in no order, and
// after queued waiters. A refused subscription is retried every half minute.
//
// # Replicas that confirm
//
// With Options.Replicas a grant or a renewal succeeds only if so many replicas have it too: WAIT, on a cluster on the
// name's own master, in one more round trip. With fewer, the grant is released and the call ends with a
// ReplicasError, even if it would wait. Replicas that do not answer cost every acquire ReplicaTimeout.
//
// Benefit: a failover to a replica that has confirmed keeps the lock, and an acquire through a master that is cut off
// from its replicas is refused, as is a renewal, so that its holders stop in time. Limit: Sentinel or a cluster may
// promote another replica. With two replicas and Replicas: 1 the unconfirmed replica may be chosen, and there are two
// holders; with Replicas equal to their number any of them keeps the lock, and a single failure stops all grants. A
// release, and a hold that was taken back, may still be forgotten, which closes a name for one TTL. WAIT confirms the
// replicas' memory; ReplicaDisk asks for their disks. backend.Exclusion is the same with and without it.
//
// Even with confirmed replicas, a counter in Redis is no fencing token: a promoted replica that has not seen the last
// INCR gives the same number again, to another holder, and so does a server that comes back without its last second of
// writes. A counter that goes back once admits the older writer.
//
// # Connections
//
// Lock commands use connections of the driver, which it makes from the client's options: address, credentials, TLS,
// Dialer, OnConnect. Requests that are submitted while an exchange is in progress leave together as one pipeline: when
// it has ended, or on a second connection when they are as many as it has. If an exchange takes longer than 5 ms, or
// its caller leaves, they take another connection, and if several are slow, after twice the time for each. An exchange
// ends after 3 s. The driver has up to 16 connections to the server, or to each node of a cluster, and keeps up to
// four while it sends nothing. MOVED and ASK are followed, TRYAGAIN is retried. Behind Sentinels the master is looked
// up every second while there are calls, by a connection that is closed again.
//
// If no other request is pending, a call makes its exchange on the caller's goroutine; if its context ends before the
// reply, the driver closes the connection.
//
// The client itself finds the nodes of a cluster, asks INFO, scans, and subscribes. Its hooks (AddHook) see one command
// for each step of a lock, or for the renewals of many, named fencelock.take, fencelock.free or by a letter of the
// script, with the lock's key. Arguments with secrets are not shown. If a hook does not forward the command, the call
// fails and is not sent. Hooks for dialling and pipelines do not see the driver's own connections.
//
// # Settings checked
//
// Ping, Open and the first call read INFO. Later the driver reads it in the background: after a fault, with a new
// connection, and every half minute. The result applies from the next Acquire on; renewals and releases continue in any
// case. These settings are refused with an error that wraps backend.ErrMisconfigured: versions before 6.0; a replica; a
// maxmemory limit together with any maxmemory-policy but noeviction (see Options.AllowVolatileEviction); a cluster node
// reached by a client that is not a cluster client; clients with unfit settings, see New.
//
// A user restricted by ACL needs +info, +evalsha, +eval, +subscribe, +ping, +set, +exists, the commands in
// internal/redisscript/*.lua, and keys and channels under the prefix; for List, +scan; for Options.Replicas, +wait or
// +waitaof. Without +info, state the server's version (Options.Assume); without channels, waiters poll. That is also
// enough behind a proxy that answers INFO and SUBSCRIBE with an error, as Envoy's does. A proxy that closes the
// connection after an unknown command, such as Twemproxy, cannot be used: go-redis begins every connection with
// HELLO.
//
// # Versions
//
// Developed and measured on Redis 7.0. .github/workflows/ci.yml tests other servers: Redis 6.2, 7.2, 7.4 and 8 and
// Valkey 7.2 and 8. On 7.0 the tests try WAITAOF, which came with 7.2, through a proxy that answers it with WAIT.
// SPUBLISH, which came with 7.0, is not used: a channel of its kind belongs to a slot, and a waiting client has one
// channel for all its names, in whatever slots. So on a cluster each push goes to all nodes.
//
// # Escape hatches
//
// Keys are KeyPrefix{name}, KeyPrefix{name}:q and KeyPrefix{name}:s, with %, { and } in the name written as %25, %7B
// and %7D; deleting all three frees a name, and so does ForceRelease. Look returns its holders.
package redis
