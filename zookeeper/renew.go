// This file prolongs holds. A hold lives as long as its session, so a renewal proves the session (keepalive.go) and
// the existence of the node. The latter is free for a watched node while the connection lasts: if the node was deleted
// before the leader answered the proof, its watch has fired before that answer, on the same stream. A reconnect breaks
// that order, so every hold is read once over the new connection, and so is a hold without a watch.

package zookeeper

import (
	"context"
	"errors"
	"sync"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
)

// Renew prolongs grants to their full TTL, and returns a result for each of them, in order. All grants of one session
// cost one request, which proves the session, or no request if a question has been answered since an earlier renewal
// that failed. After a reconnect each of them is read once, all concurrently, and so is a grant whose node is not
// watched yet.
//
// A grant with a longer TTL than its session's moves to a session of that TTL, by one transaction for each; token and
// place in the queue stay. A grant with a shorter TTL stays on its session: a renewal never shortens a hold.
//
// A missing hold is a *backend.NotHeldError with the reason, and is never recreated. After any other error, such as
// ErrUnavailable or ErrUnknown, the hold may still exist, and its validity does not change. Renew returns when ctx
// ends. It may be called for the same grants concurrently, and beside Release.
func (d *Driver) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	out := make([]backend.Renewal, len(grants))
	ctx, end, err := d.begin(ctx)
	if err != nil {
		for i, g := range grants {
			out[i].Err = d.callError("renew", g.Name, err)
		}
		return out
	}
	defer end()

	// Each goroutine writes its own elements of out, and out is read when all have ended.
	bySession := map[*session][]int{}
	holds := make([]*hold, len(grants))
	var work sync.WaitGroup
	for i, g := range grants {
		path, token, ok := d.pathOf(g)
		if !ok {
			out[i].Err = &backend.NotHeldError{Name: g.Name}
			continue
		}
		h := d.holdAt(path, token)
		// Moves are rare and cost a transaction each, so they run concurrently with the renewals.
		if h == nil || g.TTL > h.session.ttl {
			work.Go(func() { out[i] = d.renewElsewhere(ctx, g, h, path, token) })
			continue
		}
		holds[i] = h
		bySession[h.session] = append(bySession[h.session], i)
	}
	for s, members := range bySession {
		work.Go(func() { d.renewOn(ctx, s, grants, holds, members, out) })
	}
	work.Wait()
	for i, g := range grants {
		out[i].Err = d.callError("renew", g.Name, notHeld(g, out[i].Err))
	}
	return out
}

// renewOn renews the grants at the indexes in members, all on session s. It writes out only at these indexes, so
// that the goroutines of one Renew need no mutex.
//
// The order matters: the proof comes first, and then renewOn checks whether the watch of each hold has fired. If a
// node was deleted before the proof, the server sends the notification before the proof's answer, on the same
// connection, and the library handles messages in order. So a hold whose watch has not fired by then existed when the
// leader answered. A hold without a watch, and a hold that was last seen over an earlier connection, lack that
// certainty and are read.
func (d *Driver) renewOn(
	ctx context.Context, s *session, grants []backend.Grant, holds []*hold, members []int, out []backend.Renewal,
) {
	// Without a proof the state of all holds is unknown, unless the session is lost.
	if err := s.proveRenewal(ctx); err != nil {
		for _, i := range members {
			switch {
			case !errors.Is(err, errSessionLost):
				out[i].Err = err
			case d.maybeMoved(holds[i]):
				out[i] = d.renewGone(ctx, holds[i], grants[i].Name)
			default:
				out[i].Err = &backend.NotHeldError{Name: grants[i].Name, Reason: s.reason()}
			}
		}
		return
	}
	// sentAt is read after the proof, and the holds after that: a watch event that came before the proof's answer has
	// been handled by now.
	sentAt := s.provedAt()
	var work sync.WaitGroup
	for _, i := range members {
		h := holds[i]
		d.mu.Lock()
		// seen is the connection over which the node was seen last, 0 without a watch; gone is true if its end was noticed.
		seen, gone := h.link, h.isGone()
		d.mu.Unlock()
		out[i] = backend.Renewal{SentAt: sentAt, TTL: grants[i].TTL}
		switch {
		case gone:
			work.Go(func() { out[i] = d.renewGone(ctx, h, grants[i].Name) })
		case seen != s.linkNumber():
			work.Go(func() {
				if err := d.see(ctx, h); errors.Is(err, zk.ErrNoNode) {
					out[i] = d.renewGone(ctx, h, grants[i].Name)
				} else if err != nil {
					out[i] = backend.Renewal{Err: err}
				}
			})
		}
	}
	work.Wait()
}

