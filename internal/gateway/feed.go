package gateway

import (
	"context"
	"iter"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/poll"
	"github.com/fencelock/fencelock/internal/principal"
)

// feedEvents bounds how many events of a name are kept for watchers that are behind.
const feedEvents = 1024

// feed is the only watch of a name at the service, for all watchers of the name here: of one principal, where the service
// gets those. However many they are, the service sends each event once.
type feed struct {
	feedKey
	watched int // how many use it; protected by Gateway.mu
	cancel  context.CancelFunc
	began   chan struct{} // closed when the watch stands or has ended; a driver's own watch counts as standing from the start

	mu     sync.Mutex // protects the following fields
	floor  uint64     // each event of a greater revision is in events, or follows
	first  uint64     // number of events[0]
	events []*event
	err    error         // why it ended
	news   chan struct{} // closed when an event is added, and at the end
}

// event is a change with its text, which all watchers of a feed share.
type event struct {
	backend.Change
	once sync.Once // guards said
	said []byte
}

// feedKey identifies a feed.
type feedKey struct {
	name    string
	sentFor principal.Principal // for whom the lock service is asked; empty: for the gateway
}

// anyRevision is the floor of a feed that knows no revision yet: it has no event for certain.
const anyRevision = math.MaxUint64

// feedOf returns a feed, which the caller leaves when it no longer uses it; nil if the gateway closes. now is
// a revision that the service has reached, 0 if unknown.
func (g *Gateway) feedOf(d backend.Watcher, k feedKey, now uint64) *feed {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closing.Err() != nil {
		return nil
	}
	f := g.feeds[k]
	if f == nil {
		ctx, cancel := context.WithCancel(principal.For(g.closing, k.sentFor))
		f = &feed{
			feedKey: k, cancel: cancel, began: make(chan struct{}), floor: anyRevision, news: make(chan struct{}),
		}
		if now != 0 {
			f.floor = now
		}
		g.feeds[k] = f
		g.work.Go(func() { g.fill(ctx, d, f, now) })
	}
	f.watched++
	return f
}

func (g *Gateway) leaveFeed(f *feed) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if f.watched--; f.watched == 0 {
		g.dropFeed(f)
	}
}

// dropFeed makes the next watcher begin another feed. The caller holds g.mu.
func (g *Gateway) dropFeed(f *feed) {
	f.cancel()
	if g.feeds[f.feedKey] == f {
		delete(g.feeds, f.feedKey)
	}
}

// fill watches the name after a revision, or from now on if since is 0, until ctx or the watch ends.
func (g *Gateway) fill(ctx context.Context, d backend.Watcher, f *feed, since uint64) {
	began := sync.OnceFunc(func() { close(f.began) })
	defer began()
	if p, ok := d.(poll.Watcher); ok {
		p.Began = began
		d = p
	} else {
		began()
	}
	var err error
	for c, failed := range d.Watch(ctx, f.name, since) {
		if err = failed; err != nil {
			break
		}
		f.add(c)
	}
	if err == nil {
		err = watchEnded()
	}
	g.mu.Lock()
	g.dropFeed(f)
	g.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
	close(f.news)
}

func watchEnded() error { return problem(codeUnavailable, "the watch ended").retry(comeAgain) }

// present returns the revision that the service has reached; 0 if it has no revisions, or does not answer.
func (g *Gateway) present(ctx context.Context, name string) uint64 {
	if !g.can(backend.CapWatchReplay) {
		return 0
	}
	s, err := g.look(ctx, name)
	if err != nil {
		return 0
	}
	return s.Revision
}

// add keeps an event, and wakes the watchers that wait for one.
func (f *feed) add(c backend.Change) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.floor == anyRevision && c.Revision != 0 {
		f.floor = c.Revision - 1
	}
	if len(f.events) == feedEvents {
		f.floor = max(f.floor, f.events[feedEvents/2-1].Revision)
		f.events = slices.Delete(f.events, 0, feedEvents/2)
		f.first += feedEvents / 2
	}
	f.events = append(f.events, &event{Change: c})
	close(f.news)
	f.news = make(chan struct{})
}

// end returns the number of the next event.
func (f *feed) end() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.first + uint64(len(f.events))
}

// after returns the number of the first event after a revision that the service has reached, if the feed has, or
// gets, all later events. A lagging feed may add events up to the revision later.
func (f *feed) after(revision uint64) (at uint64, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if revision < f.floor {
		return 0, false
	}
	n := slices.IndexFunc(f.events, func(e *event) bool { return e.Revision > revision })
	if n < 0 {
		n = len(f.events)
	}
	return f.first + uint64(n), true
}

