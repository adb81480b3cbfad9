package builtin

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/fencelock/fencelock/builtin/lockpb"
)

// Each watch gets the events of its name, also on a new connection, and an ended watch leaves no state.
func TestEventsFindTheirWatch(t *testing.T) {
	run(t, func(t *testing.T, f *fake, d *Driver) {
		f.plays(func(_ *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
			if _, ok := q.Call.(*lockpb.Request_Watch); ok {
				return &lockpb.Reply{Answer: &lockpb.Reply_Watching{Watching: &lockpb.Watching{Revision: 1}}}, true
			}
			return nil, false
		})
		f.change(func(f *fake) { f.token = 10 })
		ctx, cancel := context.WithCancel(t.Context())
		names := []string{"x", "y", "z"}
		heard := make(chan string, 10)
		for _, name := range names {
			go func() {
				for e, err := range d.Watch(ctx, name, 0) {
					if err == nil {
						heard <- name + " of " + e.Name
					}
				}
			}()
		}
		synctest.Wait()
		for round := range uint64(2) {
			begun := asked[*lockpb.Request_Watch](f)
			for _, q := range begun[len(begun)-len(names):] {
				name := q.GetWatch().Name
				f.last().push(&lockpb.Reply{Answer: &lockpb.Reply_Events{Events: &lockpb.Events{
					Watch:  q.Number,
					Events: []*lockpb.Event{{Type: lockpb.EventType_EVENT_ACQUIRED, Name: name, Revision: round + 2}},
				}}})
				if got, want := <-heard, name+" of "+name; got != want {
					t.Errorf("round %d: %s, want %s", round, got, want)
				}
			}
			f.disconnect()
			take(t, d, request("anything")) // on the next connection
			synctest.Wait()
		}
		cancel()
		synctest.Wait()
		s := d.service
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.waiting > 0 || len(s.conn.watches) > 0 {
			t.Errorf("%d watches are left, and %d wait", len(s.conn.watches), s.waiting)
		}
	})
}
