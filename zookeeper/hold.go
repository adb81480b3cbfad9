package zookeeper

import (
	"context"
	"errors"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// hold is a node of ours that stands in a queue: it is held, or it waits. The library's watch on it costs an entry in a
// map; what it reports arrives in Driver.changed, so that no hold needs a goroutine.
type hold struct {
	session *session
	path    string
	token   int64
	gone    chan struct{} // closed when the node was deleted, or moved to another session

	// Protected by Driver.mu.
	granted   bool
	releasing bool
	lost      func(backend.Reason)
	link      int // the connection over which the node was seen last; 0: it has no watch yet
}

// addHold notes a node. It takes over the session's user that the caller has. It is nil if the node was moved from
// another hold that has been released since: nobody would ever drop the new one.
func (d *Driver) addHold(s *session, path string, token int64, from *hold) *hold {
	h := &hold{session: s, path: path, token: token, gone: make(chan struct{})}
	d.mu.Lock()
	defer d.mu.Unlock()
	old := d.holds[path]
	if from != nil && old != from {
		return nil
	}
	if old != nil {
		old.session.Leave(1)
	}
	d.holds[path] = h
	return h
}

// grant makes a waiting node a held one. It is false if the node or the session has gone meanwhile.
func (d *Driver) grant(h *hold, lost func(backend.Reason)) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.holds[h.path] != h || h.isGone() {
		return false
	}
	h.granted, h.lost = true, lost
	return true
}

// isGone reports whether the watch of a hold has said that its node is gone.
func (h *hold) isGone() bool {
	select {
	case <-h.gone:
		return true
	default:
		return false
	}
}

// holdAt returns the hold on a path if it has the token, or nil.
func (d *Driver) holdAt(path string, token int64) *hold {
	d.mu.Lock()
	defer d.mu.Unlock()
	if h := d.holds[path]; h != nil && h.token == token {
		return h
	}
	return nil
}

// releasingAt marks the hold on a path, if there is one, as one that its holder gives up, and returns it.
func (d *Driver) releasingAt(path string) *hold {
	d.mu.Lock()
	defer d.mu.Unlock()
	h := d.holds[path]
	if h != nil {
		h.releasing = true
	}
	return h
}

// dropHold forgets a hold, whose session it then no longer needs.
func (d *Driver) dropHold(h *hold) {
	if h == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.holds[h.path] == h {
		delete(d.holds, h.path)
		h.session.Leave(1)
		d.leftDirLocked(parent(h.path))
	}
}

// forget takes the holds of a session out of the driver, and returns the functions that tell the holders.
func (d *Driver) forget(s *session) []func(backend.Reason) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var tell []func(backend.Reason)
	for path, h := range d.holds {
		if h.session != s {
			continue
		}
		delete(d.holds, path)
		d.leftDirLocked(parent(path))
		if h.granted && !h.releasing && h.lost != nil {
			tell = append(tell, h.lost)
		}
	}
	return tell
}

// changed is called for every watched node that changed. It must not block.
func (d *Driver) changed(s *session, e zk.Event) {
	d.mu.Lock()
	defer d.mu.Unlock()
	h := d.holds[e.Path]
	if h == nil || h.session != s || h.isGone() || d.ctx.Err() != nil {
		return
	}
	if e.Type == zk.EventNodeDataChanged { // by somebody else; the watch is used up
		d.background(func() { d.watchAgain(h) })
		return
	}
	d.goneLocked(h)
}

// goneLocked ends a hold whose node was deleted. d.mu is held.
func (d *Driver) goneLocked(h *hold) {
	if h.isGone() {
		return
	}
	close(h.gone)
	if !h.granted || h.releasing || d.ctx.Err() != nil {
		return
	}
	place := victims{h.session, parent(h.path)}
	others, telling := d.gone[place]
	d.gone[place] = append(others, h)
	if !telling {
		d.background(func() { d.tell(place) })
	}
}

func (d *Driver) watchAgain(h *hold) {
	ctx, cancel := context.WithTimeout(d.ctx, attemptTime)
	defer cancel()
	if _, err := h.session.watch(ctx, h.path); errors.Is(err, zk.ErrNoNode) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.goneLocked(h)
	}
}

// orphan is what an acquire without a known outcome may have left: a request that still waits for its answer, or a
// node. The caller repeats the request or releases it. If it does neither, the driver removes it.
type orphan struct {
	slot   slot // of the session on which it may stand
	cancel context.CancelFunc
	done   chan struct{}
}

func orphanKey(name, requestID string) string { return name + "\x00" + requestID }

// adopt is called before anything is done for a request: its leftovers are no orphans any more. It returns them, or
// nil.
func (d *Driver) adopt(ctx context.Context, name, requestID string) (*orphan, error) {
	key := orphanKey(name, requestID)
	d.mu.Lock()
	o := d.orphans[key]
	d.mu.Unlock()
	if o == nil {
		return nil, nil
	}
	o.cancel()
	select {
	case <-o.done:
		return o, nil
	case <-ctx.Done():
		return nil, kit.Ended(ctx)
	}
}

// abandon removes what a request left, after half a TTL.
func (d *Driver) abandon(r backend.Request, at slot) {
	ctx, cancel := context.WithCancel(d.ctx)
	o := &orphan{slot: at, cancel: cancel, done: make(chan struct{})}
	key := orphanKey(r.Name, r.RequestID)
	d.mu.Lock()
	if d.ctx.Err() != nil || d.orphans[key] != nil {
		d.mu.Unlock()
		cancel()
		return
	}
	d.orphans[key] = o
	d.mu.Unlock()
	d.background(func() {
		defer func() {
			cancel()
			d.mu.Lock()
			delete(d.orphans, key)
			d.mu.Unlock()
			close(o.done)
		}()
		if kit.Sleep(ctx, r.TTL/2) != nil {
			return
		}
		d.repeat(ctx, func(ctx context.Context) error { return d.removeRequest(ctx, r.Name, r.RequestID, o) })
	})
}

// background runs f unless the driver is closed: Close ends the sessions, and the nodes go with them.
func (d *Driver) background(f func()) {
	d.gate.Go(func(context.Context) { f() })
}

// repeat calls f until it says something definite.
func (d *Driver) repeat(ctx context.Context, f func(context.Context) error) {
	for ctx.Err() == nil {
		bounded, cancel := context.WithTimeout(ctx, attemptTime)
		err := f(bounded)
		cancel()
		if err == nil || !transient(err) || errors.Is(err, errSessionLost) {
			return
		}
		if kit.Sleep(ctx, kit.RetryPause(attemptTime)) != nil {
			return
		}
	}
}
