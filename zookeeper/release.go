package zookeeper

import (
	"context"
	"errors"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
)

// Release removes the node of a hold if it still is the one that was granted. With a grant that Request.Grant made it
// removes whatever that request has, its hold or its place in the queue. What is not there is backend.ErrNotHeld.
func (d *Driver) Release(ctx context.Context, g backend.Grant) error {
	return d.callError("release", g.Name, notHeld(g, d.release(ctx, g)))
}

func (d *Driver) release(ctx context.Context, g backend.Grant) error {
	if g.Kind > backend.KindPermits || g.Hierarchical {
		return backend.ErrUnsupported
	}
	if err := backend.ValidateName(g.Name); err != nil {
		return err
	}
	if err := d.begin(ctx); err != nil {
		return err
	}
	defer d.gate.Leave()
	ctx, done := d.gate.Bind(ctx)
	defer done()
	left, err := d.adopt(ctx, g.Name, g.RequestID)
	if err != nil {
		return err
	}
	path, token, ok := d.pathOf(g)
	switch {
	case g.Incarnation == "" && g.Token == 0:
		return d.removeRequest(ctx, g.Name, g.RequestID, left)
	case !ok:
		return &backend.NotHeldError{Name: g.Name}
	}
	if h := d.holdAt(path, token); h != nil {
		return d.releaseHold(ctx, g, h)
	}
	return d.releaseAt(ctx, g, path, token)
}

// releaseHold deletes a node that we know to be ours: its watch says so.
func (d *Driver) releaseHold(ctx context.Context, g backend.Grant, h *hold) error {
	d.mu.Lock()
	h.releasing = true
	gone := h.isGone()
	d.mu.Unlock()
	if gone {
		d.dropHold(h)
		return &backend.NotHeldError{Name: g.Name, Reason: d.whyGone(ctx, h.session, h.path, h.token)}
	}
	err := h.session.remove(ctx, h.path)
	switch {
	case err == nil:
		d.dropHold(h)
	case errors.Is(err, errSessionLost):
		return &backend.NotHeldError{Name: g.Name, Reason: h.session.reason()}
	case errors.Is(err, zk.ErrNoNode):
		d.dropHold(h)
		return &backend.NotHeldError{Name: g.Name, Reason: d.whyGone(ctx, h.session, h.path, h.token)}
	}
	return err // or the node may stand: the session goes on, and so does whoever calls again
}

// releaseAt deletes the node of a hold that another session has, or had.
func (d *Driver) releaseAt(ctx context.Context, g backend.Grant, path string, token int64) error {
	s, err := d.proven(ctx, nil)
	if err != nil {
		return err
	}
	defer s.Leave(1)
	node, err := s.get(ctx, path)
	switch {
	case errors.Is(err, zk.ErrNoNode), err == nil && (node.Token != token || node.stat.EphemeralOwner == 0):
		return &backend.NotHeldError{Name: g.Name, Reason: d.whyGone(ctx, s, path, token)}
	case err != nil:
		return err
	}
	return s.remove(ctx, path)
}

// removeRequest deletes whatever a request has left. ErrNoNode if there is nothing. It looks on the session on which an
// attempt was given up, if that is known: what was sent on it before then has been done, or never will be.
func (d *Driver) removeRequest(ctx context.Context, name, requestID string, left *orphan) error {
	s, err := d.proven(ctx, left)
	if err != nil {
		return err
	}
	defer s.Leave(1)
	queue, err := s.children(ctx, d.dir(name))
	if err != nil {
		return err
	}
	none := zk.ErrNoNode
	for _, e := range ofRequest(queue, requestID) {
		h := d.releasingAt(e.path)
		switch err := s.remove(ctx, e.path); {
		case err == nil:
			none = nil
		case !errors.Is(err, zk.ErrNoNode):
			return err
		}
		d.dropHold(h)
	}
	return none
}

// sessionOf returns the session on which an orphan may stand, or any session, and adds a user.
func (d *Driver) sessionOf(ctx context.Context, left *orphan) (*session, error) {
	if left != nil {
		if _, there := d.sessions.Find(left.slot); there {
			return d.sessionFor(ctx, left.slot)
		}
	}
	return d.anySession(ctx)
}

// notHeld turns the absence of a grant's node, or of all that the ensemble once knew, into the answer for its holder.
func notHeld(g backend.Grant, err error) error {
	switch {
	case errors.Is(err, zk.ErrNoNode):
		return &backend.NotHeldError{Name: g.Name}
	case errors.Is(err, backend.ErrHistoryLost):
		return &backend.NotHeldError{Name: g.Name, Reason: backend.ReasonHistoryLost}
	}
	return err
}