// proveRenewal proves the session since the first renewal that has not been proved. The core repeats a renewal without
// a timely answer, and the repetition can then use the answer to the first question. With a proof since the present
// call, each call would discard the earlier answers, and an ensemble that answers more slowly than callers wait would
// never renew a hold.
func (s *session) proveRenewal(ctx context.Context) error {
	s.mu.Lock()
	if s.renewing.IsZero() {
		s.renewing = s.d.clock.Now()
	}
	since := s.renewing
	s.mu.Unlock()
	err := s.prove(ctx, since)
	if err == nil {
		s.mu.Lock()
		s.renewing = 0
		s.mu.Unlock()
	}
	return err
}

// renewElsewhere renews a grant that has no hold here, because it was granted to another process or has moved away, or
// that has a longer TTL than its session. It moves the node to the session of the requested TTL.
func (d *Driver) renewElsewhere(
	ctx context.Context, g backend.Grant, h *hold, path string, token int64,
) backend.Renewal {
	if err := d.Describe().ValidateTTL(g.TTL); err != nil {
		return backend.Renewal{Err: err}
	}
	s, err := d.sessionFor(ctx, slot{ttl: g.TTL}, false)
	if err != nil {
		return backend.Renewal{Err: err}
	}
	moved, err := d.takeOver(ctx, s, h, path, token)
	if err != nil {
		// The session's user belongs to no hold.
		if moved == nil {
			s.Leave(1)
		}
		if errors.Is(err, zk.ErrNoNode) || errors.Is(err, errGone) {
			loss := d.whyGone(ctx, s, path, token)
			err = loss.NotHeld(g.Name)
			d.dropHold(h)
		}
		return backend.Renewal{Err: err}
	}
	return backend.Renewal{SentAt: s.provedAt(), TTL: s.ttl}
}

// takeOver moves the hold at path to session s and returns it, even with an error if it exists by then. The user of s
// that the caller counted then belongs to the hold. h is this driver's earlier hold at path, or nil.
//
// While the node moves, h is marked as releasing: its deletion is part of the move's transaction, and its watch must
// not report a loss. If the transaction fails, the mark is removed. A Release of the same grant may come in between.
// addHold then refuses the new hold, because no call would drop it, and neither session keeps a hold
// (TestReleaseWhileMoving).
func (d *Driver) takeOver(ctx context.Context, s *session, h *hold, path string, token int64) (*hold, error) {
	if err := s.prove(ctx, d.clock.Now()); err != nil {
		return nil, err
	}
	node, err := s.get(ctx, path, false)
	switch {
	case err != nil:
		return nil, err
	case node.Token != token || node.stat.EphemeralOwner == 0:
		return nil, zk.ErrNoNode
	}
	var lost func(backend.Loss)
	releasing := false
	// The holder's callback moves to the new hold.
	if h != nil {
		d.mu.Lock()
		lost, releasing = h.lost, h.releasing
		h.releasing = true // this driver removes its node
		d.mu.Unlock()
	}
	version := node.stat.Version
	if node.stat.EphemeralOwner != s.id {
		if version, err = d.move(ctx, s, path, node); err != nil {
			if h != nil {
				d.notMoved(h, s, releasing, err)
			}
			return nil, err
		}
	}
	// The new hold is entered before its watch is set, so that an event finds it.
	moved := d.addHold(s, path, token, version, h)
	if moved == nil {
		// Another call may have entered it.
		if moved = d.holdAt(path, token); moved == nil || moved.session != s {
			return nil, errGone
		}
		s.Leave(1)
		return moved, nil
	}
	d.grant(moved, lost)
	err = d.see(ctx, moved)
	if errors.Is(err, zk.ErrNoNode) {
		d.dropHold(moved)
	}
	return moved, err
}

