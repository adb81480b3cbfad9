package server

import (
	"fmt"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

func watchOf(name string, prefix bool, since uint64) *lockpb.Request {
	return &lockpb.Request{Call: &lockpb.Request_Watch{
		Watch: &lockpb.Watch{Name: name, Prefix: prefix, Since: since},
	}}
}

// events collects pushed events until there are n.
func (c *client) events(n int) (all []*lockpb.Event) {
	c.t.Helper()
	for len(all) < n {
		e := c.next().GetEvents()
		if e == nil || e.Error != nil {
			c.t.Fatalf("events: %v", e)
		}
		all = append(all, e.Events...)
	}
	return all
}

func TestWatch(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{})
	a, b, all := attach(t, s), attach(t, s), attach(t, s)
	session := a.open(longTTL)
	a.hold(session, "before")
	began := b.call(watchOf("x", false, 0))
	if began.GetWatching() == nil {
		t.Fatalf("watch: %v", began)
	}
	all.call(watchOf("x", true, 0))
	id, token := a.hold(session, "x")
	a.hold(session, "xy")
	a.call(releaseOf(session, "x", id, token))
	check := func(c *client, want ...string) (last uint64) {
		t.Helper()
		var got []string
		for _, e := range c.events(len(want)) {
			if e.Revision <= last {
				t.Errorf("revision %d after %d", e.Revision, last)
			}
			last = e.Revision
			got = append(got, e.Name+" "+e.Type.String())
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("events %v; want %v", got, want)
		}
		return last
	}
	last := check(b, "x EVENT_ACQUIRED", "x EVENT_RELEASED")
	check(all, "x EVENT_ACQUIRED", "xy EVENT_ACQUIRED", "x EVENT_RELEASED")

	late := attach(t, s)
	late.call(watchOf("x", false, began.GetWatching().Revision))
	check(late, "x EVENT_ACQUIRED", "x EVENT_RELEASED")

	if r := b.call(&lockpb.Request{
		Call: &lockpb.Request_Unwatch{Unwatch: &lockpb.Unwatch{Watch: began.Number}},
	}); r.GetDone() == nil {
		t.Errorf("unwatch: %v", r)
	}
	a.hold(session, "x")
	b.call(watchOf("x", false, last))
	if e := b.next().GetEvents(); len(e.GetEvents()) != 1 || e.Watch == began.Number {
		t.Errorf("after unwatch: %v", e)
	}
	if r := b.call(watchOf("x", false, 1<<40)); codeOf(r) != lockpb.Code_CODE_INVALID {
		t.Errorf("a watch from the future: %v", r)
	}
}

func TestWatchOfWhatIsNotKept(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{})
	c := attach(t, s)
	session := c.open(longTTL)
	id, token := c.hold(session, "x")
	const kept = 16 << 10 // events
	var last <-chan *lockpb.Reply
	for range kept/2 + 1 {
		c.send(releaseOf(session, "x", id, token)) // the next answer has the token
		id = backend.NewRequestID()
		last = c.send(acquireOf(session, "x", id, false))
		token = (<-last).GetAcquired().GetGrants()[0].Token
	}
	r := c.call(watchOf("x", false, 1))
	if codeOf(r) != lockpb.Code_CODE_COMPACTED || r.GetError().CompactRevision == 0 {
		t.Fatalf("watch: %v", r)
	}
	if r := c.call(watchOf("x", false, r.GetError().CompactRevision)); r.GetWatching() == nil {
		t.Errorf("watch from the reported revision: %v", r)
	}
}

// A client that does not read is cut off, and nobody else waits for it.
func TestSlowReaderIsCutOff(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{Listen: "127.0.0.1:0"})
	slow := s.Attach(t.Context())
	fast := attach(t, s)
	session := fast.open(longTTL)
	batch := func() *lockpb.ClientMessage {
		m := &lockpb.ClientMessage{}
		for i := range 1000 {
			m.Requests = append(m.Requests,
				&lockpb.Request{Number: uint64(i + 1), Call: &lockpb.Request_Hello{Hello: &lockpb.Hello{}}})
		}
		return m
	}
	for i := 0; ; i++ {
		if err := slow.Send(batch()); err != nil {
			break
		}
		if i > 10*maxOutbox/1000 {
			t.Fatal("it is not cut off")
		}
	}
	fast.hold(session, "x")
	eventually(t, "it is forgotten", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.conns) == 1
	})
}

// The server does not cut off a slow watcher: it sends the remaining events, or an error that it is too late.
func TestSlowWatcher(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{unreadTime: time.Hour}) // a busy machine takes longer than 15 s
	slow := s.Attach(t.Context())
	if err := slow.Send(&lockpb.ClientMessage{
		Requests: []*lockpb.Request{{Number: 1, Call: watchOf("x", false, 0).Call}},
	}); err != nil {
		t.Fatal(err)
	}
	m, err := slow.Recv()
	if err != nil || m.Replies[0].GetWatching() == nil {
		t.Fatalf("%v, %v", m, err)
	}
	fast := attach(t, s)
	session := fast.open(longTTL)
	const rounds = 2000
	for range rounds {
		id, token := fast.hold(session, "x")
		fast.call(releaseOf(session, "x", id, token))
	}
	seen, revision := 0, uint64(0)
	for seen < 2*rounds {
		m, err := slow.Recv()
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range m.Replies {
			for _, e := range r.GetEvents().GetEvents() {
				if e.Revision <= revision {
					t.Fatalf("revision %d after %d", e.Revision, revision)
				}
				revision = e.Revision
				seen++
			}
		}
	}
}
