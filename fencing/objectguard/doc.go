// Package objectguard guards small objects in an object store that has conditional writes: S3 and compatible
// stores, Azure Blob Storage, Google Cloud Storage. The object itself carries the token, in its first line, and is
// replaced only if it has not changed since the check (If-Match), so check and write are one step.
//
//	guard, err := objectguard.New(store, nil) // its memory: guard.Create
//
//	err = locks.Do(ctx, "state", func(ctx context.Context, lease *fencelock.Lease) error {
//		return guard.Update(ctx, lease.Claim("state"), func(old []byte) ([]byte, error) { return next(old) })
//	}) // errors.Is(err, fencing.ErrStale): another client holds the lock, and the write did not happen
//
// Update reads after it has shown the claim, so it sees the last holder's content. Put is for contents that do not
// depend on a read: a content that was read before the claim was shown may be older than the last one. Call Check
// first, and then read.
//
// # Requirements
//
// The line is in the content, and not in the object's metadata, because the ETag of S3 is a hash of the content alone:
// two holders that write the same bytes would leave the same ETag, and a stale If-Match would pass. Read with Get,
// which takes the line off, or skip everything up to the first newline.
//
// An object is read and written as a whole, over the network, so guard something small: state, a manifest, the name of
// the newest version. Put large data into an object with a new name, with the token in it for debugging, and write
// that name to the guarded object:
//
//	name := fmt.Sprintf("backup/%v-%s", lease.Token(), rand.Text())
//	upload(ctx, name, data)
//	err := guard.Put(ctx, claim, []byte(name)) // refused: the upload is never read
//
// The guard's terms are a separate object, fencing-terms, which Create makes before the first check, once. It is
// read before each check and not in one step with it, which matters only while an operator changes them.
//
// The suite of guardtest passes on Versity S3 Gateway 1.8; other stores should be probed (Probe) before they are used.
//
// No object may be deleted, nor an older version restored: a guard that forgets admits a stale writer. A bucket
// policy that denies deletion and the restoring of versions ensures both.
package objectguard
