package zookeeper

import (
	"context"
	"encoding/json"
	"errors"
	"path"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
)

// Leave is engine.Service's. No entry is deleted blindly: a deletion has the version that was read or is known, which
// the entry does not have after a move. On the session of the request, creations that were sent before are done or
// never will be.
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
		h := s.unhold(at, token)
		left.Was, err = s.leave(ctx, l, h, func(x own) bool {
			ours := e.ours(x.owner) != nil
			if named {
				return x.path == at && x.Token == token || len(l.Late) > 0 && ours
			}
			return l.Place == "" || ours // another client may have repeated the request of an ended attempt
		})
		if h != nil {
			s.keep(h, err)
		}
		if !errors.Is(err, engine.ErrNoSession) {
			break
		}
	}
	if named && err == nil && !left.Was {
		left.Loss = s.reasons()(ctx, at, token)
	}
	left.Settle = emptyAfter
	return left, err
}

// leave deletes the entries of a request that it means. An entry that this driver knows is deleted without a look at
// it: a hold, or the place of an ended attempt.
func (s *session) leave(ctx context.Context, l engine.Leaving, h *hold, means func(own) bool) (was bool, err error) {
	known := placeOf(l.Place)
	if h != nil && l.Known {
		known = place{s.id, h.path, h.version, nil}
	}
	if on := s.e.ours(known.session); on != nil && len(l.Late) == 0 { // else it may have moved from a former session
		if was, err = on.delete(ctx, known.path, known.version); !errors.Is(err, codeBadVersion) {
			return was, err
		}
	}
	dir := s.e.dir(l.Name)
	for range maxWrites {
		names, _, err := s.names(ctx, dir)
		if err != nil {
			return was, err
		}
		found, err := s.read(ctx, ofRequest(entriesOf(dir, names), l.RequestID), false)
		if err != nil {
			return was, err
		}
		if found = slices.DeleteFunc(found, func(x own) bool { return !means(x) }); len(found) == 0 {
			return was, nil
		}
		for _, x := range found {
			if on := s.e.ours(x.owner); on != nil {
				on.unhold(x.path, x.Token)
			}
			ended, err := s.delete(ctx, x.path, x.version)
			if err = ignore(err, codeBadVersion); err != nil {
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

// reasons returns a function that tells why the hold with a token on a node has ended. It reads the node of each name
// once. If that is missing too, everything may have been deleted, so the root is compared. Other holds were deleted by
// other means than this package.
func (s *session) reasons() func(ctx context.Context, at string, token int64) backend.Loss {
	known := map[string]*forced{}
	return func(ctx context.Context, at string, token int64) backend.Loss {
		dir := path.Dir(at)
		f, asked := known[dir]
		if !asked {
			ctx, cancel := context.WithTimeout(ctx, whyTimeout)
			defer cancel()
			if replies, err := s.do(ctx, getData(dir, false), getData(s.e.root, false)); err == nil {
				_ = s.e.compareRoot(replies[1])
				f = new(forced)
				if n, err := replies[0].node(); err != nil || json.Unmarshal(n.data, f) != nil {
					*f = forced{} // or foreign data
				}
			}
			known[dir] = f
		}
		switch {
		case s.e.history.err() != nil:
			return backend.Loss{Reason: backend.ReasonHistoryLost}
		case f == nil:
			return backend.Loss{}
		case f.Token == token || slices.Contains(f.Others, token):
			return backend.Loss{Reason: backend.ReasonForceReleased, Text: f.Reason, By: f.By, Principal: f.Principal}
		}
		return backend.Loss{Reason: backend.ReasonEvicted}
	}
}
