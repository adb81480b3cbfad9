package etcd

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// Waiting. The keys of a name are its queue, in the order of their create revisions, and a request holds as soon as
// no earlier key excludes it (use.go). A waiter writes its key and watches its blocker's key. When that goes, it
// reads its own key and the nearest keys that may exclude it, not the whole queue, so that a hand-over's traffic does
// not grow with the queue. A release wakes one waiter. It costs 6 messages a grant, where a queue
//
// A watch can be lost without a sign, so every waiter reads the queue now and then. And a waiter may lose its place
// while it waits: its lease ends, or somebody deletes its key. The event that woke a waiter is no grant; only the
// read that follows does, which shows the waiter's own key on a live lease.
//
// The second half of the file removes places: removeOne deletes the key of a caller who stopped waiting.

// The intervals at which a waiter reads the queue, spread at random. Watches make these reads unnecessary unless one
// is lost.
const (
	firstLook = time.Second
	lookEvery = time.Minute // 200 waiters ask for less than 4 looks a second
)

// waitFor enters the queue, waits until no earlier key excludes its own, and returns the create revision of that
// key. If the key has gone it fails with errSessionLost: the place is lost, and the next try enters anew at the end.
func (a *attempt) waitFor(ctx context.Context, s *session, w *wish) (int64, error) {
	revision, before, err := a.enter(ctx, s, w)
	for err == nil && len(before) > 0 {
		// Only now: a request that got its turn in the transaction that wrote its key has not waited.
		a.queued = true
		if err = a.watch(ctx, s, w, revision, before); err == nil {
			// The event that woke us does not count. The state does, read with our own key in it: that also proves
			// that the key and the lease are there.
			before, err = a.ahead(ctx, s, w, revision)
		}
	}
	return revision, err
}

// enter puts the key, unless the name is in use otherwise, and returns its create revision and its blockers, which
// the same transaction reads. Without blockers the request holds.
//
// The transaction is two comparisons deep. The outer one, free, is "nothing blocks me": an uncontended wait needs no
// other. Its else branch compares "the queue mixes with me, and my key is vacant", puts the key, and reads the
// entries ahead of it. Writing first and reading in a second request would cost every waiter another round trip.
func (a *attempt) enter(ctx context.Context, s *session, w *wish) (int64, []entry, error) {
	for {
		// The key is put with the lease of this try. If it stands already, from an earlier try of this request or as
		// somebody else's, vacant fails, and the queue that was read decides below.
		w.vacate()
		put, look := w.put(s.id), clientv3.OpGet(w.dir, clientv3.WithPrefix())
		mixes := append(w.use.mixes(w.dir), vacant(w.key))
		// Ours is the last one then, and only its possible blockers matter.
		enter := clientv3.OpTxn(mixes, []clientv3.Op{put, w.use.ahead(w.dir, 0)}, []clientv3.Op{look})
		resp, err := a.txn(ctx, w.use.free(w.dir, w.key), []clientv3.Op{put}, []clientv3.Op{enter})
		if err != nil {
			return 0, nil, err
		}
		revision := resp.Header.Revision
		if resp.Succeeded {
			return revision, nil, nil
		}
		entered := resp.Responses[0].GetResponseTxn()
		if entered.Succeeded {
			before, hidden := a.before(w, entered.Responses[1].GetResponseRange().Kvs, revision)
			if hidden {
				before, err = a.ahead(ctx, s, w, revision)
			}
			return revision, before, err
		}
		key := w.key
		same, before := a.sinceRead(w, entered.Responses[0].GetResponseRange().Kvs, revision)
		if w.revision == 0 {
			// Somebody else's key stands where ours would: choose another place and repeat, without comparing that
			// nobody else comes. The loop ends, since each turn chooses among four times as many.
			if w.key != key {
				continue
			}
			if err := w.use.mismatch(w.r.Name, before); err != nil {
				return 0, nil, err
			}
		}
		resp, err = a.txn(ctx, []clientv3.Cmp{same}, []clientv3.Op{w.put(s.id)}, nil)
		if err != nil {
			return 0, nil, err
		}
		if resp.Succeeded {
			return cmp.Or(w.revision, resp.Header.Revision), w.use.blockers(before), nil
		}
		// Somebody came, or wrote our key, at the same moment: repeat.
	}
}

