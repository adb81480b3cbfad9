package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// Renew is backend.Driver's: one exchange for all grants, or with sessions for all on one session.
func (d *Driver) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	out := make([]backend.Renewal, len(grants))
	if len(grants) == 0 {
		return out
	}
	err := d.begin(ctx)
	if err == nil {
		defer d.gate.Leave()
		if err = d.lost(); err == nil {
			err = d.probe(ctx)
		}
	}
	if err == nil {
		d.renew(ctx, slices.Clone(grants), out) // an exchange may outlive the call
		err = d.lost()
	}
	for i, g := range grants {
		if err != nil {
			out[i] = backend.Renewal{Err: err}
		}
		if errors.Is(out[i].Err, backend.ErrHistoryLost) {
			out[i].Err = errors.Join(d.notHeld(g, backend.Loss{Reason: backend.ReasonHistoryLost}), out[i].Err)
		}
		out[i].Err = d.callError(verbRenew, g.Name, out[i].Err)
	}
	return out
}

// renewing are the grants of one Renew that are on one session, or all for a service without. Each is known by its
// number.
type renewing struct {
	s       *session
	members []int
	holds   []Holding
}

// renew finds the session of each grant, and renews the grants of each session together, all sessions concurrently.
func (d *Driver) renew(ctx context.Context, grants []backend.Grant, out []backend.Renewal) {
	groups := map[*session]*renewing{}
	for i, g := range grants {
		var s *session
		holding := Holding{Grant: g}
		if d.sessions != nil {
			var err error
			if g.Incarnation == "" {
				err = d.notHeld(g, backend.Loss{})
			} else {
				s, _, err = d.sessions.sessionOf(ctx, g)
			}
			if err != nil {
				out[i].Err = d.readError(ctx, err)
				continue
			}
			h, known := d.sessions.hold(g)
			holding.Known = known && h.s == s && h.incarnation == g.Incarnation
		}
		if groups[s] == nil {
			groups[s] = &renewing{s: s}
		} else if s != nil {
			s.Leave(1) // one user for the group
		}
		groups[s].members = append(groups[s].members, i)
		groups[s].holds = append(groups[s].holds, holding)
	}
	var work sync.WaitGroup
	for _, r := range groups {
		work.Go(func() { d.renewOn(ctx, r, out) })
	}
	work.Wait()
}

func (d *Driver) renewOn(ctx context.Context, r *renewing, out []backend.Renewal) {
	fail := func(err error) {
		for _, i := range r.members {
			out[i].Err = err
		}
	}
	s := r.s
	if s != nil {
		defer func() { s.Leave(1) }()
		shortest := s.ttl
		for _, h := range r.holds {
			shortest = min(shortest, h.TTL)
		}
		age := shortest / 6
		if d.sessions.proofs != nil {
			age = shortest // Extend proves it
		}
		err := d.sessions.prove(ctx, s, age)
		if errors.Is(err, ErrOutgrown) {
			next, joined := d.sessions.join(ctx, s.asked)
			if joined != nil {
				fail(joined)
				return
			}
			s.Leave(1)
			s = next
			for i := range r.holds {
				r.holds[i].Known = false
			}
			err = d.sessions.prove(ctx, s, shortest/3)
		}
		switch {
		case errors.Is(err, ErrNoSession):
			for n, i := range r.members {
				out[i].Err = d.gone(r.holds[n], backend.Loss{Reason: backend.ReasonSessionExpired})
			}
			return
		case err != nil:
			fail(err)
			return
		}
	}
	var proved backend.Instant // before the holds are checked
	if s != nil {
		proved = s.provedAt()
	}
	adopted, end := d.sessions.adopt(r.holds)
	defer end()
	outcomes, sent, _, err := hedged(ctx, d, func(ctx context.Context, _ bool) ([]Outcome, error) {
		return d.service.Extend(ctx, s.binding(), r.holds)
	})
	if class, final := d.classOf(err); err != nil && class == NoSession && !final && s != nil {
		d.sessions.missing(ctx, s)
		for n, i := range r.members {
			if out[i].Err = fmt.Errorf("%w: %w", backend.ErrUnavailable, err); r.holds[n].Known {
				out[i].Err = d.gone(r.holds[n], backend.Loss{Reason: backend.ReasonSessionExpired})
			}
		}
		return
	}
	if err != nil {
		if class, _ := d.classOf(err); class == Unknown && !sent.IsZero() && s != nil {
			d.sessions.stay(s)
		}
		fail(err)
		return
	}
	if d.sessions != nil && d.sessions.proofs != nil {
		proved = sent
	}
	for n, i := range r.members {
		h, ttl := r.holds[n], r.holds[n].TTL
		if outcomes[n].Err != nil {
			out[i].Err = outcomes[n].Err
			continue
		}
		if outcomes[n].Gone {
			out[i].Err = d.gone(h, outcomes[n].Loss)
			continue
		}
		if s != nil {
			sent, ttl = proved, min(ttl, s.ttl) // on a longer session, too, so that the hold can move later
			if !h.Known && !d.sessions.keepAdopted(adopted[n], h.Grant, s) {
				out[i].Err = ErrNoSession
				continue
			}
			d.sessions.promise(h.Grant, sent.Add(ttl))
		}
		out[i] = backend.Renewal{SentAt: sent, TTL: ttl}
		if last := outcomes[n].Last; !last.IsZero() && last.Sub(sent) < ttl {
			if out[i].TTL, out[i].Last = last.Sub(sent), true; out[i].TTL <= 0 {
				out[i] = backend.Renewal{Err: d.notHeld(h.Grant, backend.Loss{Reason: backend.ReasonMaxHold})}
			}
		}
	}
}

