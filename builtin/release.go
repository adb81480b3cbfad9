package builtin

// Release and Expire.

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// Release releases a hold if it still is the granted one, and the service grants to the first waiter in the same step.
// With a grant that Request.Grant made, it removes the hold of that request or its place in the queue. Without a hold
// it returns backend.ErrNotHeld.
//
// After another error the driver repeats the release in the background, so that the hold does not live as long as its
// session. Release may be repeated, too: it returns ErrNotHeld if an earlier release was executed. A minimum hold
// continues without its holder, and the name stays closed until it ends.
// ErrNotHeld has a reason if the service or the driver knows one (*backend.NotHeldError).
func (d *Driver) Release(ctx context.Context, g backend.Grant) error {
	return d.callError("release", g.Name, d.release(ctx, &g))
}

// release is Release without the error's frame. If the session that sends the release is not the hold's and ends
// meanwhile, another session sends it. If it is the hold's, the hold has ended with it.
func (d *Driver) release(ctx context.Context, g *backend.Grant) error {
	if err := d.begin(ctx); err != nil {
		return err
	}
	defer d.gate.Leave()
	if err := cmp.Or(backend.ValidateName(g.Name), backend.ValidateRequestID(g.RequestID)); err != nil {
		return err
	}
	k, token := key{g.Name, g.RequestID}, incarnation(g)
	for {
		s, h, err := d.sessionOf(ctx, k, token, g.TTL)
		if err != nil {
			return err
		}
		err = s.carryOut(ctx, releaseOf(k, token, 0), k, h)
		s.Leave(1)
		if !errors.Is(err, errSessionEnded) {
			return err
		}
		if h != nil {
			d.mu.Lock()
			defer d.mu.Unlock()
			return s.lostHold()
		}
		// It was not the hold's session.
		if err := d.pause(ctx, time.Millisecond); err != nil {
			return err
		}
	}
}

// sessionOf returns the session that sends a release, and counts the caller among its users: the session of the hold,
// if this driver has the hold, or else any session. The server compares request id and token, not the session; but a
// request without a session would have no sequence, and could be executed twice.
//
// A returned hold is busy: carryOut undoes that. For a hold of another process, sessionOf prefers the session of the
// grant's TTL, and opens a session only if none is open.
func (d *Driver) sessionOf(ctx context.Context, k key, token uint64, ttl time.Duration) (*session, *hold, error) {
	d.mu.Lock()
	if h := d.holds[k]; h != nil && (token == 0 || token == h.token) {
		h.use()
		d.mu.Unlock()
		return h.session, h, nil
	}
	if _, found := d.sessions.Find(ttl); !found {
		for _, other := range d.byID {
			ttl = other.ttl
		}
	}
	d.mu.Unlock()
	s, err := d.sessionFor(ctx, ttl)
	return s, nil, err
}

// use counts a caller among the callers that end or move the hold, which carryOut undoes, and among the users of its
// session, which the caller undoes. The caller holds d.mu.
func (h *hold) use() {
	h.busy++
	h.session.Add(1)
}

// carryOut sends a release, and drops h, which may be nil.
//
//	done                     the hold is dropped, and its request's leftover is forgotten
//	ErrNotHeld               the same: it has ended
//	the session ended        all of its holds are lost
//	other errors             the hold is a leftover, which the session releases
//
// The sequence is settled in every case: no caller waits for an answer any more.
func (s *session) carryOut(ctx context.Context, release *lockpb.Request, k key, h *hold) error {
	d := s.d
	d.mu.Lock()
	c := call{request: release, session: s, sequence: s.number()}
	d.mu.Unlock()
	_, err := d.ask(ctx, c)
	d.mu.Lock()
	defer d.mu.Unlock()
	s.settled(c.sequence)
	if h != nil {
		h.busy--
	}
	switch {
	case err == nil, errors.Is(err, backend.ErrNotHeld):
		s.overtake(k)
		if h != nil {
			d.drop(k, h)
		}
	case h != nil && d.holds[k] == h && !s.Ended() && !d.gate.Closed():
		d.drop(k, h)
		s.giveBack(k, h.token, 0)
	}
	return err
}

// Expire ends an expired hold on behalf of the core, before its session ends: the session may live on for
// other holds. It ends only a hold that this driver knows: a hold that has moved to another client is that client's.
//
// The core decides when a hold has expired; the driver has no timer for it. Without Expire the name would stay closed
// until the session ends, which all holds with that TTL share. Errors are those of Release.
func (d *Driver) Expire(ctx context.Context, g backend.Grant) error {
	return d.callError("expire", g.Name, d.expire(ctx, &g))
}

// expire is Expire without the error's frame. The release names the session (own), so a hold that another process has
// taken over meanwhile stays.
func (d *Driver) expire(ctx context.Context, g *backend.Grant) error {
	if err := d.begin(ctx); err != nil {
		return err
	}
	defer d.gate.Leave()
	d.mu.Lock()
	h := d.holdOf(g)
	if h != nil {
		h.use()
	}
	d.mu.Unlock()
	if h == nil { // it has moved, or is over
		return &backend.NotHeldError{Name: g.Name}
	}
	defer h.session.Leave(1)
	k := key{g.Name, g.RequestID}
	return h.session.carryOut(ctx, ownReleaseOf(k, h.token, 0), k, h)
}

// releaseOf returns the request to end the hold with the token or, if that is zero, any hold or wait of the request.
// target, unless it is zero, is the sequence of an abandoned acquire: if the acquire arrives later than the release,
// the server does not execute it.
func releaseOf(k key, token, target uint64) *lockpb.Request {
	return &lockpb.Request{Call: &lockpb.Request_Release{Release: &lockpb.Release{
		Name: k.name, RequestId: k.requestID, Token: token, Target: target,
	}}}
}

// ownReleaseOf is releaseOf for holds of the sending session only: it leaves holds that another client has taken over
// by the same request id.
func ownReleaseOf(k key, token, target uint64) *lockpb.Request {
	r := releaseOf(k, token, target)
	r.GetRelease().Own = true
	return r
}
