package binding

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
)

// Leave is engine.Service's. No entry is deleted blindly: a deletion has the version that was read or is known, which
// no other life of the node has. Creations that may be carried out late are forbidden before the entries are read.
//
// A deletion without an answer is repeated over the next connection, for as long as the caller waits: it is the same
// deletion, so that a missing node is then the answer to the first one.
func (e *service) Leave(ctx context.Context, l engine.Leaving) (engine.Left, error) {
	dir := e.dir(l.Name)
	e.useDir(dir)
	a := &leaving{Leaving: l, e: e, s: sessionOf(l.Session), dir: dir}
	left, err := a.leave(ctx)
	left.Settle = emptyAfter
	return left, err
}

// leaving is a Leave in progress.
type leaving struct {
	engine.Leaving
	e    *service
	s    *session // nil if the engine knows none
	dir  string
	sent bool // a deletion went unanswered
}

// leave repeats what a broken connection has interrupted.
func (l *leaving) leave(ctx context.Context) (engine.Left, error) {
	x, token, named := l.e.pathOf(l.Grant)
	if !named && l.Incarnation != "" {
		return engine.Left{}, nil
	}
	for n := 0; ; n++ {
		left, err := engine.Left{}, error(nil)
		if named {
			left, err = l.leaveHold(ctx, x, token)
		} else {
			left, err = l.leaveRequest(ctx)
		}
		switch {
		case isOneOf(err, engine.ErrNoSession, codeSessionExpired): // the entries have gone with it
			l.s = nil
		case isOneOf(err, errBroken, errChanged):
		case isOneOf(err, codeThrottled) && n < maxTries:
		default:
			return left, err
		}
		timer := time.NewTimer(kit.RetryPause(l.TTL) / 2)
		_, how := engine.Await(ctx, timer.C, nil)
		timer.Stop()
		if how != engine.Answered {
			if l.sent {
				err = &engine.Unanswered{}
			}
			return left, err
		}
	}
}

// maxTries bounds the tries of a release that a server throttles.
const maxTries = 3

// leaveHold ends a hold. One that this driver knows on the session is deleted without a look at it.
func (l *leaving) leaveHold(ctx context.Context, at string, token int64) (engine.Left, error) {
	s, err := l.e.or(ctx, l.s)
	if err != nil {
		return engine.Left{}, err
	}
	was := false
	if h := s.unplace(at, token); h != nil && l.Known {
		was, err = l.delete(ctx, s, at, h.version)
		if err != nil && !isOneOf(err, codeBadVersion) {
			s.replace(h, err)
			return engine.Left{}, err
		}
	}
	for !was {
		found, err := l.look(ctx, s, at)
		if err != nil {
			return engine.Left{}, err
		}
		if found == nil || found.Token != token {
			break
		}
		if was, err = l.delete(ctx, s, at, found.version); err != nil && !isOneOf(err, codeBadVersion) {
			return engine.Left{}, err
		}
	}
	if len(l.Late) > 0 && l.s == s {
		if _, err := l.leaveRequest(ctx); err != nil {
			return engine.Left{}, err
		}
	}
	if was || l.sent {
		return engine.Left{Was: true}, nil
	}
	return engine.Left{Loss: s.whyGone(ctx, l.dir)(token)}, nil
}

// delete deletes an entry, and reports whether it stood.
func (l *leaving) delete(ctx context.Context, s *session, at string, version int32) (was bool, err error) {
	replies, err := s.do(ctx, remove(at, version))
	if err == nil {
		err = replies[0].err
	} else if isOneOf(err, errBroken) {
		l.sent = true
	}
	return err == nil, ignore(err, codeNoNode)
}

// look reads an entry, with all that the leader knows.
func (l *leaving) look(ctx context.Context, s *session, at string) (*own, error) {
	replies, err := s.do(ctx, confirmed(), getData(at, false))
	if err != nil {
		return nil, err
	}
	n, err := replies[1].node()
	if err != nil {
		return nil, ignore(err, codeNoNode)
	}
	if x, ok := ownOf(n, at); ok {
		return &x, nil
	}
	return nil, nil
}

