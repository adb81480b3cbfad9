package binding

import (
	"context"
	"path"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
)

// Extend is engine.Service's. A hold that stands on the session with a watch has not been deleted before the session's
// last proof: the server reports the deletion before the answer to the proof, on the same connection. The others are
// read, with a watch, and move to the session if they are on another one.
func (e *service) Extend(ctx context.Context, own engine.Session, holds []engine.Holding) ([]engine.Outcome, error) {
	s, out := sessionOf(own), make([]engine.Outcome, len(holds))
	paths, tokens := make([]string, len(holds)), make([]int64, len(holds))
	var rest, gone []int
	for i, h := range holds {
		at, token, ok := e.pathOf(h.Grant)
		paths[i], tokens[i] = at, token
		if !ok {
			out[i].Gone = true
		} else if !h.Known || !s.stands(at, token) {
			rest = append(rest, i)
		}
	}
	var moves []request
	var moving []mover
	for part := range slices.Chunk(rest, maxReads) {
		reqs := make([]request, len(part))
		for n, i := range part {
			reqs[n] = getData(paths[i], true)
		}
		link := s.linkNumber()
		replies, err := s.do(ctx, reqs...)
		if err != nil {
			return nil, err
		}
		for n, i := range part {
			read, err := replies[n].node()
			if err != nil && !isOneOf(err, codeNoNode) {
				out[i].Err = err
				continue
			}
			x, ok := ownOf(read, paths[i])
			switch {
			case err != nil || !ok || x.Token != tokens[i]:
				out[i].Gone = true
				s.unplace(paths[i], tokens[i])
				gone = append(gone, i)
			case x.owner == s.id:
				s.place(x, link)
			default:
				x.Attempt = "" // no attempt deletes a hold
				req, moved := s.moving(x)
				moves, moving = append(moves, req), append(moving, mover{i, moved})
			}
		}
	}
	if len(moves) > 0 {
		replies, err := s.do(ctx, moves...)
		if err != nil {
			return nil, err
		}
		for n, m := range moving {
			if _, _, err := replies[n].results(); err != nil {
				out[m.hold].Err = errChanged // the next renewal finds out
			} else {
				s.place(m.own, 0)
			}
		}
	}
	whys := map[string]func(int64) backend.Loss{}
	for _, i := range gone {
		dir := path.Dir(paths[i])
		if whys[dir] == nil {
			whys[dir] = s.whyGone(ctx, dir)
		}
		out[i].Loss = whys[dir](tokens[i])
	}
	return out, e.history.err()
}

// mover is a hold that moves.
type mover struct {
	hold int
	own
}

// linkNumber counts the session's connections. A request after its reading is answered over that connection or a later
// one.
func (s *session) linkNumber() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.links
}

// stands reports whether a hold is known to stand over the present connection.
func (s *session) stands(path string, token int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.placed[path]
	return h != nil && h.token == token && !h.gone && h.link == s.links && s.link != nil
}

// watchAfter is the time from a grant until its entry is watched. An earlier loss is reported after this time. A watch
// costs a request, and a notification when the entry is deleted, and most locks are released before.
const watchAfter = 200 * time.Millisecond

// Follow is engine.Follower's. It watches the entries of holds, and looks why those that are deleted have gone: a hold
// that was moved is not lost.
func (e *service) Follow(ctx context.Context, own engine.Session, notify func(engine.Push)) error {
	s := sessionOf(own)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	link := 0
	for {
		due, gone, next := s.takeNews(&link)
		if err := s.watchHolds(ctx, due); err != nil && !s.isOver() {
			s.again(due, gone)
			return err
		}
		if err := s.report(ctx, gone, notify); err != nil && !s.isOver() {
			s.again(nil, gone)
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
	next = time.Hour
	if *link != s.links {
		*link, s.fresh = s.links, nil
		for _, h := range s.placed {
			h.link = 0
			s.fresh = append(s.fresh, h)
		}
	}
	now := s.e.clock.Now()
	var later []*hold
	for _, h := range s.fresh {
		switch {
		case s.placed[h.path] != h || h.link == s.links || h.gone:
		case now.Sub(h.since) < watchAfter:
			later = append(later, h)
			next = watchAfter / 2
		default:
			due = append(due, h)
		}
	}
	s.fresh = later
	gone, s.gone = s.gone, nil
	return due, gone, next
}

// again puts back what was taken.
func (s *session) again(due, gone []*hold) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fresh, s.gone = append(s.fresh, due...), append(s.gone, gone...)
	s.news.Notify()
}

// watchHolds reads entries with a watch.
func (s *session) watchHolds(ctx context.Context, all []*hold) error {
	for part := range slices.Chunk(all, maxReads) {
		link := s.linkNumber()
		reqs := make([]request, len(part))
		for i, h := range part {
			reqs[i] = getData(h.path, true)
		}
		replies, err := s.do(ctx, reqs...)
		if err != nil {
			return err
		}
		s.mu.Lock()
		for i, h := range part {
			n, err := replies[i].node()
			x, ok := ownOf(n, h.path)
			switch {
			case s.placed[h.path] != h || h.gone:
			case isOneOf(err, codeNoNode), err == nil && (!ok || x.Token != h.token || x.owner != s.id):
				h.gone = true
				s.gone = append(s.gone, h)
				s.news.Notify()
			case err == nil:
				h.link, h.version = link, x.version
			default:
				s.fresh = append(s.fresh, h)
			}
		}
		s.mu.Unlock()
	}
	return nil
}

// report notifies of losses: of entries that are not there any more, or have been taken over by another client.
func (s *session) report(ctx context.Context, gone []*hold, notify func(engine.Push)) error {
	whys := map[string]func(int64) backend.Loss{}
	for _, h := range gone {
		replies, err := s.do(ctx, getData(h.path, false))
		if err != nil {
			return err
		}
		n, err := replies[0].node()
		if err != nil && !isOneOf(err, codeNoNode) {
			return err
		}
		x, ok := ownOf(n, h.path)
		stands := err == nil && ok && x.Token == h.token
		if stands && x.owner == s.id {
			s.unplace(h.path, h.token)
			s.place(x, 0)
			continue
		}
		if s.unplace(h.path, h.token) == nil || stands && s.e.session(x.owner) != nil {
			continue // released, or moved to another session of this driver
		}
		dir := path.Dir(h.path)
		if whys[dir] == nil {
			short, cancel := context.WithTimeout(ctx, whyTimeout)
			whys[dir] = s.whyGone(short, dir)
			cancel()
		}
		loss := whys[dir](h.token)
		if loss.Reason == "" {
			loss.Reason = backend.ReasonEvicted
		}
		notify(engine.Push{
			What: engine.PushLost, RequestID: h.requestID, Loss: loss, Incarnation: incarnation(path.Base(h.path), h.token),
		})
	}
	return nil
}