// notMoved notes that a move of h to a session has failed. Without an answer, the node may be on either session, and
// its end on the first session is no loss until follow has checked the second one.
func (d *Driver) notMoved(h *hold, to *session, releasing bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	h.releasing = releasing || h.released
	// Even a request that was not sent may be sent later, see do.
	if unanswered(err) || errors.Is(err, errNoConnection) {
		h.moving = to
	}
	if h.isGone() && d.holds[h.path] == h {
		d.goneFromLocked(h) // its watch has fired meanwhile
	}
}

// maybeMoved reports whether a move without an answer may have taken a hold to another session.
func (d *Driver) maybeMoved(h *hold) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return h.moving != nil
}

// renewGone renews a hold whose node has left its session: the hold may be on the session to which a move without an
// answer took it. Otherwise it is lost.
func (d *Driver) renewGone(ctx context.Context, h *hold, name string) backend.Renewal {
	next, err := d.found(ctx, h)
	switch {
	case err == nil:
		return backend.Renewal{SentAt: next.session.provedAt(), TTL: next.session.ttl}
	case isOneOf(err, zk.ErrNoNode, errSessionLost):
		return backend.Renewal{Err: d.bury(ctx, h, name)}
	}
	return backend.Renewal{Err: err}
}

// follow finds a hold whose node has left its session during a move without an answer: it enters the hold on the other
// session, or notifies the holder of the loss. It retries until there is an answer, or the driver closes.
func (d *Driver) follow(h *hold) {
	err := d.repeat(d.ctx, func(ctx context.Context) error {
		_, err := d.found(ctx, h)
		return err
	})
	d.mu.Lock()
	defer d.mu.Unlock()
	if !isOneOf(err, zk.ErrNoNode, errSessionLost) || d.holds[h.path] != h {
		return
	}
	h.moving = nil
	d.goneFromLocked(h)
	if h.session.Ended() {
		delete(d.holds, h.path)
		d.leftDirLocked(parent(h.path))
	}
}

// found returns the hold on the target session of a move without an answer. The error is zk.ErrNoNode if there was no
// such move or the node is not there, errSessionLost if that session and its nodes have ended, and errGone if the hold
// was released meanwhile.
func (d *Driver) found(ctx context.Context, h *hold) (*hold, error) {
	d.mu.Lock()
	to, lost := h.moving, h.lost
	d.mu.Unlock()
	switch {
	case to == nil:
		return nil, zk.ErrNoNode
	case !to.Add(1):
		return nil, errSessionLost
	}
	err := to.prove(ctx, d.clock.Now())
	var node found
	if err == nil {
		node, err = to.get(ctx, h.path, false)
	}
	if err == nil && (node.Token != h.token || node.stat.EphemeralOwner != to.id) {
		err = zk.ErrNoNode
	}
	if err != nil {
		to.Leave(1)
		return nil, err
	}
	next := d.addHold(to, h.path, h.token, node.stat.Version, h)
	if next == nil {
		to.Leave(1)
		// Another call has entered it, or it was released.
		if next = d.holdAt(h.path, h.token); next == nil || next == h {
			return nil, errGone
		}
		return next, nil
	}
	d.grant(next, lost)
	return next, nil
}
