package fencing

import "context"

// Guard protects resources and admits writes in the order of their tokens. A service with its own store implements
// it, and tests it with fencing/guardtest.
//
// Show the claims before you read the values that the write depends on: an earlier holder still writing may
// overwrite a value that was read before.
type Guard interface {
	// Check admits the claims if no token is below the highest token admitted for its resource, and remembers them;
	// otherwise it returns a refusal (see Refusal) and remembers no claim. The same token is admitted any number
	// of times: a hold may write many times. Check updates its memory atomically, and as durably as the guarded
	// resource. Where the write and the check are not one atomic step, a write may still be overtaken between the
	// two; guards that live in the resource's own transaction close that gap.
	//
	// After any other error, such as a server that does not answer, the claims are not admitted: the caller must not
	// write. The guard may still have recorded them, which is harmless: the holder of that token may retry.
	//
	// Check is safe for concurrent use, unless the guard is bound to a transaction that is not, and returns within ctx.
	Check(ctx context.Context, claims Claims) error
}
