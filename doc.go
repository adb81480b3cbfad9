// Package fencelock is a distributed lock that tells the truth: a holder learns that it lost the lock before anybody
// else can hold it, a waiter leaves nothing behind, and where a double run would corrupt data, nothing but a lock with
// fencing tokens is accepted.
//
//	locks, err := fencelock.ForCorrectness(etcd.New(client, nil), nil) // once per process
//	if err != nil {
//		return err
//	}
//	defer locks.Close(ctx)
//
//	err = locks.Do(ctx, "accounts/42", func(ctx context.Context, lease *fencelock.Lease) error {
//		return guard.Tx(ctx, lease.Claim("accounts/42"), debit) // ctx ends before somebody else can hold the lock
//	})
//
// # Tiers
//
// Callers say what a double run would cost them.
//
//   - Efficiency: a rare double run wastes work. Any driver will do: [ForEfficiency].
//   - Correctness: a double run corrupts data. Only drivers that issue fencing tokens compile: [ForCorrectness]. Where
//     the driver comes from configuration, the same rule is checked at startup: [OpenURL].
//
// No lock alone can protect data. A process can be paused between its last look at the lock and its write for longer
// than any lease. The fencing token closes that gap: it grows with every grant, each write carries it, and the resource
// refuses a token smaller than one it has seen. Package fencing has the resource's side.
//
// # The way of a call
//
//	locks.Acquire ─► lock.go ─ Request ─► backend.Driver ─► redis, … ─► server
//	lease.Context ◄─ lease.go, renew.go ◄─ Grant{Token, SentAt} ◄────────┘
//	lease.Token ──► your write ──► fencing.Guard.Check ─► admitted | ErrStale
//
// # Which call
//
//   - [Client.Do] runs a function under a lock, and is right for most programs: it releases, also after a panic, and
//     its result tells of a loss.
//   - [Client.Acquire] and [Client.TryAcquire] return a [Lease], for locks that outlive a function. `defer
//     lease.Release(ctx)` is right also when ctx has ended.
//   - [Client.DoAll] and [Client.AcquireAll] take several names or none, without deadlocks among themselves.
//   - [Client.Lead] runs a function on one of all candidates at a time.
//   - [Client.Look], [Client.List] and [Client.Watch] show locks to people; nothing that they show lets anybody move
//     one.
//
// # Kinds of lock
//
// An acquire takes the name for itself, unless an option says otherwise: [Shared] beside other readers, [Permits] for
// some of a number, [Hierarchical] for a path and all below. Each needs a driver that declares it; what a driver cannot
// do is [ErrUnsupported] and changes nothing. Fencing tokens protect exclusive holds only: the others carry one for
// order, marked so that guards refuse it.
//
// One line of work is known by its context: an acquire with the context that a lease gives out happens under that
// lease. [Reentrant] gets another lease of the same hold that way, a wait that could never end is [ErrDeadlock], and
// [Options].Order checks the order in which locks are taken.
//
// # Time
//
// A lease is believed until its deadline: the instant just before the request (or renewal) that the service confirmed
// was sent, plus the TTL, less a margin of 1 % of the TTL + 50 ms + the driver's own term, and less 8 ms for each
// thousand leases that the client holds, but not more than an eighth: so long it may take to tell them all. Within that
// time no other client can hold the lock, unless the service itself loses data or its clock jumps, which only fencing
// covers. [Lease.Context] ends at the deadline at the latest, whatever any network call is doing. A failed renewal is
// no loss: renewals are retried until the deadline.
//
//	sent ──► granted              renewed: the deadline moves             not renewed: lost here
//	  │◄────────────────── TTL ─────┼─────────────────────────────────────────│─ margin ─►│ the service lets others in
//
// Elapsed time is measured by a clock that runs on while the machine is suspended. No wall clock decides anything.
//
// # Context
//
// The context of Acquire bounds the wait and not the hold. The context of Do bounds both. Releases and clean-up do not
// depend on the caller's context: a cancelled request never leaves its lock behind.
//
// # Clients and goroutines
//
// One [Client] per process and service is enough: everything in this package may be called by several goroutines, and
// all leases of a client are renewed together, by one timer and few calls of the service. [Client.Close] ends the
// leases, gives the locks back and closes the driver; a process that ends without it keeps its locks closed for others
// until their TTL is over.
//
// A lease is a value of the process that took it. It is never handed to another process; what travels is its
// [fencing.Claim], with each write.
//
// # What is not promised
//
// In the efficiency tier two holders may overlap when the service fails over or loses data. In no tier does a lock stop
// a process that does not look: the context of a lost lease ends, and code that ignores it runs on, until a guard
// refuses its writes. Waiters are served in order only where the driver declares it ([CapFair]).
//
// # Failure
//
// Every error can be branched on with errors.Is, keeps its cause, and names the call and the lock. An outcome that is
// not known is [ErrUnknown] and is cleaned up in the background; the lock is never kept for a caller who was told that
// it has none.
package fencelock
