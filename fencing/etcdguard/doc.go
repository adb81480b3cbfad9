// Package etcdguard guards what is kept in etcd: the check is a comparison in the transaction of the caller's write, so
// both happen or neither does.
//
//	guard, err := etcdguard.New(client, nil)
//
//	err = locks.Do(ctx, "config", func(ctx context.Context, lease *fencelock.Lease) error {
//		return guard.Update(ctx, lease.Claim("config"), "config/limits", func(old []byte) ([]byte, error) {
//			return raised(old)
//		})
//	}) // errors.Is(err, fencing.ErrStale): somebody else holds the lock by now, and nothing was written
//
// Update reads after the claim was shown, so what it reads is what the last holder left. Do writes what depends on
// nothing that was read; with a value that was read before the claim was shown it can overwrite what a holder wrote in
// between: show it first (Check), and read then.
//
// The lock may come from any service. If it is etcd's own, and in the same cluster, the driver's OwnerCmp asks for
// more, that the hold is still alive: give it to Do as a condition. Alone it needs no guard and no memory.
//
// # What it takes
//
// One small key for each resource, fencing/resources/…, and one for all, fencing/terms, without a lease. They must
// never be deleted but by Clean: a guard that forgets admits a stale writer. A cluster restored from a backup has
// forgotten what came after it, together with the writes; see fencing.Keeper.
package etcdguard
