// Package etcdguard guards data in etcd: the check is a comparison in the transaction of the caller's write, so
// both happen or neither does.
//
//	guard, err := etcdguard.New(client, nil) // its memory: guard.Create
//
//	err = locks.Do(ctx, "config", func(ctx context.Context, lease *fencelock.Lease) error {
//		return guard.Update(ctx, lease.Claim("config"), "config/limits", func(old []byte) ([]byte, error) {
//			return raised(old)
//		})
//	}) // errors.Is(err, fencing.ErrStale): another client holds the lock, and the write did not happen
//
// Update reads after it has shown the claim, so it sees the last holder's write. Do is for writes that do not depend on
// a read: a value that was read before the claim was shown may be older than the last write. Call Check first, and then
// read.
//
// The lock may come from any service. If it is etcd's own, and in the same cluster, the driver's OwnerCmp also checks
// that the hold is still alive: give it to Do as a condition. Alone it needs no guard and no memory.
//
// # Requirements
//
// One small key for each resource, fencing/resources/…, and one for all, fencing/terms, which Create makes before the
// first check, without a lease. Only Clean may delete them: a guard that forgets admits a stale writer. A
// cluster restored from a backup has forgotten the claims after it, together with the writes; see fencing.Keeper.
package etcdguard
