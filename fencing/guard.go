package fencing

import "context"

// Guard stands in front of resources and admits writes in the order of their tokens. A service that has a store of its
// own implements it, and has fencing/guardtest test it.
//
// The caller shows the claims before it reads what the write depends on: a value that was read earlier can have been
// overwritten by an earlier holder that was still writing.
type Guard interface {
	// Check admits the claims if no token is below the highest one admitted for its resource, and remembers them;
	// otherwise it returns a refusal (see Refusal) and remembers none. The same token is admitted again and again: a
	// hold may write many times. The remembering is atomic, and as durable as the resource that is guarded. Where the
	// write and the check are not one atomic step, a write may still be overtaken between the two; guards that live in
	// the resource's own transaction close that gap.
	//
	// An error of any other kind, a server that does not answer for example, admits nothing: the caller must not write.
	// What the guard remembers may have grown all the same, which is harmless: the holder of that token tries again.
	//
	// Check is safe for concurrent use, unless the guard is bound to a transaction that is not, and returns within ctx.
	Check(ctx context.Context, claims Claims) error
}
