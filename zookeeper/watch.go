// This file sets watches: on the driver's own holds, to detect their loss, and on other entries, to detect that they
// have left. Their events arrive in session.event.
//
// A hold is watched late. A watch costs one more request in the acquire and a notification when the node is deleted,
// and most locks are released before they need either (docs/decisions, the ZooKeeper driver watches a hold late).
// Until then the next renewal notices a lost hold, since it reads every hold without a watch.

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

// watchTime bounds the request that watches one node, so that it does not delay the others. It is retried later.
const watchTime = 500 * time.Millisecond

// unwatched is a hold without a watch, and the instant at which it was entered here.
type unwatched struct {
	h  *hold
	at backend.Instant
}

// watchLaterLocked has a node watched if it still exists after watchAfter. One goroutine does that for all holds of
// the driver, while there are holds without a watch. The caller holds d.mu.
func (d *Driver) watchLaterLocked(h *hold) {
	d.unwatched = append(d.unwatched, unwatched{h, d.clock.Now()})
	d.keepDoingLocked(&d.watching, watchAfter/2, d.takeUnwatched)
}

// takeUnwatched takes the due holds from the list, and drops released or watched ones, for keepDoingLocked. The list
// is in the order of time, so it stops at the first one not yet due.
func (d *Driver) takeUnwatched() (work func()) {
	var due []*hold
	for len(d.unwatched) > 0 {
		first := d.unwatched[0]
		h := first.h
		// Drop a hold that was released, watched or lost meanwhile.
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

// watchNow watches a hold, or notifies its holder if the node has ended meanwhile. Without an answer the hold returns
// to the list.
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

// see checks over the present connection that the node of a hold exists on its session; the error is zk.ErrNoNode if
// not. The same request watches a node without a watch. After a reconnect the library sets its watches again, but does
// not report when or whether that succeeded, so the node is read. see also reads the token of a node that this driver
// found and did not make.
//
// The link number is taken before the request: if the connection breaks meanwhile, the read counts for the old one
// only. If another client has written into the node meanwhile, the watch may be used up, and the read does not count.
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
// goroutine runs, which running records. The caller holds d.mu, and take runs under it: an entry added after take has
// returned nil starts the goroutine again. So there is at most one, and an idle client has no such goroutine.
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

// listen registers wake for one change of a node. The caller sets the watch after that: otherwise a notification could
// come before the listener. It returns false if wake already listens to the node. wake must have a buffer of one.
func (s *session) listen(path string, wake notify.Signal) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slices.Contains(s.watched[path], wake) {
		return false
	}
	s.watched[path] = append(s.watched[path], wake)
	return true
}

// unlisten removes a listener from some nodes. A wake-up that has been sent stays in the channel. The watches on the
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

// wake wakes the listeners of a node, without waiting for them. A listener with a full channel has been woken and has
// not looked yet, so it will see this change too.
func (s *session) wake(path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, wake := range s.watched[path] {
		wake.Notify()
	}
	delete(s.watched, path)
}
