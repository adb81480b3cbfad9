package zookeeper

import (
	"cmp"
	"context"
	"errors"
	"path"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
)

// hold is an entry that was answered as a hold. session.mu protects its fields.
type hold struct {
	path      string
	requestID string
	token     int64
	version   int32
	since     backend.Instant
	link      int // the connection over which it was seen with a watch, or 0
}

// sight is when nodes were read with a watch: over which connection, and after how many changes of holds. If a hold has
// changed meanwhile, its watch may be used up.
type sight struct{ link, changes int }

func (s *session) sight() sight {
	s.mu.Lock()
	defer s.mu.Unlock()
	return sight{s.links, s.changes}
}

// hold notes an entry that was answered as a hold, for Follow and Extend, and that it was read with a watch, if it was.
func (s *session) hold(x own, read sight) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.holds[x.path]
	if h == nil || h.token != x.Token {
		h = &hold{path: x.path, requestID: x.requestID, token: x.Token, since: s.e.clock.Now()}
		s.holds[x.path] = h
	}
	if h.version = x.version; read.link > 0 && read.changes == s.changes {
		h.link = read.link
	} else if h.link == 0 {
		s.unwatched(h, false)
	}
}

// unwatched has Follow watch a hold, or find out why it is gone. The caller holds s.mu.
func (s *session) unwatched(h *hold, gone bool) {
	if h.link = 0; gone {
		s.gone = append(s.gone, h)
	} else {
		s.fresh = append(s.fresh, h)
	}
	if gone || len(s.fresh) == 1 { // else Follow has set its timer
		s.news.Notify()
	}
}

// unhold takes a hold out, so that its end is no loss. It returns nil if no hold has the token.
func (s *session) unhold(path string, token int64) *hold {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.holds[path]
	if h == nil || h.token != token {
		return nil
	}
	delete(s.holds, path)
	return h
}

// keep takes a hold in again that the server refused to delete. A deletion without an answer may be done, and is no
// loss.
func (s *session) keep(h *hold, err error) {
	var refused code
	if !errors.As(err, &refused) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holds[h.path] == nil {
		s.holds[h.path] = h
		s.unwatched(h, false)
	}
}

// stands reports whether a hold is known to stand over the present connection.
func (s *session) stands(path string, token int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.holds[path]
	return h != nil && h.token == token && h.link == s.links && s.link != nil
}

// Extend is engine.Service's. It lets the leader answer first. A hold with a watch then stands unless the server has
// reported its deletion, on the same connection. The others are read, with a watch. They move to the session if they
// are on another one, unless the engine knew them here: then another client has asked with their request id.
func (e *service) Extend(ctx context.Context, es engine.Session, holds []engine.Holding) ([]engine.Outcome, error) {
	s, out := es.(*session), make([]engine.Outcome, len(holds))
	if _, err := s.askLeader(ctx); err != nil {
		return nil, err
	}
	var all []entry
	var numbers []int // of the holds of these
	for i, h := range holds {
		at, token, ok := e.pathOf(h.Grant)
		if out[i].Gone = !ok; ok && (!h.Known || !s.stands(at, token)) {
			all, numbers = append(all, entry{path: at}), append(numbers, i)
		}
	}
	why := s.reasons()
	for round := 1; len(all) > 0; round++ {
		seen := s.sight()
		found, err := s.read(ctx, all, true)
		if err != nil {
			return nil, err
		}
		var moves []own
		some, these := all, numbers
		all, numbers = nil, nil
		stand := byPath(found)
		for n, i := range these {
			at, token, _ := e.pathOf(holds[i].Grant)
			x, ok := stand[at]
			switch {
			case !ok || x.Token != token || x.owner != s.id && holds[i].Known && e.ours(x.owner) == nil:
				s.unhold(at, token)
				out[i] = engine.Outcome{Gone: true, Loss: why(ctx, at, token)}
			case x.owner == s.id:
				s.hold(x, seen)
			case round > maxTries:
				out[i].Err = errChanged
			default:
				moves, all, numbers = append(moves, x), append(all, some[n]), append(numbers, i)
			}
		}
		if err := s.move(ctx, moves...); err != nil {
			return nil, err
		}
	}
	return out, e.history.err()
}

