package zookeeper

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
)

// Leave is engine.Service's. No entry is deleted blindly: a deletion has the version that was read or is known, which
// the entry does not have after a move. On the session of the request, creations that were sent before are done or never
// will be.
func (e *service) Leave(ctx context.Context, l engine.Leaving) (left engine.Left, err error) {
	if e.history.err() != nil {
		return engine.Left{Loss: backend.Loss{Reason: backend.ReasonHistoryLost}}, nil
	}
	at, token, named := e.pathOf(l.Grant)
	if !named && l.Incarnation != "" {
		return engine.Left{}, nil
	}
	e.useDir(e.dir(l.Name))
	s, _ := l.Session.(*session)
	for range 2 { // the session may have ended, with its entries
		if s == nil || s.isOver() {
			if s, err = e.any(ctx); err != nil {
				return engine.Left{}, err
			}
		}
		if named {
			left, err = s.leaveHold(ctx, l, at, token)
		} else {
			left.Was, err = s.leaveRequest(ctx, l)
		}
		if !errors.Is(err, engine.ErrNoSession) {
			break
		}
	}
	left.Settle = emptyAfter
	return left, err
}

// leaveHold ends a hold. One that the engine knows on the session is deleted without a look at it.
func (s *session) leaveHold(ctx context.Context, l engine.Leaving, at string, token int64) (left engine.Left, err error) {
	h := s.unhold(at, token)
	if h != nil && l.Known {
		left.Was, err = s.delete(ctx, at, h.version)
	}
	for n := 0; !left.Was && (n == 0 && err == nil || errors.Is(err, codeBadVersion)) && n < maxWrites; n++ {
		var replies []reply
		if replies, err = s.askLeader(ctx, getData(at, false)); err != nil {
			break
		}
		x, ok, failed := ownOf(replies[0], at)
		switch {
		case failed != nil:
			err = failed
		case !ok || x.Token != token:
			left.Loss = s.whyGone(ctx, s.e.dir(l.Name))(token)
		default:
			left.Was, err = s.delete(ctx, at, x.version)
		}
	}
	if h != nil && err != nil {
		s.keep(h, err)
	}
	if err == nil && len(l.Late) > 0 {
		_, err = s.leaveRequest(ctx, l)
	}
	return left, err
}

// leaveRequest ends what a request has: after an attempt, its entries on this driver's sessions only, since another
// client may have asked with the same request id. The entry that the attempt knows is deleted without a look at it.
func (s *session) leaveRequest(ctx context.Context, l engine.Leaving) (was bool, err error) {
	abandoned := l.Place != ""
	if p := placeOf(l.Place); abandoned && len(l.Late) == 0 {
		own := s.e.ours(p.session)
		if own == nil {
			return false, nil
		}
		if was, err = own.delete(ctx, p.path, p.version); !errors.Is(err, codeBadVersion) {
			return was, err
		}
	}
	for range maxWrites {
		replies, err := s.askLeader(ctx, children(s.e.dir(l.Name)))
		if err != nil {
			return was, err
		}
		names, _, err := replies[0].names()
		if err != nil {
			return was, ignore(err, codeNoNode)
		}
		found, err := s.read(ctx, ofRequest(entriesOf(s.e.dir(l.Name), names), l.RequestID))
		if err != nil {
			return was, err
		}
		found = slices.DeleteFunc(found, func(x own) bool { return abandoned && s.e.ours(x.owner) == nil })
		if len(found) == 0 {
			return was, nil
		}
		for _, x := range found {
			on := s.e.ours(x.owner)
			var h *hold
			if on != nil {
				h = on.unhold(x.path, x.Token)
			}
			ended, err := s.delete(ctx, x.path, x.version)
			if err = ignore(err, codeBadVersion); err != nil {
				if h != nil {
					on.keep(h, err)
				}
				return was, err
			}
			was = was || ended
		}
	}
	return was, errChanged
}

// forced is the record of a ForceRelease in the name's node for its victims. The tokens identify the victims: the next
// holder of the name must not get the old reason if it is evicted by other means.
type forced struct {
	Token  int64   `json:"token"`
	Others []int64 `json:"others,omitempty"` // tokens, if it ended several holds
	Reason string  `json:"reason"`
	// The caller of ForceRelease.
	By        string `json:"by,omitempty"`
	Principal string `json:"principal,omitempty"`
}

// whyTimeout is the maximum time to ask for the reason of a loss, which is only advice.
const whyTimeout = 500 * time.Millisecond

// whyGone reads why holds of a name have ended. If the name's node is missing too, everything may have been deleted, so
// the root is compared. Other holds were deleted by other means than this package.
func (s *session) whyGone(ctx context.Context, dir string) func(token int64) backend.Loss {
	replies, err := s.do(ctx, getData(dir, false), getData(s.e.root, false))
	var f forced
	if err == nil {
		_ = s.e.compareRoot(replies[1])
		if n, err := replies[0].node(); err != nil || json.Unmarshal(n.data, &f) != nil {
			f = forced{} // or foreign data
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
