// This file notifies holders of lost locks, with the reason. The end of a node arrives as a watch event
// (Driver.changed in hold.go); the reason is not in the event. ForceRelease therefore writes its reason into the
// name's node in the same transaction that deletes the entries, and readTrace reads it there. The lost callback is
// called after the reason is known or half a second has passed, whichever is earlier: the holder must stop soon, and
// the reason is only advice.

package zookeeper

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
)

// victims are the holders of one name on one session. If many lose it together, one read of the name's node serves all
// deletions seen before the read: a thousand readers that lose their name cost a few requests and one goroutine, not a
// thousand of each.
type victims struct {
	session *session
	dir     string
}

// tell notifies holders that their nodes were deleted, until all at this place have been notified. It is one goroutine
// for each place in Driver.gone, started by goneLocked under d.mu, and it deletes the entry under d.mu when it ends,
// so that no victim is added to a list without a reader. It calls lost without holding a mutex: the core may call the
// driver back.
func (d *Driver) tell(place victims) {
	for {
		d.mu.Lock()
		holds := d.gone[place]
		if len(holds) == 0 {
			delete(d.gone, place)
			d.mu.Unlock()
			return
		}
		d.gone[place] = nil
		d.mu.Unlock()
		// The read follows the take of the victims: it cannot be older than their deletion.
		why := d.readTrace(d.ctx, place.session, place.dir)
		for _, h := range holds {
			d.mu.Lock()
			// Check again immediately before the call: if a release has begun meanwhile, the end is no loss.
			lost := h.lost
			if h.releasing {
				lost = nil
			}
			d.mu.Unlock()
			if lost != nil {
				loss := why(h.token)
				loss.Reason = cmp.Or(loss.Reason, backend.ReasonEvicted)
				lost(loss)
			}
		}
	}
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

// whyGone returns the reason why the node with that token was deleted. The reason is empty without a quick answer; the
// caller then reports the loss without one.
func (d *Driver) whyGone(ctx context.Context, s *session, path string, token int64) backend.Loss {
	return d.readTrace(ctx, s, parent(path))(token)
}

// readTrace reads the trace of a ForceRelease, and returns a function from tokens to reasons. If the name's node is
// missing too, everything may have been deleted, so the token space is checked first: the reason is then the loss of
// history. A name whose node was cleaned up, or with foreign data, gives ReasonEvicted: the node was
// deleted by other means than this package.
func (d *Driver) readTrace(ctx context.Context, s *session, dir string) func(token int64) backend.Loss {
	ctx, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
	defer cancel()
	trace, err := s.read(ctx, dir, false)
	// The name's node is missing as well: everything may have been deleted.
	if errors.Is(err, zk.ErrNoNode) {
		_ = d.recognize(ctx, s)
	}
	var f forced
	if err == nil && json.Unmarshal(trace.data, &f) != nil {
		f = forced{} // foreign data
	}
	return func(token int64) backend.Loss {
		switch {
		case d.historyLost() != nil:
			return backend.Loss{Reason: backend.ReasonHistoryLost}
		case errors.Is(err, errSessionLost):
			return backend.Loss{Reason: s.reason()}
		case err == nil && (f.Token == token || slices.Contains(f.Others, token)):
			return backend.Loss{Reason: backend.ReasonForceReleased, Text: f.Reason, By: f.By, Principal: f.Principal}
		case err == nil, errors.Is(err, zk.ErrNoNode):
			return backend.Loss{Reason: backend.ReasonEvicted}
		}
		return backend.Loss{}
	}
}
