package memory

import (
	"context"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// look lets read see the store at one moment.
func (s *Store) look(read func(now backend.Instant)) verdict {
	s.mu.Lock()
	if s.state != serving {
		s.mu.Unlock()
		return notServing
	}
	now := s.clock.Now()
	s.expire(now)
	read(now)
	s.arm(now)
	s.unlock()
	return answered
}

func (e *entry) info(now backend.Instant) backend.State {
	info := backend.State{Name: e.name}
	for _, h := range e.holds {
		if !h.vacant {
			info.Held = true
			info.Holders = append(info.Holders, backend.Holder{
				Owner: h.owner, HoldID: h.holdID, Kind: h.kind, Permits: h.claim.permits, Token: h.token,
				Since: time.Now().Add(-now.Sub(h.since)), ExpiresIn: h.expires.Sub(now), Metadata: cloneMetadata(h.metadata),
			})
		}
	}
	for _, w := range e.queue {
		for i := range w.requests {
			if w.requests[i].Name == e.name {
				info.Waiters++
			}
		}
	}
	return info
}

// Look implements backend.Inspector.
func (d *Driver) Look(ctx context.Context, name string) (backend.State, error) {
	info := backend.State{Name: name}
	look := func() verdict {
		return d.store.look(func(now backend.Instant) {
			if e := d.store.names[name]; e != nil {
				info = e.info(now)
			}
			info.Revision = d.store.revision()
		})
	}
	if err := d.call(ctx, look); err != nil {
		return backend.State{}, callError("holder", name, err)
	}
	return info, nil
}

// List implements backend.Lister: sorted by name, as of one moment.
func (d *Driver) List(ctx context.Context, prefix string) iter.Seq2[backend.State, error] {
	return func(yield func(backend.State, error) bool) {
		var found []backend.State
		look := func() verdict {
			return d.store.look(func(now backend.Instant) {
				for name, e := range d.store.names {
					if e.held() > 0 && strings.HasPrefix(name, prefix) {
						info := e.info(now)
						info.Revision = d.store.revision()
						found = append(found, info)
					}
				}
			})
		}
		if err := d.call(ctx, look); err != nil {
			yield(backend.State{}, callError("list", prefix, err))
			return
		}
		slices.SortFunc(found, func(a, b backend.State) int { return strings.Compare(a.Name, b.Name) })
		for _, info := range found {
			if !yield(info, nil) {
				return
			}
		}
	}
}

// ForceRelease implements backend.ForceReleaser. It ends a minimum hold too. The reason is told to those who
// watch the name.
func (d *Driver) ForceRelease(ctx context.Context, name, reason string) error {
	var missing error
	force := func() verdict {
		return d.store.look(func(now backend.Instant) {
			if !d.store.endAll(name, now, backend.ReasonForceReleased, backend.ChangeForceReleased, reason) {
				missing = &backend.NotHeldError{Name: name}
			}
		})
	}
	if err := d.call(ctx, force); err != nil {
		return callError("force-release", name, err)
	}
	return callError("force-release", name, missing)
}

// endAll takes a name from all of its holders, whatever minimum they asked for. It reports whether there was one.
func (s *Store) endAll(name string, now backend.Instant, reason backend.Reason, what backend.ChangeType, why string) bool {
	e := s.names[name]
	if e == nil || e.held() == 0 {
		return false
	}
	for _, h := range slices.Clone(e.holds) { // those who get the name meanwhile are spared
		if !h.vacant {
			h.closes = 0
			s.end(h, now, reason, what, why)
		}
	}
	return true
}
