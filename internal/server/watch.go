package server

// Watches: events of names, sent to the clients that watch them.
//
// Events are not pushed into connections. Each watch reads the list of kept events at its own pace, and the notifier
// only wakes it. A queue for each watch would grow with the slowest client; instead, such a client eventually falls
// behind the list and gets CODE_COMPACTED.

import (
	"fmt"
	"strings"
	"sync"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/notify"
	"github.com/fencelock/fencelock/internal/rules"
)

// eventsAtOnce bounds the events that are read together and sent in one reply.
const eventsAtOnce = 256

// watchesPerConn bounds the watches of one connection: each examines every event.
const watchesPerConn = 1024

// watches are the watches of one connection. One goroutine serves them, each from its own place in the list of kept
// events: a slow client delays no other client, and gets an error if it falls too far behind.
type watches struct {
	mu      sync.Mutex
	all     map[uint64]*watch // by the number of the request
	running bool
	added   notify.Signal // a watch was added
}

type watch struct {
	number uint64
	name   string
	prefix bool
	cursor uint64 // events up to this revision are sent or do not match
	by     asker
}

func (w *watch) matches(name string) bool {
	return name == w.name || w.prefix && strings.HasPrefix(name, w.name)
}

// watch is a look, so that it begins after all changes that were acknowledged before the request. It refuses a
// revision whose later events are not kept any more.
func (x *call) watch(q *lockpb.Watch) error {
	return x.look(func() *lockpb.Reply {
		if e := x.mayWatch(q); e != nil {
			return errorReply(e)
		}
		w := &watch{
			number: x.request.Number, name: q.GetName(), prefix: q.GetPrefix(), cursor: q.GetSince(), by: x.by,
		}
		if w.cursor == 0 {
			w.cursor = x.machine().Revision()
		} else if _, err := x.machine().EventsSince(w.cursor, 1); err != nil {
			return errorReply(watchError(err))
		}
		if !x.addWatch(w, func() {
			x.reply(x.request, &lockpb.Reply{
				Answer: &lockpb.Reply_Watching{Watching: &lockpb.Watching{Revision: w.cursor}},
			})
		}) {
			return errorReply(&lockpb.Error{
				Code: lockpb.Code_CODE_EXHAUSTED, Field: "watches",
				Message: fmt.Sprintf("the connection has %d watches already", watchesPerConn),
			})
		}
		return nil
	})
}

// mayWatch refuses a watch that the client may not read: a name, or, with a prefix, any name at all. For a prefix the
// client gets the events of the names that it may read.
func (x *call) mayWatch(q *lockpb.Watch) *lockpb.Error {
	e := x.server.mayRead(x.by, q.GetName())
	if e != nil && q.GetPrefix() && x.server.rules().AnyFor(x.by.client, x.by.other, rules.Read) {
		return nil
	}
	return e
}

// addWatch calls announce and then begins w, so that no event precedes the reply. It reports false if there are too
// many watches.
func (c *conn) addWatch(w *watch, announce func()) bool {
	c.watches.mu.Lock()
	defer c.watches.mu.Unlock()
	if len(c.watches.all) >= watchesPerConn {
		return false
	}
	if c.watches.all == nil {
		c.watches.all, c.watches.added = map[uint64]*watch{}, notify.New()
	}
	announce()
	c.watches.all[w.number] = w
	c.watches.added.Notify()
	if !c.watches.running && c.begin() {
		c.watches.running = true
		go func() {
			defer c.tasks.Done()
			c.follow()
		}()
	}
	return true
}

// unwatch ends a watch. Its events may still be on their way; the reply to Unwatch comes after them.
func (c *conn) unwatch(number uint64) {
	c.watches.mu.Lock()
	defer c.watches.mu.Unlock()
	delete(c.watches.all, number)
}

// follow sends events until the connection ends. It subscribes to news before it checks the events, so that it misses
// no event. While the client has enough to read, it waits for the client instead of news.
func (c *conn) follow() {
	for {
		news := c.server.news.wait()
		calm := c.sendEvents()
		if !calm {
			news = nil
		}
		select {
		case <-news:
		case <-c.watches.added:
		case <-c.out.calm:
		case <-c.ctx.Done():
			return
		}
	}
}

// sendEvents sends the new events of every watch, or its end if its client may no longer read the name. It stops, and
// returns false, when the client has enough to read.
func (c *conn) sendEvents() bool {
	c.watches.mu.Lock()
	defer c.watches.mu.Unlock()
	for _, w := range c.watches.all {
		reads := c.server.reads(w.by)
		if e := c.server.mayRead(w.by, w.name); e != nil && !w.prefix { // the rules have changed
			delete(c.watches.all, w.number)
			c.push(&lockpb.Reply{Answer: &lockpb.Reply_Events{Events: &lockpb.Events{Watch: w.number, Error: e}}})
			continue
		}
		for more := true; more; {
			if !c.out.isCalm() {
				return false
			}
			var out *lockpb.Events
			out, more = w.next(c.server.replica.State.Machine, reads)
			if out.Error != nil {
				delete(c.watches.all, w.number)
			}
			if out.Error != nil || len(out.Events) > 0 {
				c.push(&lockpb.Reply{Answer: &lockpb.Reply_Events{Events: out}})
			}
		}
	}
	return true
}

// next returns the next events of the watch that its client may read, and whether there may be more.
func (w *watch) next(m *machine.Machine, reads func(name string) bool) (*lockpb.Events, bool) {
	out := &lockpb.Events{Watch: w.number}
	events, err := m.EventsSince(w.cursor, eventsAtOnce)
	if err != nil {
		out.Error = watchError(err)
		return out, false
	}
	for i := range events {
		if w.matches(events[i].Name) && reads(events[i].Name) {
			out.Events = append(out.Events, eventOut(&events[i]))
		}
		w.cursor = events[i].Revision
	}
	return out, len(events) == eventsAtOnce
}

// notifier wakes all goroutines that wait for news. Each then checks for itself.
type notifier struct {
	mu sync.Mutex
	c  chan struct{} // nil: no goroutine waits
}

// wait returns a channel that the next ring closes.
func (b *notifier) wait() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.c == nil {
		b.c = make(chan struct{})
	}
	return b.c
}

func (b *notifier) notify() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.c != nil {
		close(b.c)
		b.c = nil
	}
}
