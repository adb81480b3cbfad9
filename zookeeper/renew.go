// This file prolongs holds. A hold lives as long as its session, so that a renewal is a proof of the session
// (keepalive.go) and of the node's existence. The latter is free while the connection lasts: the watch of a node that
// was deleted before the leader answered the proof has fired before that answer, on the same stream. A reconnect
// breaks that order, so every hold is read once over the new connection.

package zookeeper

import (
	"context"
	"errors"
	"sync"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
)

// Renew prolongs grants to their full TTL, and returns a result for each of them, in order. All grants of one TTL
// cost one request, which proves their session, or no request if a proof is recent. After a reconnect each of them is
// read once, all concurrently.
//
// A grant with a longer TTL than its session's moves to the session of that TTL, by one transaction for each; token
// and place in the queue stay. A grant with a shorter TTL stays on its session: a renewal never shortens a hold.
//
// A missing hold is a *backend.NotHeldError with the reason and is never recreated. Any other failure, such as a
// lost connection, is ErrUnavailable or ErrUnknown: the hold may still exist, and its validity does not change. Renew
// returns with the end of ctx. It may be called for the same grants concurrently, and beside Release.
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
// The order matters. The proof comes first; then each hold is asked whether its watch has fired. The server notifies
// this client of a deletion before the proof on the same connection, before the proof's answer, and the library
// handles messages in their order. So a hold that exists after the proof existed when the leader answered. A hold that
// was last seen over an earlier connection lacks that certainty and is read.
func (d *Driver) renewOn(
	ctx context.Context, s *session, grants []backend.Grant, holds []*hold, members []int, out []backend.Renewal,
) {
	// Without a proof the state of all of them is unknown.
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
		// seen is the connection of the watch; gone is true if it has fired.
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

// proveRenewal proves the session since the first unproved renewal. The core repeats a renewal without a timely
// answer; asking since the first renewal lets the repetition use the answer to the first question. Asking since the
// present call would discard it each time, and an ensemble that answers more slowly than callers wait would never
// renew a hold.
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

// renewElsewhere renews a grant without a hold here (it was granted to another process, or moved away) or with a
// longer TTL than its session has: its node moves to the session of the requested TTL.
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
		// No hold owns the session's user.
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

// takeOver puts the hold at path on session s and returns it; the returned hold has the user of s that the caller
// counted. h is this driver's hold there, or nil.
//
// While the node moves, h is marked as releasing: its deletion is part of the move's transaction, and its watch must
// not report a loss. If the transaction fails, the mark is removed. A Release of the same grant may come in between;
// addHold then refuses the new hold, which no call would drop, and both sessions stay free of it
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
		// Another call may have found it there.
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

// renewGone renews a hold whose node has left its session.
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
// session, or notifies the holder of the loss. It repeats its question until there is an answer.
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

// found returns the hold on the target session of a move without an answer. The error is zk.ErrNoNode if its node is
// not there, and errSessionLost if that session and its nodes have ended.
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