// before returns the blockers of a key that was created at revision, from the result of use.ahead. hidden is true if
// it contains a foreign key: use.ahead asks for the nearest few keys only, and a foreign key takes the place of a
// request's key. The caller then reads the whole queue.
func (a *attempt) before(w *wish, kvs []*mvccpb.KeyValue, revision int64) (before []entry, hidden bool) {
	entries := a.d.entriesOf(kvs)
	hidden = len(entries) < len(kvs)
	entries = slices.DeleteFunc(entries, func(e entry) bool { return e.revision >= revision })
	return w.use.blockers(entries), hidden
}

// ahead reads our key and its blockers, both at one revision, from a majority of the cluster. revision is the create
// revision of our key: a key of the same name that was created later is another request's. If our key has gone, since
// the lease ended or somebody deleted it, it fails with errSessionLost: this try has no hold.
func (a *attempt) ahead(ctx context.Context, s *session, w *wish, revision int64) ([]entry, error) {
	bounded, cancel := a.d.bounded(ctx)
	defer cancel()
	resp, err := a.d.commit(bounded, nil, []clientv3.Op{clientv3.OpGet(w.key), w.use.ahead(w.dir, revision)}, nil)
	if err != nil {
		return nil, err
	}
	// Ours only if it was created where we put it and stands on the lease that we prove. On another lease it is not
	// proved by this session, and the next try moves it.
	own := a.d.entriesOf(resp.Responses[0].GetResponseRange().Kvs)
	if len(own) != 1 || own[0].revision != revision || own[0].lease != s.id {
		return nil, errSessionLost
	}
	before, hidden := a.before(w, resp.Responses[1].GetResponseRange().Kvs, revision)
	if !hidden {
		return before, nil
	}
	// A foreign key was among the few that were read: read the whole queue.
	queue, err := a.read(ctx, w)
	if err != nil {
		return nil, err
	}
	queue = slices.DeleteFunc(queue, func(e entry) bool { return e.revision >= revision })
	return w.use.blockers(queue), nil
}

