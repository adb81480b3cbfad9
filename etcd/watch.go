package etcd

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"iter"
	"slices"
	"strconv"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
)

// Changes of a name, as events. etcd's watch reports created and deleted keys; a follower updates the queue with
// them, revision by revision, and compares the holders before and after. A place in the queue that comes or goes is
// no event, and neither is a hold that moves to another lease.

// Watch yields the changes of a name from now on (since 0), or after any revision that etcd has not compacted; a
// compacted one is backend.ErrCompacted. An ended hold is reported as released while its lease lives, as expired when
// the lease has gone too, and as force-released, with the reason, after a ForceRelease. Within one revision the ends
// come before the beginnings.
//
// The loop ends with an error: ctx's, backend.ErrClosed, ErrHistoryLost, or ErrUnavailable when the watch was cut off,
// after which the caller goes on from the last revision it has seen. The body of the loop may call the driver, and may
// close it. A slow body delays nobody else; the client library keeps the events meanwhile.
func (d *Driver) Watch(ctx context.Context, name string, since uint64) iter.Seq2[backend.Change, error] {
	return func(yield func(backend.Change, error) bool) {
		if err := d.watch(ctx, name, int64(since), yield); err != nil {
			yield(backend.Change{}, d.callError("watch", name, err))
		}
	}
}

// watch follows a name until ctx or the driver ends, or yield returns false. While yield runs the call is not counted
// in, since the body of the caller's loop may call Close, which waits for all counted calls.
func (d *Driver) watch(ctx context.Context, name string, since int64, yield func(backend.Change, error) bool) error {
	if err := backend.ValidateName(name); err != nil {
		return err
	}
	if err := d.begin(ctx); err != nil {
		return err
	}
	// The call is counted in while it waits, and out while the caller's loop runs. Between the two Close may have
	// happened: then it stays out, and the context has ended.
	working := true
	defer func() {
		if working {
			d.gate.Leave()
		}
	}()
	ctx, done := d.gate.Bind(ctx)
	defer done()
	// outside is yield while the call is not counted in.
	outside := func(e backend.Change) bool {
		working = false
		d.gate.Leave()
		more := yield(e, nil)
		working = d.enter() == nil
		return more
	}
	err := d.follow(ctx, &follower{d: d, name: name, yield: outside}, since)
	switch {
	case errors.Is(err, errLeft):
		return nil
	case errors.Is(context.Cause(ctx), backend.ErrClosed):
		return backend.ErrClosed
	case ctx.Err() != nil:
		return ctx.Err()
	case isOneOf(err, rpctypes.ErrCompacted):
		return backend.ErrCompacted
	}
	return err
}

// errLeft: the caller left its loop.
var errLeft = errors.New("the loop was left")

// follow reads the queue as it was at the revision since, and lets f apply the events of the watch from then on. It
// returns only with an error, errLeft included.
func (d *Driver) follow(ctx context.Context, f *follower, since int64) error {
	// The events apply to the queue as it was at that revision. Reading the present queue, and watching from then on,
	// would miss the changes in between.
	resp, err := d.get(ctx, d.dir(f.name), clientv3.WithPrefix(), clientv3.WithRev(since))
	// The caller has the revision from a cluster that was ahead of this one.
	if isOneOf(err, rpctypes.ErrFutureRev) {
		return &backend.HistoryError{What: "revision", Was: strconv.FormatInt(since, 10), Now: "less"}
	}
	if resp == nil {
		return err
	}
	f.queue = d.entriesOf(resp.Kvs)
	if since == 0 {
		since = resp.Header.Revision
	}
	// A copy: step changes the queue in place.
	f.holders = slices.Clone(holders(f.queue))
	// From the revision after it, with the values of before, so that no event is missed or repeated. A server that
	// loses its leader ends the watch instead of keeping it silent.
	watch := d.client.Watch(clientv3.WithRequireLeader(ctx), d.dir(f.name), clientv3.WithPrefix(),
		clientv3.WithRev(since+1), clientv3.WithPrevKV())
	for resp := range watch {
		if err := resp.Err(); err != nil {
			return err
		}
		if err := d.hear(resp.Header, nil); err != nil {
			return err
		}
		// One response may carry several revisions; each is one step of the queue.
		for _, events := range byRevision(resp.Events) {
			if err := f.step(ctx, events); err != nil {
				return err
			}
		}
	}
	return errWatch
}