// leaveRequest deletes entries of a request: those of an abandoned attempt and of attempts that may arrive late, if the
// engine names one, and else all.
func (l *leaving) leaveRequest(ctx context.Context) (engine.Left, error) {
	s, err := l.e.or(ctx, l.s)
	if err != nil {
		return engine.Left{}, err
	}
	forbid := len(l.Late) > 0 && s == l.s
	was := false
	for range maxWrites {
		a, err := s.readQueue(ctx, l.dir, forbid)
		if err != nil {
			return engine.Left{}, err
		}
		forbid = false
		names, _, err := a.names()
		if err != nil {
			return engine.Left{Was: l.sent}, ignore(err, codeNoNode)
		}
		found, err := s.read(ctx, ofRequest(entriesOf(l.dir, names), l.RequestID))
		if err != nil {
			return engine.Left{}, err
		}
		found = slices.DeleteFunc(found, func(x own) bool { return !l.means(x) })
		if len(found) == 0 {
			return engine.Left{Was: was || l.sent}, nil
		}
		for _, x := range found {
			h := s.unplace(x.path, x.Token)
			ended, err := l.delete(ctx, s, x.path, x.version)
			if err != nil && !isOneOf(err, codeBadVersion) {
				s.replace(h, err)
				return engine.Left{}, err
			}
			was = was || ended
		}
	}
	return engine.Left{Was: was}, errChanged
}

// means reports whether an entry of the request is to end.
func (l *leaving) means(x own) bool {
	late := slices.Contains(l.Late, x.Attempt)
	if l.Place == "" {
		return late || l.Incarnation == ""
	}
	p := placeOf(l.Place)
	return late || p.path == x.path && p.token == x.Token && p.attempt == x.Attempt
}

// place notes an entry that was answered as a hold, for Follow and for Extend. link is the connection over which it was
// seen with a watch, or 0.
func (s *session) place(x own, link int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.placed[x.path]
	if h == nil || h.token != x.Token {
		h = &hold{path: x.path, requestID: x.requestID, token: x.Token, since: s.e.clock.Now()}
		s.placed[x.path] = h
	}
	h.version, h.gone = x.version, false
	if link > 0 {
		h.link = link
		return
	}
	if h.link == 0 {
		if s.fresh = append(s.fresh, h); len(s.fresh) == 1 {
			s.news.Notify()
		}
	}
}

// unplace takes a hold out, so that its end is no loss. It is nil if there is none with the token.
func (s *session) unplace(path string, token int64) *hold {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.placed[path]
	if h == nil || h.token != token {
		return nil
	}
	delete(s.placed, path)
	return h
}

// replace takes a hold in again that the server did not delete. A deletion without an answer stays out: it may be
// carried out, and is no loss.
func (s *session) replace(h *hold, err error) {
	var refused code
	if h == nil || !errors.As(err, &refused) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.placed[h.path] == nil {
		h.link = 0
		s.placed[h.path] = h
		s.fresh = append(s.fresh, h)
		s.news.Notify()
	}
}

// forced is the record of a ForceRelease in the name's node for its victims. The tokens name the victims: the next
// holder of the name, if it is evicted by other means, must not get the old reason.
type forced struct {
	Token  int64   `json:"token"`
	Others []int64 `json:"others,omitempty"` // tokens, where it ended several holds
	Reason string  `json:"reason"`
	// Who called ForceRelease.
	By        string `json:"by,omitempty"`
	Principal string `json:"principal,omitempty"`
}

// whyTimeout is the maximum time to ask for the reason of a loss, which is only advice.
const whyTimeout = 500 * time.Millisecond

// whyGone reads why holds of a name are gone. If the name's node is missing too, everything may have been deleted, so
// the root is compared first. Other holds were deleted by other means than this package.
func (s *session) whyGone(ctx context.Context, dir string) func(token int64) backend.Loss {
	replies, err := s.do(ctx, getData(dir, false), getData(s.e.root, false))
	var f forced
	if err == nil {
		_ = s.e.compareRoot(replies[1])
		if n, err := replies[0].node(); err != nil || json.Unmarshal(n.data, &f) != nil {
			f = forced{} // or somebody else's data
		}
	}
	return func(token int64) backend.Loss {
		switch {
		case s.e.history.err() != nil:
			return backend.Loss{Reason: backend.ReasonHistoryLost}
		case err != nil:
			return backend.Loss{}
		case f.Token == token || slices.Contains(f.Others, token):
			return backend.Loss{Reason: backend.ReasonForceReleased, Text: f.Reason, By: f.By, Principal: f.Principal}
		}
		return backend.Loss{Reason: backend.ReasonEvicted}
	}
}
