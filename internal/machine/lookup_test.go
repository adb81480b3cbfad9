package machine

import (
	"bytes"
	"io"
	"sync"
	"testing"
)

// A look is possible at any time, and sees the state between two commands.
func TestLookingWhileApplying(t *testing.T) {
	m := newWorld(128)
	done := make(chan struct{})
	var readers sync.WaitGroup
	look := func(read func()) {
		readers.Go(func() {
			for {
				read()
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	look(func() {
		info := m.Holder("x")
		if len(info.Holders) > 1 || info.Waiters > 0 && len(info.Holders) == 0 {
			t.Errorf("between two commands: %+v", info)
		}
	})
	look(func() {
		var b bytes.Buffer
		if _, err := m.Freeze().WriteTo(&b); err != nil {
			t.Error(err)
		}
		if err := New(1).Restore(&b); err != nil {
			t.Error(err)
		}
	})
	look(func() {
		for _, s := range m.Sessions() {
			m.SessionOpen(s.ID)
			shown, _ := m.Session(s.ID)
			for _, w := range shown.Waits {
				if len(w.Requests) == 0 {
					t.Errorf("a wait for nothing: %+v", w)
				}
			}
		}
		m.List("", "", 2)
		m.Lingering()
		m.Hash()
		m.Limits()
		m.Level()
	})
	look(func() {
		at := m.Revision()
		if events, err := m.EventsSince(at-min(at, 3), 10); err == nil && len(events) > 0 && events[0].Revision == 0 {
			t.Errorf("events %+v", events)
		}
	})
	for range 300 {
		for _, s := range []string{"a", "b", "c"} {
			m.Apply(1, &Command{Op: OpAcquire, Session: sid(s), Wait: true, Requests: []Request{{Name: "x", ID: id(s)}}})
		}
		for _, s := range []string{"c", "a", "b"} {
			m.Apply(1, &Command{Op: OpRelease, Session: sid(s), Name: "x", RequestID: id(s)})
		}
		if err := m.Restore(bytes.NewReader(snapshot(t, m))); err != nil {
			t.Fatal(err)
		}
	}
	close(done)
	readers.Wait()
	if _, err := m.Freeze().WriteTo(io.Discard); err != nil {
		t.Error(err)
	}
}
