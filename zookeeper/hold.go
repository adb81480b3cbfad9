// This file keeps the driver's record of its nodes: holds, which are held or wait in a queue, and leftovers of calls
// that gave up.
//
// Driver.holds is the only register. It is keyed by the node's path, because a watch event carries the path. Each hold
// counts as one user of its session (kit.Session), taken over from the acquire that made it and returned by dropHold;
// so a session is retired only when it has no nodes of this driver. All fields of holds that change are protected by
// Driver.mu. There is no I/O under that mutex.
//
// addHold enters a hold when its node is known. The hold is either never granted (the attempt ends, and the node is
// deleted) or granted. A granted hold ends by a release (releasing is set, the node is deleted, dropHold), by a move
// to another session (another hold takes its place), by the loss of its node (goneLocked, then its holder is
// notified), or with its session (forget, then all holders are notified). An ungranted or releasing hold ends without
// a notification.

package zookeeper

import (
	"context"
	"errors"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/fencing"
)

// hold is a node of this driver in a queue: it is held, or it waits. The library's watch on it costs an entry in a
// map; its event arrives in Driver.changed, so that no hold needs a goroutine or a timer. The contract forbids both
// per lease, since a client may have 10,000 holds.
type hold struct {
	session *session
	path    string
	token   int64
	version int32         // of the node, while it belongs to the session and no other client writes into it
	nonce   fencing.Nonce // Grant.Nonce, of a node that an acquire made or found

	// gone is closed by goneLocked, under Driver.mu and at most once, when the node was deleted by any client, or moved
	// to another session. No call waits for it once dropHold or forget has removed the hold.
	gone chan struct{}

	// Protected by Driver.mu. granted: Acquire or a move has returned it. releasing: the driver itself removes the node,
	// so that its end is no loss. released: Release was called for it. lost is Request.Lost. moving is the session to
	// which a move without an answer may have taken the node.
	granted   bool
	releasing bool
	released  bool
	lost      func(backend.Loss)
	moving    *session
	link      int // the connection over which the node was seen last; 0: it has no watch
	written   int // the number of writes of other clients into the node, each of which uses up its watch
}

// addHold enters a node and takes over the session's user that the caller has counted. It replaces an earlier hold at
// the same path, whose session loses that user. If from is given, the node was moved from that hold; the result is nil
// if from has been released since: no call would drop the new hold. It is also nil for a node that an earlier attempt
// is removing.
func (d *Driver) addHold(s *session, path string, token int64, version int32, from *hold) *hold {
	h := &hold{session: s, path: path, token: token, version: version, gone: make(chan struct{})}
	d.mu.Lock()
	defer d.mu.Unlock()
	old := d.holds[path]
	// A release has dropped the hold that was being moved, or is about to.
	if from != nil && (old != from || from.released) || d.leavings[path] != nil {
		return nil
	}
	if old != nil {
		old.session.Leave(1)
	}
	d.holds[path] = h
	return h
}

// grant marks a waiting node as held, and enters lost, which is called at its end. It returns false if the node or the
// session has ended meanwhile, and the acquire must not report a grant. lost is entered only now: a loss during the
// wait would be reported to a caller without a hold. The watch that notices a deletion follows a little later.
func (d *Driver) grant(h *hold, lost func(backend.Loss)) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.holds[h.path] != h || h.isGone() {
		return false
	}
	h.granted, h.lost = true, lost
	d.watchLaterLocked(h)
	return true
}

// isGone reports whether the watch of a hold has reported the end of its node. It needs no mutex.
func (h *hold) isGone() bool {
	select {
	case <-h.gone:
		return true
	default:
		return false
	}
}

// holdAt returns the hold on a path if it has the token, or nil. The token matters because the same request can hold,
// lose and regain a hold on an equal path.
func (d *Driver) holdAt(path string, token int64) *hold {
	d.mu.Lock()
	defer d.mu.Unlock()
	if h := d.holds[path]; h != nil && h.token == token {
		return h
	}
	return nil
}

