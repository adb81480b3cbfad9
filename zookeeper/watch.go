// This file sets watches: on our own holds, to learn that they were taken away, and on others' entries, to learn that
// they have gone. What the watches report arrives in session.event.
//
// A hold is watched late. A watch costs one more request in the acquire and a notification when the node is deleted,
// and most locks are released before they would need either (docs/decisions, the ZooKeeper driver watches a hold
// late). Until then a hold that is taken away is noticed by its renewal at the latest, which reads every hold without
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
)

// watchAfter is how long a node is held before it is watched. A hold that is taken away sooner is told of it after
// this time instead of at once.
const watchAfter = 200 * time.Millisecond

// watchTime is how long the watch of one node may take before the others go on. It is tried again later.
const watchTime = 500 * time.Millisecond

// unwatched is a hold without a watch, and the instant at which it was entered here.
type unwatched struct {
	h  *hold
	at backend.Instant
}

// watchLater lets a node be watched if it still stands a little later. One goroutine does that for all holds of the
// driver, started here under d.mu, and it ends when there is none left. A timer for each hold was rejected, as every
// goroutine or timer per lease is.
func (d *Driver) watchLater(h *hold) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.unwatched = append(d.unwatched, unwatched{h, d.clock.Now()})
	if !d.watching && d.ctx.Err() == nil {
		d.watching = true
		d.background(d.watchAll)
	}
}

// watchAll watches what has stood for long enough, until no node is left that has no watch, or the driver closes.
// Whether it goes on is decided under d.mu together with the flag, so that a hold that is added meanwhile is never
// left without it.
func (d *Driver) watchAll() {
	for kit.Sleep(d.ctx, watchAfter/2) == nil {
		due := d.takeUnwatched()
		sideBySide(len(due), func(i int) { d.watchNow(due[i]) })
		d.mu.Lock()
		d.watching = len(d.unwatched) > 0
		// Read under the lock; watchLater starts another goroutine only when it is false.
		more := d.watching
		d.mu.Unlock()
		if !more {
			return
		}
	}
}

// takeUnwatched takes out the holds that are due, and those that were released or watched meanwhile. The list is in
// the order of time, so that it stops at the first one that is not due.
func (d *Driver) takeUnwatched() (due []*hold) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for len(d.unwatched) > 0 {
		first := d.unwatched[0]
		h := first.h
		// Released, watched or gone meanwhile: nothing to do, and nothing to wait for.
		wanted := d.holds[h.path] == h && h.link == 0 && !h.isGone() && !h.releasing
		if wanted && d.clock.Now().Sub(first.at) < watchAfter {
			return due
		}
		d.unwatched = d.unwatched[1:]
		if wanted {
			due = append(due, h)
		}
	}
	d.unwatched = nil // and its array
	return due
}

// watchNow watches a hold, or has its holder told that the node has gone meanwhile. Where there was no answer the hold
// goes back into the list.
func (d *Driver) watchNow(h *hold) {
	ctx, cancel := context.WithTimeout(d.ctx, watchTime)
	defer cancel()
	err := d.watchHold(ctx, h)
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case err == nil:
	case errors.Is(err, zk.ErrNoNode):
		if d.holds[h.path] == h {
			d.goneLocked(h)
		}
	case d.holds[h.path] == h && d.ctx.Err() == nil:
		d.unwatched = append(d.unwatched, unwatched{h, d.clock.Now()})
	}
}

// watchHold reads the node of a hold and watches it, in one request. The error is zk.ErrNoNode if it is not our
// session's any more. It also learns the token of a node that this driver found and did not make.
func (d *Driver) watchHold(ctx context.Context, h *hold) error {
	// Before the request: if the connection breaks meanwhile, the watch belongs to the old one.
	link := h.session.linkNumber()
	node, err := h.session.watch(ctx, h.path)
	if err == nil && node.stat.EphemeralOwner != h.session.id {
		err = zk.ErrNoNode
	}
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	h.link = link
	if h.token == 0 {
		h.token = node.Token
	}
	return nil
}

// listen lets a change of a node wake somebody, once. The caller sets the watch after that: the other way round, a
// notification could come before anybody listens. It is false if the same channel listens to the node already. wake
// must have a buffer of one.
func (s *session) listen(path string, wake chan<- struct{}) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slices.Contains(s.watched[path], wake) {
		return false
	}
	s.watched[path] = append(s.watched[path], wake)
	return true
}

// unlisten takes a listener back. A wake-up that has been sent stays in the channel.
func (s *session) unlisten(path string, wake chan<- struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := slices.DeleteFunc(s.watched[path], func(other chan<- struct{}) bool { return other == wake })
	if s.watched[path] = all; len(all) == 0 {
		delete(s.watched, path)
	}
}

// wake wakes those who listen to a node, without waiting for them. A listener whose channel is full has been woken and
// has not looked yet, so that it will see this change as well.
func (s *session) wake(path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, wake := range s.watched[path] {
		select {
		case wake <- struct{}{}:
		default:
		}
	}
	delete(s.watched, path)
}
