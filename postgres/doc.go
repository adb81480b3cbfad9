// Package postgres is the driver for PostgreSQL 13 and later, through pgx. An application needs no service besides its
// database, and the lock, the fencing check and the write can be one transaction (Tx).
//
//	pool, _ := pgxpool.New(ctx, "postgres://app@db/app")
//	postgres.Migrate(ctx, pool, nil) // once, by a role that may create a schema
//	locks, err := fencelock.ForCorrectness(postgres.New(pool, nil), nil)
//
// # Tokens
//
// A token is (timeline, position in the write-ahead log), computed in the UPDATE that grants, on the name's row: the
// larger of the last token + 1 and timeline << 43 | (position >> 6) + shift. A counter in a row, and a sequence, fall
// back when a standby that lagged is promoted: the new primary has not seen the last grants, and issues their tokens a
// second time. So does the log position. The timeline rises with every promotion, and the position within a timeline;
// together they rise across release, crash, restart, failover, DROP TABLE and point-in-time recovery.
//
// A backup that is restored twice is on the same timeline twice. So the first call on a new timeline sets the shift,
// by 1,024 for each millisecond since the last recorded use: the tokens of the second restore are above those of the
// first, unless that wrote more than 65 MB of log per second. The shift is 2^42 at most, and leaves 2^32 units of 64
// bytes to the log, so that a token never leaves its bits.
//
// The row of a name that was not used for 24 h is deleted, if its token is below the position on disk: the next token
// is greater without it.
//
// An old primary that was not shut down still grants locks. Its tokens have the old timeline, so that guards which have
// seen the new timeline refuse them; a guard in the old primary's own database does not know about it.
//
// This needs one authority that promotes at most one standby of a timeline, as do Patroni, repmgr and the clouds'
// services. Two standbys of one timeline that are promoted by hand are two databases whose tokens do not compare. A
// server with a disk that was rolled back without recovery reissues tokens: a driver that was running returns
// backend.ErrHistoryLost. Never start a copy of a server's files beside it: both grant, and their tokens do not compare.
//
// A server grants nothing from timeline 1,024 on, or beyond 512 TB of log: a token has no bits for them.
//
// The token space is the system identifier that initdb drew, with the database and the schema: replicas share it, and
// a dump restored elsewhere has another token space.
//
// # Exclusion
//
// Description.Exclusion is the result of a probe, before the first grant and regularly afterwards:
//
//   - no standby: one durable server. fsync and full_page_writes must be on, and every grant is committed with
//     synchronous_commit = on, whatever the role's setting.
//   - synchronous_standby_names is set: a quorum. A commit whose wait for the standbys was cancelled is answered as a
//     success with a warning; the driver takes every notice during a commit for an unknown outcome.
//   - physical standbys without that, except those in Options.IgnoreStandbys: an asynchronous replica. A failover may
//     lose the last holds, and grant a second hold while the lease of the first is still valid; its token is greater,
//     so guards refuse the first holder's writes. The correctness tier refuses this unless Options.AcceptAsyncReplica
//     of the client is set. A client in use logs a warning one probe before, 30 s at most. Logical replication and
//     base backups do not count; a role without pg_monitor cannot tell a backup from a standby.
//
// Measured, twenty failovers of each kind under four clients that contend for three names, on one machine:
//
//	standby                    grants  tokens out of order  holders beside whom a rival was granted
//	quorum                        817                    0  0
//	asynchronous                  813                    0  0
//	asynchronous and lagging    1,255                    0  0
//
// In earlier runs the lagging standby had 1 such holder of 1,242, for 50 ms, and 2 of 1,275, for 29 ms at most. Such
// failovers also cause early losses: a hold that the standby had not seen is gone, and its holder loses it as evicted
// at its next renewal, before the end of the hold.
//
//	FENCELOCK_DEEP=1 go test -v -timeout 30m -run TestFailoversUnderLoad ./postgres
//
// Names are locked by one row each, sessions by one row for each client and TTL: ten thousand holds are renewed by one
// UPDATE. A promotion restarts the TTL of every session, and keeps all holds that the standby has. Running clients then
// move their holds to new sessions: a standby that lagged brings back holds that were released, and these end with the
// earlier sessions.
//
// # Time
//
// TTLs pass on the server's wall clock, which can be set. So no client ends another client's session because it looks
// expired: only if it has seen the clock pass evenly since before the last renewal, compared with its own clock, or if
// the session has been marked as late for a third of its TTL and a second, in which its client would have renewed it.
// Waiters mark a session that misses its renewal, so that its name still opens about when its TTL ends; for a client
// that comes later, or that has seen the clock jump, it opens up to TTL/3 + 1 s after its first look. A session that a
// clock in the future has renewed gets its TTL from now on, in its row.
//
// A jump ahead, while a holder is cut off or slow, may still open its name early: TTL/3 + 1 s after a client notices,
// or immediately if the session was marked before the jump and a new client asks.
//
// # Restores
//
// A dump restored over the tables (pg_restore --clean, or data alone after TRUNCATE) is noticed by the first call that
// writes: the row of fencelock.cluster was not written by the transaction that it names. All sessions end, running
// clients lose their holds with ReasonHistoryLost, and no lock is granted for the longest TTL that any session had, so
// that holds missing from the dump are over. ErrHeld without a holder gives the remaining time. If no earlier client
// still relies on a hold, an operator opens the tables:
//
//	select fencelock.open();
//
// A point-in-time restore is a new timeline, and looks like a promotion: the server does not show that acknowledged
// holds are missing. The promotion of a standby that was started with earlier data is such a restore, too. Before you admit clients, declare the restore, with the same effect as a restored dump:
//
//	select fencelock.restored();
//
// Change the table fencelock.cluster only by these functions. After TRUNCATE of it calls fail until Migrate has run.
//
// # Waiting
//
// Each name has its own queue of waiters, first come, first served. A release grants to the head in its own
// transaction and then notifies it on its client's channel, with one LISTEN connection for each driver; a client that
// misses the notification finds the grant within about a second. Behind a pooler in transaction mode, where LISTEN
// does not work, the driver detects that and polls (Options.NoListen skips the detection): Description.Polling is
// set, and CapPushLoss is not declared. With Options.Listen one connection bypasses the pooler, and all notifications
// are pushed. Statements are prepared, unless the pool's default_query_exec_mode says otherwise or a pooler mixes
// them up.
//
// A wait under other locks is compared with the other waits, in the transaction in which it begins: the request that
// would close a cycle is ErrDeadlock, with the cycle, and the others go on. Such waits begin one after the other, by an
// advisory lock. AcquireAll waits in no queue, so no cycle through it is found: see Options.Order of the client. It
// tries again every 30 to 50 ms.
//
// In session mode PgBouncer holds a connection to the server for each of the driver's (up to MaxConns of the pool, and
// one to listen, for each client): default_pool_size must be as large as all of them together, or calls wait.
// PgBouncer 1.18, as in Debian 12, may exit with "bad client state" when a call is cancelled (its issues 801 and 822,
// fixed in later versions): configure an automatic restart.
//
// # Cost
//
// A call takes one connection of the driver's own pool for one statement and one commit. Concurrent calls of one
// driver for uncontended names share a statement and its commit: up to 64 acquires or 64 releases, each with its own
// result. A call that such a statement cannot complete immediately, because the name is held, waited for, watched, or
// locked by another transaction, is repeated alone, so that a refusal, or a wait, affects its caller only.
//
// A statement that is not answered within 5 s is cancelled, and repeated as long as its caller waits. It waits at most
// 4 s for a row that another transaction has locked (lock_timeout, unless the role sets its own): a disconnected client
// leaves no waiting statement in the server. If the pool may have two connections or more, one is for renewals only.
// Long transactions elsewhere keep vacuum from cleaning these tables, as with any table. A Watch reads four to five
// times a second.
//
// On PostgreSQL 15 with its own settings and a machine of two processors that others used too, a cycle of one caller
// took 2.1 ms at the median, against 1.4 ms for two plain UPDATEs. 32 callers with a name each
// reached 0.98 of the rate of plain UPDATEs at best, and 0.56 to 0.58 at a load of 16 to 19 (bench/RESULTS.md). An
// advisory lock took 0.07 ms, since it is not written to disk; it has no token, and does not end when its client is
// cut off.
//
// # Faults
//
//   - A connection breaks: the call is repeated with the same request id, so that the server treats it as the same
//     call. An idle connection of the pool that ended unnoticed is replaced, since no request was sent on it.
//   - A statement runs late, after its caller has left: it has no effect if its request was released or has moved to
//     another session meanwhile. Otherwise its hold ends with its session, which the client leaves: its other holds
//     move to another session.
//   - The client is cut off: its holds end by its own clock before its session ends on the server. So do grants that it
//     did not receive.
//   - The client dies: its session's row expires after its TTL, and the next in the queue is granted when a waiter, or
//     any call for the name, looks: within about a second.
//   - The server restarts: committed holds survive. Calls answer ErrUnavailable or ErrUnknown meanwhile, and a
//     renewal without an answer is no loss. A hold ends if the restart takes longer than its time.
//   - A standby is promoted: see Tokens and Exclusion. The TTL of every session restarts with the first call on
//     the new timeline.
//   - The schema is dropped, a dump is restored, the disk is rolled back, or another database answers: running clients
//     lose their holds with ReasonHistoryLost, and return ErrHistoryLost until the program makes a new client.
//   - The server's clock is set: see Time.
//   - Another transaction locks the row of a name: calls for that name wait until their contexts end, and others go
//     on.
//
// # Rights and settings
//
// The role needs usage of the schema and the right to execute its functions; Migrate needs more. fsync and
// full_page_writes must be on, and the server must be a primary, not read-only. A client opens as many
// connections as its pool may have, and one more that listens: max_connections must allow that for all clients
// together.
//
// The driver's connections set client_encoding (UTF8), default_transaction_isolation (read committed), search_path
// (pg_catalog), and no statement_timeout and idle_in_transaction_session_timeout, whatever the role's settings are. A
// connection string that sets one of the last four takes precedence. Behind PgBouncer these settings need
// ignore_startup_parameters, or the driver connects without: then a role with repeatable read is refused. A
// BeforeConnect of the pool is called for the connection that listens, too. idle_session_timeout, PgBouncer's
// client_idle_timeout and a statement_timeout of the pooler's role cost a repetition.
//
// # Versions
//
// Migrate, then run the new programs. Each migration says which earlier programs may still run. A driver that the
// schema no longer allows refuses to acquire, with ErrMisconfigured and both versions, and still renews and releases.
package postgres
