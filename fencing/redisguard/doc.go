// Package redisguard guards what is kept in Redis: the check runs in one script with the caller's write, so both happen
// or neither does, and nobody comes between.
//
//	guard, err := redisguard.New(client, nil)
//
//	err = locks.Do(ctx, "accounts/42", func(ctx context.Context, lease *fencelock.Lease) error {
//		return guard.Update(ctx, lease.Claim("accounts/42"), "balance:{accounts/42}",
//			func(old []byte) ([]byte, error) { return debit(old, 10) })
//	}) // errors.Is(err, fencing.ErrStale): somebody else holds the lock by now, and nothing was written
//
// Update reads after the claim was shown, so what it reads is what the last holder left. A write that depends on
// nothing that was read, or reads in the script itself, can be a script of your own: NewWrite and Do. With a value that
// was read before the claim was shown, Do can overwrite what a holder wrote in between: show it first (Check), and read
// then.
//
// # What it takes
//
// One hash for each resource, without an expiry, fencing:{resource}, and one for all, fencing:terms. They must never
// go: a guard that forgets admits a stale writer. So the server must keep what it acknowledged (appendonly yes, and
// appendfsync always where it may lose power) and not evict keys that have no expiry (maxmemory-policy noeviction or
// volatile-*); see Probe.
//
// On Redis Cluster the guard's keys and the write's must be in one slot: put {resource} into their names, as above, and
// give the claims of a set resources with a common {tag}. The guard's terms are in another slot there: they are read
// before the script runs, and not in one step with it, which matters only while an operator changes them. A resource
// with a } in its name cannot be used there.
//
// The check is as durable as the server is set up to be, and no more: token and write are in one entry of the
// append-only file, so both are lost or neither is. After a failover to a replica that had not heard of them, the
// replica admits what the master would have refused. Where that must not happen, guard data in a database.
//
// A client of go-redis repeats a script whose answer was lost, unless MaxRetries is -1: the same hold then writes
// twice, unless its claim has a Sequence. It looks at a context before it sends and, with ContextTimeoutEnabled, heeds
// the deadline while it waits.
package redisguard
