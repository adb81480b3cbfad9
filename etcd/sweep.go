package etcd

import (
	"context"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
)

// Keys that late requests write: leftovers. An unanswered request may be carried out long after its caller gave up
// and after its key was looked for and not found: a node that was cut off forwards it when it is back. The key then
// stands on a lease that the other locks keep alive, and would block the name for as long: for good, in a busy client
// (TestRequestThatANodeHandsOnLateClosesNothing). Exclusion and tokens are not in danger.
//
// So once a request on a session went unanswered, the session's loop looks whether its lease has keys that nobody here
// knows, and deletes them: soon, since most late requests are late by milliseconds (another node was faster), then
// after each keepalive, for the rest of the session's life. A session without an unanswered request has no such cost.
//
// A bounded number of looks is not enough: a request may arrive arbitrarily late. A lease for each acquire, which
// the late write would need and not find, would cost every lock two more writes and a keepalive. A tombstone that
// each acquire compares is exact, but costs everybody one more comparison, and is itself a key to clean up.

// firstSweep is the pause between an unanswered request and the first look; each further pause is twice as long,
// until the keepalives take over.
const firstSweep = 50 * time.Millisecond

// doubt tells the loop that a request on the session was not answered. One pending signal is enough.
func (s *session) doubt() {
	s.doubted.Notify()
}

// sweep deletes the keys on the lease that nobody here knows. The next keepalive retries failures. It
// runs in the session's loop only, and in less time than the next keepalive has.
func (s *session) sweep() {
	// The next keepalive waits for it.
	ctx, cancel := context.WithTimeout(s.d.ctx, min(callTime, s.ttl/6))
	defer cancel()
	keys, err := s.keys(ctx)
	if err != nil {
		return
	}
	for attached := range keys {
		// A client whose KV has a namespace and whose Lease has not sees the namespace in front of the key here.
		at := strings.Index(attached, s.d.locksDir())
		if at < 0 || s.d.known(attached[at:]) {
			continue
		}
		if s.deleteUnknown(ctx, attached[at:]) != nil {
			return
		}
	}
}

// deleteUnknown deletes a key that nobody knows. The order matters: the revision is read first, then it is asked
// whether somebody knows the key, and then it is deleted if nobody has written it since. A call that wrote it before
// the reading is known, and a later write is not undone.
func (s *session) deleteUnknown(ctx context.Context, key string) error {
	return s.d.clear(ctx, key, func(kv *mvccpb.KeyValue) bool {
		e, ours := s.d.entryOf(kv)
		return ours && e.lease == s.id && !s.d.known(key)
	})
}