// watch returns nil when the blocker may have gone, or our own key, and an error if the wait cannot go on.
//
// It watches from now on and reads once more after the watch stands. Watching from the revision that was read, as the
// client library's recipe does, puts the watch among the lagging ones, which the server serves every 100 ms.
//
// The own key is watched too, from the first look on: otherwise a waiter whose key an administrator deleted would
// learn that only at its turn (TestWaiterWhoseKeyIsDeletedQueuesAgain). Not earlier, because a lock that changes
// hands quickly would pay for a watch that it never needs. Channels report the session's end and its being outgrown.
//
// Everything that watch started ends with it: the context of the watches is cancelled on return, and the timer stopped.
func (a *attempt) watch(ctx context.Context, s *session, w *wish, revision int64, before []entry) error {
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	key, end := w.use.watched(w.dir, before)
	deleted, err := a.follow(ctx, cancel, key, end)
	if err != nil {
		return err
	}
	// still reads the queue and reports whether the watch is on our blocker. If it is not, the wait is over, or
	// has to begin anew on another key.
	still := func() (bool, error) {
		now, err := a.ahead(ctx, s, w, revision)
		if err != nil || len(now) == 0 {
			return false, err
		}
		before = now
		on, _ := w.use.watched(w.dir, before)
		return on == key, nil
	}
	if same, err := still(); !same {
		return err
	}

	// From here on an event, the end of the session or a look of our own ends the wait, whichever comes first.
	look := time.NewTimer(firstLook/2 + rand.N(firstLook))
	defer look.Stop()
	// Nil, and never ready, until the first look: a lock that changes hands quickly does not pay for it.
	var own clientv3.WatchChan
	for {
		select {
		case resp, open := <-deleted:
			if !open || resp.Err() != nil {
				return a.calm(ctx, resp.Err())
			}
			if err := a.d.hear(resp.Header, nil); err != nil {
				return err
			}
			if deletes(resp.Events, before, w.key) {
				return nil
			}
		case resp, open := <-own:
			if !open || resp.Err() != nil || len(resp.Events) > 0 {
				return a.calm(ctx, resp.Err())
			}
		case <-look.C:
			if same, err := still(); !same {
				return err
			}
			if own == nil {
				if own, err = a.follow(ctx, cancel, w.key, ""); err != nil {
					return err
				}
			}
			look.Reset(lookEvery - lookEvery/4 + rand.N(lookEvery/2))
		case <-s.Over():
			return errSessionLost
		case <-s.outgrown:
			return errOutgrown
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// deletes reports whether own, or the key of an entry, is among the deleted keys. A watch on a range of permits shows
// other deletions too, which let nobody in.
func deletes(deleted []*clientv3.Event, entries []entry, own string) bool {
	return slices.ContainsFunc(deleted, func(e *clientv3.Event) bool {
		key := string(e.Kv.Key)
		return key == own || indexOfKey(entries, key) >= 0
	})
}

// follow watches for the deletion of a key, or of keys up to end, and returns when the server has confirmed the
// watch. Until then an event may be missed, so the caller reads the queue after that. cancel ends a try that takes
// longer than callTime, together with the caller's other watches; the library would wait for as long as no server
// answers.
func (a *attempt) follow(ctx context.Context, cancel context.CancelFunc, key, end string) (clientv3.WatchChan, error) {
	late := time.AfterFunc(callTime, cancel)
	defer late.Stop()
	ch := a.d.client.Watch(ctx, key, clientv3.WithRange(end), clientv3.WithFilterPut(), clientv3.WithCreatedNotify())
	select {
	case resp, open := <-ch:
		if !open || resp.Err() != nil {
			return nil, cmp.Or(ctx.Err(), errWatch) // the end of ctx closes the channel too
		}
		return ch, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// calm pauses after a watch that failed, so that a broken server is not asked in a tight loop. Then the caller reads
// the queue, unless the wait has ended.
func (a *attempt) calm(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	return kit.Sleep(ctx, kit.RetryPause(a.ttl))
}

// remove deletes the keys of wishes that nobody waits for any more, in the background, each until it is known to be
// gone or the same request, repeated, holds it. Close ends that: it revokes the lease, and the keys go with it. A
// place counts its removals, so that its key goes to no other request meanwhile. The caller cannot delete: its
// context has ended, and a waiter must return within 50 ms of that.
func (d *Driver) remove(wishes []wish) {
	for _, w := range wishes {
		if d.enter() != nil {
			return
		}
		d.mu.Lock()
		d.places[w.key].removals++
		d.mu.Unlock()
		go d.removeOne(w.key, w.r.RequestID)
	}
}

// removeOne first waits for the last transaction on the key, since only then the leftover key is known. It deletes
// the key only as it was read, and only if no hold and no call of this driver has it.
//
// A missing key ends it. To count that as a failure was a bug: such removals asked the cluster about ten times a
// second until Close (TestRemovalOfNothingEnds).
func (d *Driver) removeOne(key, requestID string) {
	defer d.gate.Leave()
	defer func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.places[key].removals--
		d.tidyLocked(key)
	}()
	if d.landed(d.ctx, key) != nil {
		return
	}
	for {
		ctx, cancel := d.bounded(d.ctx)
		err := d.deleteAsRead(ctx, key, func(kv *mvccpb.KeyValue) bool {
			e, ours := d.entryOf(kv)
			return ours && e.value.Request == requestID && !d.known(key)
		})
		cancel()
		switch {
		case errors.Is(err, backend.ErrNotHeld):
			// A call of the same request may take the place over, or leave it to us.
			if !d.calling(key) {
				return
			}
		case err == nil || !transient(err):
			return
		}
		if kit.Sleep(d.ctx, kit.RetryPause(callTime)) != nil {
			return
		}
	}
}