// leaving marks the node of an attempt that has ended, so that no other attempt of this client adopts it. It returns
// false if the node is no longer the attempt's: another attempt of the request has adopted it, or the session has
// ended. h is its hold, or nil if the attempt does not know its node. left follows when the node has been removed, or
// stays.
func (d *Driver) leaving(path string, h *hold) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.holds[path] != h || d.leavings[path] != nil {
		return false
	}
	if h != nil {
		h.releasing = true
	}
	d.leavings[path] = make(chan struct{})
	return true
}

// left ends the mark of leaving.
func (d *Driver) left(path string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	close(d.leavings[path])
	delete(d.leavings, path)
}

// leave removes the node of a refused attempt, unless another attempt of the request has adopted it.
func (d *Driver) leave(ctx context.Context, h *hold) error {
	if !d.leaving(h.path, h) {
		return nil
	}
	defer d.left(h.path)
	if err := h.session.remove(ctx, h.path, h.version); !errors.Is(err, zk.ErrNoNode) {
		return err
	}
	return nil
}

// awaitLeaving waits until none of the nodes of a request is being removed by an earlier attempt, and reports whether
// one was.
func (d *Driver) awaitLeaving(ctx context.Context, own []entry) (waited bool, err error) {
	for _, e := range own {
		d.mu.Lock()
		leaving := d.leavings[e.path]
		d.mu.Unlock()
		if leaving == nil {
			continue
		}
		waited = true
		select {
		case <-leaving:
		case <-ctx.Done():
			return waited, kit.Ended(ctx)
		}
	}
	return waited, nil
}

// releasingAt marks the hold on a path, if there is one, as released by the driver itself, and returns it.
func (d *Driver) releasingAt(path string) *hold {
	d.mu.Lock()
	defer d.mu.Unlock()
	h := d.holds[path]
	if h != nil {
		h.releasing = true
	}
	return h
}

// dropHold removes a hold from Driver.holds, if it is still registered at its path; its session loses a user.
// takeUnused removes the empty node of the name.
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

// forget removes the holds of an ended session from the driver, and returns the functions that notify their holders.
// The caller calls these without a mutex. Holds that wait, or that are being released, are not notified: their own
// calls get errSessionLost.
func (d *Driver) forget(s *session) []func(backend.Loss) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var tell []func(backend.Loss)
	for path, h := range d.holds {
		if h.session != s {
			continue
		}
		if h.granted && !h.releasing && h.moving != nil {
			d.goneLocked(h) // it may be on the other session
			continue
		}
		delete(d.holds, path)
		d.leftDirLocked(parent(path))
		// Waiters get the error from their own calls.
		if h.granted && !h.releasing && h.lost != nil {
			tell = append(tell, h.lost)
		}
	}
	return tell
}

// changed is called by the library's goroutine for every watched node that changed, in the order of the server's
// messages and before the answers that the server sent after them. Renew relies on that order. It must not
// block, so all I/O goes to the background.
func (d *Driver) changed(s *session, e zk.Event) {
	d.mu.Lock()
	defer d.mu.Unlock()
	h := d.holds[e.Path]
	if h == nil || h.session != s || h.isGone() || d.ctx.Err() != nil {
		return
	}
	if e.Type == zk.EventNodeDataChanged {
		// Another client has written into the node; the watch is used up.
		h.link = 0
		h.written++
		d.watchLaterLocked(h)
		return
	}
	d.goneLocked(h)
}

// goneLocked ends a hold after its node was deleted: it wakes the waiter on it, or lets the goroutine of its place
// notify the holder. The caller holds d.mu. A second call has no effect, since a watch and a read can both find the
// node missing.
func (d *Driver) goneLocked(h *hold) {
	if h.isGone() {
		return
	}
	close(h.gone)
	d.goneFromLocked(h)
}

