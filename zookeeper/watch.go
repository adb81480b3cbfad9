// This file sets watches: on our own holds, to learn that they were taken away, and on others' entries, to learn that
// they have gone. Their events arrive in session.event.
//
// A hold is watched late. A watch costs one more request in the acquire and a notification when the node is deleted,
// and most locks are released before they would need either (docs/decisions, the ZooKeeper driver watches a hold
// late). Until then the next renewal notices a hold that was taken away, since it reads every hold without
// a watch.

package zookeeper

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/notify"
)

// watchAfter is the time from a grant until its node is watched. An earlier loss is reported after
// this time.
const watchAfter = 200 * time.Millisecond

// watchTime bounds the watch of one node, before the others go on. It is retried later.
const watchTime = 500 * time.Millisecond

// unwatched is a hold without a watch, and the instant at which it was entered here.
type unwatched struct {
	h  *hold
	at backend.Instant
}

// watchLaterLocked lets a node be watched if it still stands a little later. One goroutine does that for all holds of
// the driver, while there is one without a watch. The caller holds d.mu. There is no timer or goroutine per hold.
func (d *Driver) watchLaterLocked(h *hold) {
	d.unwatched = append(d.unwatched, unwatched{h, d.clock.Now()})
	d.keepDoingLocked(&d.watching, watchAfter/2, d.takeUnwatched)
}

// takeUnwatched removes the due holds, and the ones released or watched meanwhile, for
// keepDoingLocked. The list is in the order of time, so it stops at the first one not yet due.
func (d *Driver) takeUnwatched() (work func()) {
	var due []*hold
	for len(d.unwatched) > 0 {
		first := d.unwatched[0]
		h := first.h
		// Released, watched or gone meanwhile: drop it.
		wanted := d.holds[h.path] == h && h.link == 0 && !h.isGone() && !h.releasing
		if wanted && d.clock.Now().Sub(first.at) < watchAfter {
			break
		}
		d.unwatched = d.unwatched[1:]
		if wanted {
			due = append(due, h)
		}
	}
	if len(d.unwatched) == 0 {
		d.unwatched = nil // and its array
		if len(due) == 0 {
			return nil
		}
	}
	return func() { sideBySide(len(due), func(i int) { d.watchNow(due[i]) }) }
}

// watchNow watches a hold, or has its holder told that the node has gone meanwhile. Where there was no answer the hold
// goes back into the list.
func (d *Driver) watchNow(h *hold) {
	ctx, cancel := context.WithTimeout(d.ctx, watchTime)
	defer cancel()
	err := d.see(ctx, h)
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case err == nil || d.holds[h.path] != h:
	case errors.Is(err, zk.ErrNoNode):
		d.goneLocked(h)
	default:
		d.watchLaterLocked(h)
	}
}

// see makes sure over the present connection that the node of a hold stands and is its session's; the error is
// zk.ErrNoNode if not. A node that has no watch gets it in the same request. After a reconnect the library sets its
// watches anew, but says neither when nor whether that worked, so the node is read. see also learns the token of
// a node that this driver found and did not make.
//
// The link number is taken before the request: if the connection breaks meanwhile, the read counts for the old one
// only. If somebody has written into the node meanwhile, the watch may be used up, and the read does not count.
func (d *Driver) see(ctx context.Context, h *hold) error {
	d.mu.Lock()
	watched, written := h.link != 0, h.written
	d.mu.Unlock()
	link := h.session.linkNumber()
	node, err := h.session.get(ctx, h.path, !watched)
	if err == nil && node.stat.EphemeralOwner != h.session.id {
		err = zk.ErrNoNode
	}
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if h.written == written {
		h.link = link
	}
	if h.token == 0 {
		h.token, h.nonce = node.Token, node.nonce()
	}
	return nil
}

// keepDoingLocked starts a goroutine that calls take repeatedly, each time after a pause, and does the work that take
// returns, until take returns nil, because no entry is left, or the driver closes. It has no effect while that
// goroutine runs, as running says. The caller holds d.mu, and take runs under it: an entry added after take has
// returned nil starts the goroutine anew. So there is at most one, and an idle client has no such goroutine.
func (d *Driver) keepDoingLocked(running *bool, pause time.Duration, take func() (work func())) {
	if *running || d.ctx.Err() != nil {
		return
	}
	*running = true
	d.background(func() {
		for kit.Sleep(d.ctx, pause) == nil {
			d.mu.Lock()
			work := take()
			*running = work != nil
			d.mu.Unlock()
			if work == nil {
				return
			}
			work()
		}
	})
}

// listen lets a change of a node wake somebody, once. The caller sets the watch after that: the other way round, a
// notification could come before anybody listens. It is false if the same channel listens to the node already. wake
// must have a buffer of one.
func (s *session) listen(path string, wake notify.Signal) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slices.Contains(s.watched[path], wake) {
		return false
	}
	s.watched[path] = append(s.watched[path], wake)
	return true
}

// unlisten takes a listener back from some nodes. A wake-up that has been sent stays in the channel. The watches at the
// server stay until they fire; their events then find no listener.
func (s *session) unlisten(paths []string, wake notify.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, path := range paths {
		all := slices.DeleteFunc(s.watched[path], func(other notify.Signal) bool { return other == wake })
		if s.watched[path] = all; len(all) == 0 {
			delete(s.watched, path)
		}
	}
}

// wake wakes the listeners of a node, without waiting for them. A listener with a full channel has been woken and
// has not looked yet, so that it will see this change as well.
func (s *session) wake(path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, wake := range s.watched[path] {
		wake.Notify()
	}
	delete(s.watched, path)
}