// batch has the events of a feed from one event on.
type batch struct {
	lost   bool // the first of them is no longer kept
	events []*event
	news   <-chan struct{} // closed when there are some; nil if there are already
	err    error           // why no events follow
}

// from returns the events from a number on.
func (f *feed) from(at uint64) batch {
	f.mu.Lock()
	defer f.mu.Unlock()
	if at < f.first {
		return batch{lost: true}
	}
	if rest := f.events[at-f.first:]; len(rest) > 0 {
		return batch{events: slices.Clone(rest)}
	}
	return batch{news: f.news, err: f.err}
}

// follower is one watch of a name that shares the feed of the name. Several events may have one revision: they are
// one step of the service.
type follower struct {
	*feed
	past  uint64 // each event up to this revision was yielded, or precedes the watch
	last  uint64 // revision of the event that was yielded last
	of    int    // how many events of the revision last were yielded
	yield func([]*event, error) bool
}

// note records that e follows the events yielded before.
func (w *follower) note(e *event) {
	if e.Revision != w.last {
		w.past, w.last, w.of = w.last, e.Revision, 0
	}
	w.of++
}

// pause returns how long a watcher pauses after it got events, so that the watchers of a busy name do not take the
// processor from its holders: together they send at most sendsOfOne times a second. maxPause is shorter than a busy name
// takes to fill its feed.
func (g *Gateway) pause(f *feed) time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	return min(max(pauseTime, time.Duration(f.watched)*time.Second/sendsOfOne), maxPause)
}

// follow is a watch of a name after a revision, or from now on if since is 0, that shares the feed of the name. It
// reads only the events that the feed lacks from the service itself. Between two groups of events it pauses. now is a
// revision that the service has reached; 0 if the caller knows no revision. It calls begun when the watch stands: later
// changes are yielded.
func (g *Gateway) follow(
	ctx context.Context, d backend.Watcher, name string, since, now uint64, begun func(),
) iter.Seq2[[]*event, error] {
	return func(yield func([]*event, error) bool) {
		if now == 0 {
			now = g.present(ctx, name)
		}
		f := g.feedOf(d, feedKey{name, principal.CallsFor(ctx)}, now)
		if f == nil {
			yield(nil, watchEnded())
			return
		}
		defer g.leaveFeed(f)
		if since == 0 { // earlier events may still be on their way to the feed
			since = now
		}
		w := &follower{feed: f, past: since, last: since, yield: yield}
		at, on := f.end(), true
		if since != 0 {
			// The service itself refuses a revision that it has not reached.
			if at, on = f.after(since); !on || since > now {
				at, on = w.catchUp(ctx, d)
			}
		}
		select {
		case <-f.began:
			begun()
		case <-ctx.Done():
			return
		}
		for on {
			b := f.from(at)
			switch {
			case b.lost && (w.past == 0 || !g.can(backend.CapWatchReplay)):
				yield(nil, backend.ErrCompacted)
				return
			case b.lost:
				at, on = w.catchUp(ctx, d)
				continue
			case b.err != nil:
				yield(nil, b.err)
				return
			}
			at += uint64(len(b.events))
			fresh := slices.DeleteFunc(b.events, func(e *event) bool {
				if e.Revision != 0 && e.Revision <= w.past {
					return true
				}
				w.note(e)
				return false
			})
			if len(fresh) > 0 && (!yield(fresh, nil) || kit.Sleep(ctx, g.pause(f)) != nil) {
				return
			}
			if b.news == nil {
				continue
			}
			select {
			case <-b.news:
			case <-ctx.Done():
				return
			}
		}
	}
}

// catchUp yields the events that follow the ones yielded before, from the service, until the feed has the rest. It
// returns the number of the feed's first event of the rest; ok is false if the watch is over.
func (w *follower) catchUp(ctx context.Context, d backend.Watcher) (at uint64, ok bool) {
	again := w.of // events that the service repeats
	for c, err := range d.Watch(ctx, w.name, w.past) {
		switch {
		case err != nil:
			w.yield(nil, err)
			return 0, false
		case c.Revision == w.last && again > 0:
			again--
			continue
		case c.Revision > w.last: // all events up to last were yielded
			if at, ok = w.after(w.last); ok {
				w.past = w.last
				return at, true
			}
		}
		e := &event{Change: c}
		if w.note(e); !w.yield([]*event{e}, nil) {
			return 0, false
		}
	}
	if ctx.Err() == nil {
		w.yield(nil, watchEnded())
	}
	return 0, false
}