// goneFromLocked notifies the holder of a hold whose node has left its session. If a move may have taken the node to
// another session, it looks there first. The caller holds d.mu.
func (d *Driver) goneFromLocked(h *hold) {
	if !h.granted || h.releasing || d.ctx.Err() != nil {
		return
	}
	if h.moving != nil {
		d.background(func() { d.follow(h) })
		return
	}
	// The first victim at a place starts the goroutine that notifies all of them.
	place := victims{h.session, parent(h.path)}
	others, telling := d.gone[place]
	d.gone[place] = append(others, h)
	if !telling {
		d.background(func() { d.tell(place) })
	}
}

// leftover is the remainder of an attempt without a known outcome: a request that still waits for its answer, or a
// node that such a request made. The caller repeats the request or releases it, which adopts the leftover (adopt). If
// it does neither, the driver removes it: a request that is delivered late must not close the name for longer than one
// TTL (clause A4), and ZooKeeper would keep the node for as long as the session lives.
type leftover struct {
	slot   slot // of the session on which it may be
	cancel context.CancelFunc
	done   chan struct{}
}

// leftoverKey is the key of Driver.leftovers.
func leftoverKey(name, requestID string) string { return name + "\x00" + requestID }

// adopt is called before any step for a request, and returns the request's leftover, or nil without a leftover. It stops
// the removal and waits for its end, or for the end of ctx. Without the wait, a removal that had found the old node
// could delete the node that the caller is about to make.
func (d *Driver) adopt(ctx context.Context, name, requestID string) (*leftover, error) {
	// l.done is closed by the removal, which cancel ends.
	key := leftoverKey(name, requestID)
	d.mu.Lock()
	l := d.leftovers[key]
	d.mu.Unlock()
	if l == nil {
		return nil, nil
	}
	l.cancel()
	select {
	case <-l.done:
		return l, nil
	case <-ctx.Done():
		return nil, kit.Ended(ctx)
	}
}

// abandon has a request's leftover removed after half a TTL, unless adopt comes first: the caller has half a TTL to
// repeat or release the request, and the removal has the other half. The goroutine ends with the removal, with adopt,
// or with Close, and closes l.done.
func (d *Driver) abandon(r backend.Request, at slot) {
	ctx, cancel := context.WithCancel(d.ctx)
	l := &leftover{slot: at, cancel: cancel, done: make(chan struct{})}
	key := leftoverKey(r.Name, r.RequestID)
	d.mu.Lock()
	// Closing ends the session anyway; and one removal for a request is enough.
	if d.ctx.Err() != nil || d.leftovers[key] != nil {
		d.mu.Unlock()
		cancel()
		return
	}
	d.leftovers[key] = l
	d.mu.Unlock()
	d.background(func() {
		defer func() {
			cancel()
			d.mu.Lock()
			delete(d.leftovers, key)
			d.mu.Unlock()
			close(l.done)
		}()
		if kit.Sleep(ctx, r.TTL/2) != nil {
			return
		}
		remove := func(ctx context.Context) error { return d.removeRequest(ctx, r.Name, r.RequestID, l, true) }
		for forbidden(d.repeat(ctx, remove)) {
			if kit.Sleep(ctx, r.TTL/4) != nil {
				return
			}
		}
	})
}

// background runs f in a goroutine that Close waits for. f must end soon after Driver.ctx does. No goroutine starts
// once the driver is closed: Close ends the sessions and their nodes.
func (d *Driver) background(f func()) {
	d.gate.Go(func(context.Context) { f() })
}

// repeat calls f, which makes requests, until f returns a definite result, ctx ends, or the session has ended and with
// it the node to remove. Each call has callTime. There is no bound on the tries: a leftover closes a name for as long
// as the session lives, which may be as long as the process.
func (d *Driver) repeat(ctx context.Context, f func(context.Context) error) error {
	for ctx.Err() == nil {
		bounded, cancel := context.WithTimeout(ctx, callTime)
		err := f(bounded)
		cancel()
		if err == nil || !transient(err) || errors.Is(err, errSessionLost) {
			return err
		}
		if err := kit.Sleep(ctx, kit.RetryPause(callTime)); err != nil {
			return err
		}
	}
	return ctx.Err()
}