// byRevision groups events, which come in order, by their revision. A group is one transaction.
func byRevision(events []*clientv3.Event) [][]*clientv3.Event {
	var steps [][]*clientv3.Event
	for _, e := range events {
		if n := len(steps); n > 0 && steps[n-1][0].Kv.ModRevision == e.Kv.ModRevision {
			steps[n-1] = append(steps[n-1], e)
		} else {
			steps = append(steps, []*clientv3.Event{e})
		}
	}
	return steps
}

// follower turns changes of the queue into changes of the lock. It belongs to the goroutine of the caller's loop.
type follower struct {
	d       *Driver
	name    string
	queue   []entry
	holders []entry // before the step under way
	yield   func(backend.Change) bool
}

// step applies the events of one revision to the queue, and yields the ended and the new holds. It does not guess: it
// asks etcd how a hold ended, and without an answer the watch ends.
func (f *follower) step(ctx context.Context, events []*clientv3.Event) error {
	revision := uint64(events[0].Kv.ModRevision)
	var forcedAway *forced
	for _, e := range events {
		key := string(e.Kv.Key)
		// A deleted key leaves the queue; a new key joins it at the end, since its create revision is the greatest; a
		// standing key that is written has moved to another lease. The trace of a ForceRelease is
		// written in the transaction that deletes its victims, so it is among the events of the same revision.
		switch at := indexOfKey(f.queue, key); {
		case e.Type == clientv3.EventTypeDelete && at >= 0:
			f.queue = slices.Delete(f.queue, at, at+1)
		case e.Type == clientv3.EventTypePut && key == f.d.forcedKey(f.name):
			forcedAway = new(forced)
			if json.Unmarshal(e.Kv.Value, forcedAway) != nil {
				forcedAway = nil
			}
		case e.Type == clientv3.EventTypePut && at < 0:
			if x, ok := f.d.entryOf(e.Kv); ok {
				f.queue = append(f.queue, x)
			}
		case e.Type == clientv3.EventTypePut:
			if x, ok := f.d.entryOf(e.Kv); ok {
				f.queue[at] = x // moved to another lease
			}
		}
	}
	// Only holds are reported, not places: a request that a deletion lets in holds from the same revision on.
	before, now := f.holders, slices.Clone(holders(f.queue))
	f.holders = now
	gone := map[clientv3.LeaseID]bool{}
	for _, x := range before {
		if standsIn(now, x) {
			continue
		}
		e := f.event(backend.ChangeReleased, x, revision)
		if forcedAway != nil && forcedAway.names(x.revision) {
			e.Type, e.Reason = backend.ChangeForceReleased, forcedAway.Reason
			e.By, e.Principal = forcedAway.By, forcedAway.Principal
		} else if expired, err := f.leaseGone(ctx, x.lease, gone); err != nil {
			// A guess would look like a fact.
			return err
		} else if expired {
			e.Type = backend.ChangeExpired
		}
		if err := f.tell(ctx, e); err != nil {
			return err
		}
	}
	for _, x := range now {
		if standsIn(before, x) {
			continue
		}
		if err := f.tell(ctx, f.event(backend.ChangeAcquired, x, revision)); err != nil {
			return err
		}
	}
	return nil
}

// standsIn reports whether the same hold is among entries, which are in the order of the queue.
func standsIn(entries []entry, x entry) bool {
	_, found := slices.BinarySearchFunc(entries, x, func(a, b entry) int { return cmp.Compare(a.revision, b.revision) })
	return found
}

// tell yields e, unless the watch has ended while the caller was busy with the last event.
func (f *follower) tell(ctx context.Context, e backend.Change) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if !f.yield(e) {
		return errLeft
	}
	return nil
}

// event is a change of a hold at a revision.
func (f *follower) event(typ backend.ChangeType, e entry, revision uint64) backend.Change {
	return backend.Change{
		Type: typ, Name: f.name, Owner: e.value.Owner, Token: tokenOf(e.use.Kind, e.revision), Revision: revision,
	}
}

// leaseGone reports whether a lease has ended. It asks for each lease once a step: known remembers. A lease that was
// revoked, by Close for example, counts as expired: etcd keeps no record that tells them apart.
func (f *follower) leaseGone(
	ctx context.Context, lease clientv3.LeaseID, known map[clientv3.LeaseID]bool,
) (bool, error) {
	if gone, asked := known[lease]; asked {
		return gone, nil
	}
	resp, err := f.d.client.TimeToLive(ctx, lease)
	if err != nil {
		return false, err
	}
	if err := f.d.hear(resp.ResponseHeader, nil); err != nil {
		return false, err
	}
	known[lease] = resp.TTL < 0
	return known[lease], nil
}