// watchAfter is the time from a grant until its entry is watched. An earlier loss is reported after this time. A watch
// costs a request, and a notification when the entry is deleted, and most locks are released before they need either.
const watchAfter = 200 * time.Millisecond

// Follow is engine.Follower's. It watches the entries of holds, and looks why those that are deleted have gone: a hold
// that was moved is not lost.
func (e *service) Follow(ctx context.Context, es engine.Session, notify func(engine.Push)) error {
	s := es.(*session)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for link := 0; ; {
		due, gone, next := s.takeNews(&link)
		err := s.watchHolds(ctx, due)
		if err == nil {
			due = nil
			err = s.report(ctx, gone, notify)
		}
		if err != nil && !s.isOver() {
			s.mu.Lock()
			s.fresh, s.gone = append(s.fresh, due...), append(s.gone, gone...)
			s.mu.Unlock()
			return err
		}
		timer.Reset(next)
		select {
		case <-s.news:
		case <-timer.C:
		case <-s.over:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// takeNews takes the holds that are to be watched now, all after a reconnection, and those that were deleted.
func (s *session) takeNews(link *int) (due, gone []*hold, next time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.link == nil {
		return nil, nil, time.Hour // until there is a connection
	}
	if *link != s.links {
		*link, s.fresh = s.links, nil
		for _, h := range s.holds {
			h.link = 0
			s.fresh = append(s.fresh, h)
		}
	}
	next = time.Hour
	now := s.e.clock.Now()
	var later []*hold
	for _, h := range s.fresh {
		switch {
		case s.holds[h.path] != h || h.link == s.links:
		case now.Sub(h.since) < watchAfter:
			later = append(later, h)
			next = watchAfter / 2
		default:
			due = append(due, h)
		}
	}
	gone = s.gone
	s.fresh, s.gone = later, nil
	return due, gone, next
}

// watchHolds reads entries with a watch.
func (s *session) watchHolds(ctx context.Context, all []*hold) error {
	seen := s.sight()
	found, err := s.read(ctx, entriesAt(all), true)
	if err != nil {
		return err
	}
	stand := byPath(found)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range all {
		x, ok := stand[h.path]
		switch {
		case s.holds[h.path] != h:
		case !ok || x.Token != h.token || x.owner != s.id:
			s.unwatched(h, true)
		case seen.changes != s.changes:
			s.unwatched(h, false)
		default:
			h.link, h.version = seen.link, x.version
		}
	}
	return nil
}

func entriesAt(holds []*hold) []entry {
	all := make([]entry, len(holds))
	for i, h := range holds {
		all[i] = entry{path: h.path}
	}
	return all
}

// report notifies of losses: of entries that are not there any more, or that another client has moved.
func (s *session) report(ctx context.Context, gone []*hold, notify func(engine.Push)) error {
	found, err := s.read(ctx, entriesAt(gone), false)
	if err != nil {
		return err
	}
	stand, why := byPath(found), s.reasons()
	for _, h := range gone {
		x, ok := stand[h.path]
		ok = ok && x.Token == h.token
		if ok && x.owner == s.id {
			s.hold(x, sight{})
			continue
		}
		if s.unhold(h.path, h.token) == nil || ok && s.e.ours(x.owner) != nil {
			continue // released, or on another session of this driver
		}
		loss := why(ctx, h.path, h.token)
		loss.Reason = cmp.Or(loss.Reason, backend.ReasonEvicted)
		notify(engine.Push{
			What: engine.PushLost, RequestID: h.requestID, Loss: loss, Incarnation: incarnation(path.Base(h.path), h.token),
		})
	}
	return nil
}
