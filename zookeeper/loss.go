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

// victims are the holders of one name on one session. Where many lose it at once, one read of the name's node serves
// all of those whose deletion was seen before.
type victims struct {
	session *session
	dir     string
}

// tell tells holders that their nodes were deleted, until there is none that has not been told.
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
		why := d.readTrace(d.ctx, place.session, place.dir)
		for _, h := range holds {
			d.mu.Lock()
			lost := h.lost
			if h.releasing {
				lost = nil
			}
			d.mu.Unlock()
			if lost != nil {
				lost(cmp.Or(why(h.token), backend.ReasonEvicted))
			}
		}
	}
}

// forced is what ForceRelease leaves in the name's node for its victims.
type forced struct {
	Token  int64   `json:"token"`
	Others []int64 `json:"others,omitempty"` // tokens, where it ended several holds
	Reason string  `json:"reason"`
}

// whyGone tells why a node was deleted. The reason is empty if there was no answer soon.
func (d *Driver) whyGone(ctx context.Context, s *session, path string, token int64) backend.Reason {
	return d.readTrace(ctx, s, parent(path))(token)
}

// readTrace reads the trace of a ForceRelease, and returns what tells the reason by the token.
func (d *Driver) readTrace(ctx context.Context, s *session, dir string) func(token int64) backend.Reason {
	ctx, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
	defer cancel()
	data, err := do(ctx, s, nil, func(c *zk.Conn) ([]byte, error) {
		data, _, err := c.Get(dir)
		return data, err
	})
	if errors.Is(err, zk.ErrNoNode) { // has all been deleted?
		_ = s.d.recognize(ctx, s)
	}
	var f forced
	if err == nil && json.Unmarshal(data, &f) != nil {
		f = forced{} // somebody else's data
	}
	return func(token int64) backend.Reason {
		switch {
		case d.historyLost() != nil:
			return backend.ReasonHistoryLost
		case errors.Is(err, errSessionLost):
			return s.reason()
		case err == nil && (f.Token == token || slices.Contains(f.Others, token)):
			return backend.ReasonForceReleased
		case err == nil, errors.Is(err, zk.ErrNoNode):
			return backend.ReasonEvicted
		}
		return ""
	}
}