// gone is the error for a hold that the service no longer has. Without a reason, now or in a push, the service has lost
// it with its session, unless that session is known to live.
func (d *Driver) gone(h Holding, loss backend.Loss) error {
	if loss.Reason == "" && d.sessions != nil {
		loss.Reason = backend.ReasonSessionExpired
		if known, ok := d.sessions.hold(h.Grant); ok && known.incarnation != "" {
			if loss.Reason = backend.ReasonEvicted; known.loss.Reason != "" {
				loss = known.loss
			}
		}
	}
	return d.notHeld(h.Grant, loss)
}

// Release is backend.Driver's.
func (d *Driver) Release(ctx context.Context, g backend.Grant) error {
	return d.callError(verbRelease, g.Name, d.release(ctx, g))
}

func (d *Driver) release(ctx context.Context, g backend.Grant) error {
	if err := d.begin(ctx); err != nil {
		return err
	}
	defer d.gate.Leave()
	left, err := d.leave(ctx, g, "", false)
	switch {
	case err != nil:
		if _, final := d.classOf(err); d.lost() != nil && final {
			return err
		}
		if ctx.Err() == nil && g.Incarnation != "" {
			d.sessions.drop(g, true) // the hold ends with its session, which the others leave
		}
		return err
	case !left.Was && g.Incarnation == "":
		err = d.notHeld(g, left.Loss)
	case !left.Was:
		err = d.gone(Holding{Grant: g}, left.Loss)
	default:
		d.forget(g)
	}
	d.sessions.drop(g, false) // also a hold in doubt: the Leave forbids late Enters
	return err
}

// leave is one Leave, after all Enters of the request. If those of an attempt have crossed, it ends whatever the request
// has, unless another attempt was answered with a hold: then entries of this one beside place stay until they expire.
func (d *Driver) leave(ctx context.Context, g backend.Grant, place string, crossed bool) (Left, error) {
	if err := d.awaitLanding(ctx, g.RequestID); err != nil {
		return Left{}, err
	}
	if crossed && !d.granted(g.RequestID) {
		place = ""
	}
	l := Leaving{Grant: g, Place: place}
	if h, known := d.sessions.hold(g); known && !h.s.Ended() {
		l.Session, l.Late, l.Known = h.s.binding(), h.late, g.Incarnation != "" && g.Incarnation == h.incarnation
	}
	var left Left
	var late bool
	var err error
	if d.enters && !d.hedges() { // without memory for a closure
		var c *stepContext
		if c, err = d.stepContext(ctx); err == nil {
			left, err = d.service.Leave(c, l)
			err = c.outcome(err, func() {})
		}
	} else {
		left, late, err = d.leaveHedged(ctx, l)
	}
	if late && err == nil && l.Known && left.Loss.Reason == "" {
		left.Was = true // the other sending may have ended it
	}
	d.settleIn(g.Name, left.Settle)
	if left.Rest != nil {
		d.finish(g, left.Rest)
	}
	return left, err
}

// finish waits for the rest of a Leave in the background, until all servers have carried it out, the hold has expired
// there, or the driver closes.
func (d *Driver) finish(g backend.Grant, rest func(context.Context) bool) {
	if d.resting.Add(1) > maxResting {
		d.resting.Add(-1)
		return
	}
	wait := func(closing context.Context) {
		defer d.resting.Add(-1)
		for began := d.clock.Now(); ; {
			own, cancel := context.WithTimeout(closing, exchangeTimeout)
			done := rest(own)
			cancel()
			switch {
			case done || d.clock.Now().Sub(began) > g.TTL:
				return
			case kit.Sleep(closing, d.retryPause(g.TTL)) != nil:
				rest(closing)
				return
			}
		}
	}
	if !d.gate.Go(func(work context.Context) {
		closing, free := d.gate.Bind(work)
		defer free()
		wait(closing)
	}) {
		wait(d.gate.Closing())
	}
}

func (d *Driver) leaveHedged(ctx context.Context, l Leaving) (left Left, late bool, err error) {
	left, _, late, err = hedgedUntil(ctx, d, d.enters, func(ctx context.Context, _ bool) (Left, error) {
		return d.service.Leave(ctx, l)
	}, func() {})
	return left, late, err
}

// Expire ends a hold as its time would, unless others were answered with it: backend.Expirer, for drivers over a
// service that Expires. It is not a method, since a Driver over other services is not a backend.Expirer.
func Expire(ctx context.Context, d *Driver, g backend.Grant) error {
	return d.callError(verbExpire, g.Name, d.expire(ctx, g))
}

func (d *Driver) expire(ctx context.Context, g backend.Grant) error {
	with, ok := d.service.(Expires)
	if !ok {
		return backend.ErrUnsupported
	}
	if err := d.begin(ctx); err != nil {
		return err
	}
	defer d.gate.Leave()
	left, _, err := exchange(ctx, d, func(ctx context.Context) (Left, error) {
		return with.Expire(ctx, Leaving{Grant: g})
	})
	switch {
	case err != nil:
		return err
	case !left.Was:
		return d.notHeld(g, left.Loss)
	}
	d.forget(g)
	d.settleIn(g.Name, left.Settle)
	return nil
}

// notHeld returns the answer for a hold that is gone.
func (d *Driver) notHeld(g backend.Grant, loss backend.Loss) error {
	d.forget(g)
	return loss.NotHeld(g.Name)
}
