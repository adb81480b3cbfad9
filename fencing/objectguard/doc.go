// Package objectguard guards small objects in an object store that has conditional writes: S3 and what speaks its
// language, Azure Blob Storage, Google Cloud Storage. The object itself carries the token, in its first line, and is
// replaced only if it is still the one that was judged (If-Match), so check and write are one step.
//
//	guard, err := objectguard.New(store, nil)
//
//	err = locks.Do(ctx, "state", func(ctx context.Context, lease *fencelock.Lease) error {
//		return guard.Update(ctx, lease.Claim("state"), func(old []byte) ([]byte, error) { return next(old) })
//	}) // errors.Is(err, fencing.ErrStale): somebody else holds the lock by now, and nothing was written
//
// Update reads after the claim was shown, so what it reads is what the last holder left. Put writes what depends on
// nothing that was read; with a content that was read before the claim was shown it can overwrite what a holder put in
// between: show it first (Check), and read then.
//
// # What it takes
//
// The line is in the content, and not in the object's metadata, because the ETag of S3 is a hash of the content alone:
// two holders that write the same bytes would leave the same ETag, and a stale If-Match would pass. Read with Get,
// which takes the line off, or skip everything up to the first newline.
//
// An object is read and written as a whole, over the network, so guard something small: state, a manifest, the name of
// the newest version. Large data go into an object of a name never used before, with the token in it for those who
// look, and their name into the guarded one:
//
//	name := fmt.Sprintf("backup/%v-%s", lease.Token(), rand.Text())
//	upload(ctx, name, data)
//	err := guard.Put(ctx, claim, []byte(name)) // refused: nobody will ever read what was uploaded
//
// The guard's terms are an object of their own, fencing-terms. It is read before each check and not in one step with
// it, which matters only while an operator changes them.
//
// The suite of guardtest passes on Versity S3 Gateway 1.8; other stores should be probed (Probe) before they are used.
//
// No object may be deleted, nor an older version restored: a guard that forgets admits a stale writer. A bucket policy
// that denies deletion, and versions that nobody may restore, see to both.
package objectguard
