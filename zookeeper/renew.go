package zookeeper

import (
	"context"
	"errors"
	"sync"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
)

// Renew prolongs grants, and answers for each of them, in order. One request proves the session of all grants with one
// TTL. Every node that was deleted before the leader answered it has been told by its watch before that answer, so that
// nothing is read for the single holds. After a reconnect each of them is read once, all side by side.
//
// A grant with a longer TTL than its session's moves to the session of that TTL, with one transaction of its own. One
// with a shorter TTL stays where it is: a renewal never shortens a hold.
func (d *Driver) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	out := make([]backend.Renewal, len(grants))
	if err := d.begin(ctx); err != nil {
		for i, g := range grants {
			out[i].Err = d.callError("renew", g.Name, err)
		}
		return out
	}
	defer d.gate.Leave()
	ctx, done := d.gate.Bind(ctx)
	defer done()

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

// renewOn renews the grants whose numbers are in members, all on one session.
func (d *Driver) renewOn(
	ctx context.Context, s *session, grants []backend.Grant, holds []*hold, members []int, out []backend.Renewal,
) {
	if err := s.proveRenewal(ctx); err != nil {
		for _, i := range members {
			if out[i].Err = err; errors.Is(err, errSessionLost) {
				out[i].Err = &backend.NotHeldError{Name: grants[i].Name, Reason: s.reason()}
			}
		}
		return
	}
	sentAt := s.provedAt()
	var work sync.WaitGroup
	for _, i := range members {
		h := holds[i]
		d.mu.Lock()
		seen, gone := h.link, h.isGone()
		d.mu.Unlock()
		out[i] = backend.Renewal{SentAt: sentAt, TTL: grants[i].TTL}
		switch {
		case gone:
			work.Go(func() { out[i] = d.renewGone(ctx, grants[i], h) })
		case seen != s.linkNumber():
			work.Go(func() {
				if err := d.seeAgain(ctx, h); errors.Is(err, zk.ErrNoNode) {
					out[i] = d.renewGone(ctx, grants[i], h)
				} else if err != nil {
					out[i] = backend.Renewal{Err: err}
				}
			})
		}
	}
	work.Wait()
}

// proveRenewal proves the session since the first renewal that has not been proved: one that comes again, because the
// answer took longer than it waited, finds that answer.
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

// renewGone is the answer for a hold whose node was deleted.
func (d *Driver) renewGone(ctx context.Context, g backend.Grant, h *hold) backend.Renewal {
	reason := d.whyGone(ctx, h.session, h.path, h.token)
	d.dropHold(h)
	return backend.Renewal{Err: &backend.NotHeldError{Name: g.Name, Reason: reason}}
}

// seeAgain reads a node: after a reconnect the library sets its watches again, but says neither when nor whether. A node
// that has no watch yet gets it. The error is zk.ErrNoNode if it is not our session's any more.
func (d *Driver) seeAgain(ctx context.Context, h *hold) error {
	d.mu.Lock()
	watched := h.link != 0
	d.mu.Unlock()
	if !watched {
		return d.watchHold(ctx, h)
	}
	link := h.session.linkNumber()
	node, err := h.session.get(ctx, h.path)
	if err != nil {
		return err
	}
	if node.stat.EphemeralOwner != h.session.id {
		return zk.ErrNoNode
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	h.link = link
	return nil
}

// renewElsewhere renews a grant that has no hold here, or that has a longer TTL now: it moves to the session of that
// TTL.
func (d *Driver) renewElsewhere(
	ctx context.Context, g backend.Grant, h *hold, path string, token int64,
) backend.Renewal {
	if err := d.Describe().ValidateTTL(g.TTL); err != nil {
		return backend.Renewal{Err: err}
	}
	s, err := d.sessionFor(ctx, slot{ttl: g.TTL})
	if err != nil {
		return backend.Renewal{Err: err}
	}
	moved, err := d.takeOver(ctx, s, h, path, token)
	if err != nil {
		if moved == nil {
			s.Leave(1)
		}
		if errors.Is(err, zk.ErrNoNode) || errors.Is(err, errGone) {
			err = &backend.NotHeldError{Name: g.Name, Reason: d.whyGone(ctx, s, path, token)}
			d.dropHold(h)
		}
		return backend.Renewal{Err: err}
	}
	return backend.Renewal{SentAt: s.provedAt(), TTL: s.ttl}
}

// takeOver puts a hold on s. The returned hold has the session's user.
func (d *Driver) takeOver(ctx context.Context, s *session, h *hold, path string, token int64) (*hold, error) {
	if err := s.prove(ctx, d.clock.Now()); err != nil {
		return nil, err
	}
	node, err := s.get(ctx, path)
	switch {
	case err != nil:
		return nil, err
	case node.Token != token || node.stat.EphemeralOwner == 0:
		return nil, zk.ErrNoNode
	}
	var lost func(backend.Reason)
	releasing := false
	if h != nil {
		d.mu.Lock()
		lost, releasing = h.lost, h.releasing
		h.releasing = true // its node goes with our knowledge
		d.mu.Unlock()
	}
	if node.stat.EphemeralOwner != s.id {
		if err := d.move(ctx, s, path, node.value); err != nil {
			if h != nil {
				d.mu.Lock()
				h.releasing = releasing
				d.mu.Unlock()
			}
			return nil, err
		}
	}
	moved := d.addHold(s, path, token, h)
	if moved == nil {
		return nil, errGone
	}
	d.grant(moved, lost)
	d.watchLater(moved) // if the watch fails now
	err = d.watchHold(ctx, moved)
	if errors.Is(err, zk.ErrNoNode) {
		d.dropHold(moved)
	}
	return moved, err
}
