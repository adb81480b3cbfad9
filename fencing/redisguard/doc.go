// Package redisguard guards data in Redis: the check runs in one script with the caller's write, so both happen or
// neither does, without another write in between.
//
//	guard, err := redisguard.New(client, nil) // its memory: guard.Create
//
//	err = locks.Do(ctx, "accounts/42", func(ctx context.Context, lease *fencelock.Lease) error {
//		return guard.Update(ctx, lease.Claim("accounts/42"), "balance:{accounts/42}",
//			func(old []byte) ([]byte, error) { return debit(old, 10) })
//	}) // errors.Is(err, fencing.ErrStale): another client holds the lock, and the write did not happen
//
// Update reads after it has shown the claim, so it sees the last holder's write. A write that does not depend on a
// read, or reads in the script itself, can be your own script: NewWrite and Do. A value that was read before the claim
// was shown may be older than the last write: call Check first, and then read.
//
// # Requirements
//
// One string for each resource, without an expiry, fencing:{resource}, and one for all, fencing:terms, which Create
// makes before the first check. They must never be deleted: a guard that forgets admits a stale writer. So the server
// must not lose acknowledged writes (appendonly yes, and appendfsync always where it may lose power) and must not evict
// keys that have no expiry (maxmemory-policy noeviction or volatile-*); see Probe.
//
// On Redis Cluster the guard's keys and the write's must be in one slot: put {resource} into their names, as above, and
// give the claims of a set resources with a common {tag}. The guard's terms are in another slot there: they are read
// before the script runs, and not in one step with it, which matters only while an operator changes them. A resource
// with a } in its name cannot be used there.
//
// The check is as durable as the server: token and write are in one entry of the append-only file, so both are lost or
// neither is. After a failover to a replica that had not received them, the replica admits claims that the master would
// have refused. Where that must not happen, guard data in a database.
//
// A client of go-redis repeats a script after a lost answer, unless MaxRetries is -1: the same hold then writes
// twice, unless its claim has a Sequence. It looks at a context before it sends and, with ContextTimeoutEnabled,
// heeds the deadline while it waits.
package redisguard
