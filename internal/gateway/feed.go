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

// feedEvents bounds the events of a name that a feed keeps for watchers that are behind.
const feedEvents = 1024

// feed is this replica's only watch of a name at the service, which all watchers of the name share: the service sends
// each event once. If the service gets the principals of calls, each principal has its own feed.
type feed struct {
	feedKey
	watched int // the number of watchers; protected by Gateway.mu
	cancel  context.CancelFunc
	began   chan struct{} // closed when polling has begun or the watch has ended; immediately for a driver's own watch

	mu     sync.Mutex // protects the following fields
	floor  uint64     // every event with a greater revision is in events, or follows
	first  uint64     // number of events[0]
	events []*event
	err    error         // the reason why it ended
	news   chan struct{} // closed when an event is added, and at the end
}

// event is a change, with its text. All watchers of a feed share both.
type event struct {
	backend.Change
	once sync.Once // guards said
	said []byte
}

// feedKey identifies a feed.
type feedKey struct {
	name    string
	sentFor principal.Principal // the principal of the call to the lock service; empty: the gateway
}

// anyRevision is the floor of a feed that knows no revision yet: the feed guarantees no events.
const anyRevision = math.MaxUint64

// feedOf returns the feed for k, or nil if the gateway is closing. The caller calls leaveFeed when it no longer uses
// the feed. now is a revision that the service has reached; 0 if unknown.
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

// dropFeed ends a feed, so that the next watcher begins another feed. The caller holds g.mu.
func (g *Gateway) dropFeed(f *feed) {
	f.cancel()
	if g.feeds[f.feedKey] == f {
		delete(g.feeds, f.feedKey)
	}
}

// fill adds the changes of the name after the revision since, or from now on if since is 0, until ctx or the watch
// ends.
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

// present returns a revision that the service has reached; 0 if it has no revisions or does not answer.
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

// add adds an event and notifies the watchers. It drops the older half of the events of a full feed.
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

// after returns the number of the first event after a revision that the service has reached. ok reports whether the
// feed has, or will get, all later events. A feed that lags may still add events up to that revision.
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

// batch is the result of from.
type batch struct {
	lost   bool // the feed no longer has the first event
	events []*event
	news   <-chan struct{} // closed when the feed has more events; nil if events is not empty
	err    error           // the reason why no events follow
}

// from returns the events from the number at on.
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

// follower is one watch of a name, which shares the feed of the name. Several events may have the same revision if one
// step of the service caused them.
type follower struct {
	*feed
	past  uint64 // every event up to this revision was yielded, or precedes the watch
	last  uint64 // revision of the event that was yielded last
	of    int    // the number of yielded events of the revision last
	yield func([]*event, error) bool
}

// note records that e is the next event to yield.
func (w *follower) note(e *event) {
	if e.Revision != w.last {
		w.past, w.last, w.of = w.last, e.Revision, 0
	}
	w.of++
}

// pause returns the pause of a watcher after it got events, so that the watchers of a busy name leave processor time to
// its holders: together they send at most sendsOfOne times a second, as far as maxPause allows. A busy name takes
// longer than maxPause to fill its feed.
func (g *Gateway) pause(f *feed) time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	return min(max(pauseTime, time.Duration(f.watched)*time.Second/sendsOfOne), maxPause)
}

// follow yields the changes of a name after the revision since, or from now on if since is 0. It shares the feed of the
// name, and reads only the events that the feed lacks from the service itself. It pauses between two groups of events.
// now is a revision that the service has reached; 0 if the caller knows no revision. follow calls begun once it is
// certain to yield all later changes.
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
			// The feed cannot serve a revision that the service has not reached: the service refuses it.
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

// catchUp yields the next events from the service until the feed has all later events. It returns the number of the
// first of those; ok is false if the watch is over.
func (w *follower) catchUp(ctx context.Context, d backend.Watcher) (at uint64, ok bool) {
	again := w.of // the number of yielded events that the service repeats
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
