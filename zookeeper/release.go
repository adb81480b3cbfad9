// This file releases holds. A hold of this client is deleted on its own session by one request. A hold of another
// session, and a request with an unknown outcome, are looked up first, on a session with a server that has been
// brought up to the leader's state: a deletion by path alone could meet the next hold at an equal path, or miss a
// creation in progress.

package zookeeper

import (
	"context"
	"errors"
	"slices"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// Release removes the node of a hold if it is still the granted one: token and request id must match, so that a late
// or repeated release never ends a later hold. With a grant that Request.Grant made it removes the hold of that
// request, or its place in the queue.
//
// It returns when a majority has the deletion. A missing node is backend.ErrNotHeld, with the reason if a
// ForceRelease left one; a deletion that was sent and not answered before ctx ended is ErrUnknown, and may be
// repeated. Release is safe for concurrent use and beside Renew of the same grant.
func (d *Driver) Release(ctx context.Context, g backend.Grant) error {
	return d.callError("release", g.Name, notHeld(g, d.release(ctx, g)))
}

// release is Release without the name of the call. From here on it has to remove the leftovers of an earlier acquire of
// the same request (adopt).
func (d *Driver) release(ctx context.Context, g backend.Grant) error {
	if g.Kind > backend.KindPermits || g.Hierarchical {
		return backend.ErrUnsupported
	}
	if err := backend.ValidateName(g.Name); err != nil {
		return err
	}
	ctx, end, err := d.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	left, err := d.adopt(ctx, g.Name, g.RequestID)
	if err != nil {
		return err
	}
	path, token, ok := d.pathOf(g)
	switch {
	case g.Incarnation == "" && g.Token == 0:
		// The grant was made by Request.Grant: the caller knows only the request.
		return d.removeRequest(ctx, g.Name, g.RequestID, left, false)
	case !ok:
		return &backend.NotHeldError{Name: g.Name}
	}
	// Only a hold of this driver is deleted without a read.
	if h := d.holdAt(path, token); h != nil {
		return d.releaseHold(ctx, g, h)
	}
	return d.releaseAt(ctx, g, path, token)
}

// releaseHold deletes a node that certainly belongs to this driver, because its watch has not fired. If the server
// refuses that, the node is disowned. If ctx ends before the answer, the hold stays marked as releasing, and a
// repeated call finds it.
func (d *Driver) releaseHold(ctx context.Context, g backend.Grant, h *hold) error {
	d.mu.Lock()
	h.releasing, h.released = true, true
	moving := h.moving
	d.mu.Unlock()
	// The node may be on either session.
	if moving != nil {
		err := d.releaseAt(ctx, g, h.path, h.token)
		if err == nil || isOneOf(err, zk.ErrNoNode, backend.ErrNotHeld) {
			d.dropHold(h)
		}
		return err
	}
	// The watch has fired: the node ended before this release.
	if h.isGone() {
		return d.bury(ctx, h, g.Name)
	}
	err := h.session.remove(ctx, h.path, anyVersion)
	switch {
	case err == nil:
		d.dropHold(h)
	case errors.Is(err, errSessionLost):
		return &backend.NotHeldError{Name: g.Name, Reason: h.session.reason()}
	case errors.Is(err, zk.ErrNoNode):
		return d.bury(ctx, h, g.Name)
	}
	// The node may exist, and the call may be repeated.
	if err != nil && ctx.Err() == nil {
		d.disown(h.session, h.path, h.version, h)
	}
	return err
}

// disown drops a node that the server refused to delete, and its hold, if it has one. The session takes no new holds
// and ends with its last other hold, since an ephemeral node cannot change its owner and stay the same; until then it
// deletes the node as soon as the server allows that.
func (d *Driver) disown(s *session, path string, version int32, h *hold) {
	d.sessions.Abandon(s)
	d.mu.Lock()
	s.disowned = append(s.disowned, disowned{path, version})
	first := len(s.disowned) == 1
	d.mu.Unlock()
	d.dropHold(h)
	if first {
		d.background(s.removeDisowned)
	}
}

// disowned is a node that the server refused to delete, and its version while it belongs to the session.
type disowned struct {
	path    string
	version int32
}

// forbidden reports whether the server refused to delete a node that may exist.
func forbidden(err error) bool {
	return err != nil && !transient(err) && !isOneOf(err, zk.ErrNoNode, backend.ErrHistoryLost, backend.ErrClosed)
}

// removeDisowned deletes the disowned nodes, each at least four times per TTL, until the list is empty or the session,
// and the nodes with it, has ended. A node that a repeated acquire has found is no longer disowned. A session has one
// such goroutine; Close also ends it.
func (s *session) removeDisowned() {
	d := s.d
	for kit.Sleep(d.ctx, s.ttl/4) == nil && !s.Ended() {
		d.mu.Lock()
		nodes := slices.Clone(s.disowned)
		d.mu.Unlock()
		removed := map[disowned]bool{}
		for _, node := range nodes {
			if !d.leaving(node.path, nil) {
				removed[node] = true
				continue
			}
			ctx, cancel := context.WithTimeout(d.ctx, s.ttl/4)
			err := s.remove(ctx, node.path, node.version)
			cancel()
			d.left(node.path)
			removed[node] = err == nil || errors.Is(err, zk.ErrNoNode)
		}
		d.mu.Lock()
		s.disowned = slices.DeleteFunc(s.disowned, func(node disowned) bool { return removed[node] })
		left := len(s.disowned)
		d.mu.Unlock()
		if left == 0 {
			return
		}
	}
}

// bury drops a hold with a deleted node, and returns the answer for its holder: not held, with the reason if it can be
// found.
func (d *Driver) bury(ctx context.Context, h *hold, name string) error {
	loss := d.whyGone(ctx, h.session, h.path, h.token)
	d.dropHold(h)
	return loss.NotHeld(name)
}

// releaseAt deletes the node of a hold that another session has, or had: another client of the same request, or an
// earlier process. It reads the node before it deletes it, since the path may belong to a hold with another token by
// now. Between the two requests only the same request could put another node there.
func (d *Driver) releaseAt(ctx context.Context, g backend.Grant, path string, token int64) error {
	s, err := d.proven(ctx, nil)
	if err != nil {
		return err
	}
	defer s.Leave(1)
	node, err := s.get(ctx, path, false)
	switch {
	case errors.Is(err, zk.ErrNoNode), err == nil && (node.Token != token || node.stat.EphemeralOwner == 0):
		loss := d.whyGone(ctx, s, path, token)
		return loss.NotHeld(g.Name)
	case err != nil:
		return err
	}
	return s.remove(ctx, path, anyVersion)
}

// removeRequest deletes all nodes of a request, and returns zk.ErrNoNode if it finds no node. If ours is set, it
// deletes only nodes on the session of the abandoned attempt: a node on another session belongs to a repeat of the
// request. It looks on the session of the abandoned attempt, if that is known: that session's earlier requests have
// been done, or never will be, so that a node cannot appear after the look. On any other session it could: a slow
// server may execute a pending creation after the look, and close the name.
//
// A hold of this driver among the nodes is dropped with its node, without a loss: its holder asked for the release.
func (d *Driver) removeRequest(ctx context.Context, name, requestID string, left *leftover, ours bool) error {
	s, err := d.proven(ctx, left)
	if err != nil {
		return err
	}
	defer s.Leave(1)
	queue, err := s.children(ctx, d.dir(name))
	if err != nil {
		return err
	}
	// none is nil once a node was deleted.
	none := zk.ErrNoNode
	for _, e := range ofRequest(queue, requestID) {
		version := int32(anyVersion)
		if ours {
			stat, err := s.stat(ctx, e.path)
			switch {
			case err != nil:
				return err
			case stat == nil || stat.EphemeralOwner != s.id:
				continue
			}
			version = stat.Version
		}
		h := d.releasingAt(e.path)
		switch err := s.remove(ctx, e.path, version); {
		case err == nil:
			none = nil
		case !errors.Is(err, zk.ErrNoNode):
			if h != nil && forbidden(err) {
				d.disown(h.session, e.path, h.version, h)
			}
			return err
		}
		d.dropHold(h)
	}
	return none
}

// sessionOf returns the session of a leftover, or any session if that one has ended or is unknown, and counts one more
// user of it.
func (d *Driver) sessionOf(ctx context.Context, left *leftover) (*session, error) {
	if left != nil {
		if _, there := d.sessions.Find(left.slot); there {
			return d.sessionFor(ctx, left.slot, false)
		}
	}
	return d.anySession(ctx)
}

// notHeld turns the absence of a grant's node, or of the whole history, into the answer for its holder: the hold has
// ended, which is a definite answer and not a failed call.
func notHeld(g backend.Grant, err error) error {
	switch {
	case errors.Is(err, zk.ErrNoNode):
		return &backend.NotHeldError{Name: g.Name}
	case errors.Is(err, backend.ErrHistoryLost):
		return &backend.NotHeldError{Name: g.Name, Reason: backend.ReasonHistoryLost}
	}
	return err
}
