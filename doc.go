// Package fencelock is a distributed lock. A holder loses its lease before another client can hold the lock. A waiter
// that stops waiting leaves no key or queue entry behind. Where a double run would corrupt data, only a lock with
// fencing tokens compiles.
//
//	locks, err := fencelock.ForCorrectness(etcd.New(client, nil), nil) // once per process
//	if err != nil {
//		return err
//	}
//	defer locks.Close(ctx)
//
//	err = locks.Do(ctx, "accounts/42", func(ctx context.Context, lease *fencelock.Lease) error {
//		return guard.Tx(ctx, lease.Claim("accounts/42"), debit) // ctx ends before another client can hold the lock
//	})
//
// # Tiers
//
// The tier says how much damage a double run would do.
//
//   - Efficiency: a rare double run wastes work. Every driver qualifies: [ForEfficiency].
//   - Correctness: a double run corrupts data. Only drivers that issue fencing tokens compile: [ForCorrectness]. Where
//     the driver comes from configuration, the same rule is checked at startup: [Open].
//
// No lock alone can protect data. A process can be paused between its last check of the lock and its write for longer
// than any lease. The fencing token closes that gap: it grows with every grant, each write carries it, and the resource
// refuses a token smaller than one it has seen. Package fencing has the resource's side.
//
// # How a call travels
//
//	locks.Acquire ─► lock.go ─ Request ─► backend.Driver ─► redis, … ─► server
//	lease.Context ◄─ lease.go, renew.go ◄─ Grant{Token, SentAt} ◄────────┘
//	lease.Token ──► your write ──► fencing.Guard.Check ─► admitted | ErrStale
//
// # Which call
//
//   - [Client.Do] runs a function under a lock, and is right for most programs: it releases, also after a panic, and
//     its result reports a loss.
//   - [Client.Acquire] and [Client.TryAcquire] return a [Lease], for locks that outlive a function. `defer
//     lease.Release(ctx)` is right also when ctx has ended.
//   - [Client.DoAll] and [Client.AcquireAll] acquire several names, all or none, and do not deadlock with each other.
//   - [Client.Lead] runs a function on one of all candidates at a time.
//   - [Client.Look], [Client.List] and [Client.Watch] show locks to people. Their results do not let a caller
//     release or renew a lock.
//
// # Kinds of lock
//
// An acquire is exclusive unless an option says otherwise: [Shared] admits other readers, [Permits] acquires some of a
// limited number, and [Hierarchical] acquires a path and everything below it. Each option needs a driver that declares
// the capability; other drivers return [ErrUnsupported] and change nothing. Fencing tokens protect exclusive holds
// only. Other holds carry a token for ordering, with a mark that guards refuse.
//
// The context identifies a line of work: an acquire with the context of a lease happens under that lease. [Reentrant]
// then returns another lease of the same hold, a wait that could never end returns [ErrDeadlock], and [Options].Order
// checks the order in which locks are acquired.
//
// # Time
//
// A lease is valid until its deadline: the send time of the last request or renewal that the service confirmed, plus
// the TTL, minus a margin. The send time is read just before the request is sent. The margin is 1 % of the TTL, plus 50
// ms, plus the driver's own allowance, plus 8 ms for each thousand leases of the client (at most an eighth of the TTL),
// because notifying all of them may take that long. Before the deadline no other client can hold the lock, unless the
// service itself loses data or its clock jumps, which only fencing covers. [Lease.Context] ends at the deadline at the
// latest, even while a network call hangs. A failed renewal is not a loss: renewals are retried until the deadline.
//
//	sent ──► granted              renewed: the deadline moves             not renewed: lost here
//	  │◄────────────────── TTL ─────┼─────────────────────────────────────────│─ margin ─►│ others can hold it
//
// The library measures elapsed time with a monotonic clock that includes suspended time, if the system has one, and
// never with a wall clock.
//
// # Context
//
// The context of Acquire bounds the wait and not the hold. The context of Do bounds both. Releases and cleanup do not
// depend on the caller's context: a cancelled request never leaves its lock behind.
//
// # Clients and goroutines
//
// One [Client] per process and service is enough: everything in this package may be called by several goroutines, and
// all leases of a client are renewed together, by one timer and few calls of the service. [Client.Close] ends the
// leases, releases the locks and closes the driver. If a process ends without Close, other clients wait until the TTL
// has passed.
//
// A lease belongs to the process that acquired it. Never pass it to another process; send its [fencing.Claim] with each
// write.
//
// # Limits
//
// In the efficiency tier two holders may overlap when the service fails over or loses data. In no tier does a lock stop
// a process that does not look: the context of a lost lease ends, and code that ignores it continues, until a
// guard refuses its writes. Waiters are served in order only where the driver declares it ([CapFair]).
//
// # Failure
//
// Every error can be branched on with errors.Is, keeps its cause, and names the call and the lock. An unknown
// outcome is [ErrUnknown] and is cleaned up in the background. A caller that got an error never keeps the lock.
package fencelock
