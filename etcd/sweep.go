package etcd

import (
	"context"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
)

// Keys that late requests leave: leftovers. A request that nobody answered may be carried out long after its caller
// gave up and after its key was looked for and not found: a node that was cut off hands it on when it is back. The key
// then stands on a lease that the other locks keep alive, and would close the name for as long as they do: for good, in
// a busy client (TestRequestThatANodeHandsOnLateClosesNothing). Exclusion and tokens are not in danger.
//
// So once a request on a session went unanswered, the session's loop looks whether its lease has keys that nobody here
// knows, and deletes them: soon, since most late requests are late by milliseconds (another node was faster), then
// after each keepalive, for the rest of the session's life. A session without an unanswered request pays nothing.
//
// Looking only for a while was rejected: nothing bounds how late a request arrives. So was a lease for each acquire,
// which the late write would need and not find: every lock would cost two more writes and a keepalive. So was a
// tombstone that each acquire compares: exact, but one more comparison for everybody, and a key that must be cleaned up
// itself.

// firstSweep is how long after an unanswered request the first look follows; each further one takes twice as long,
// until the keepalives take over.
const firstSweep = 50 * time.Millisecond

// doubt tells the loop that a request on the session was not answered. A signal that is there already is enough.
func (s *session) doubt() {
	s.doubted.Ring()
}

// sweep deletes the keys on the lease that nobody here knows. What fails is tried again after the next keepalive. It
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
// the reading is known, and one that writes it later is not undone.
func (s *session) deleteUnknown(ctx context.Context, key string) error {
	return s.d.clear(ctx, key, func(kv *mvccpb.KeyValue) bool {
		e, ours := s.d.entryOf(kv)
		return ours && e.lease == s.id && !s.d.known(key)
	})
}
