package gateway

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

// unwatched is a driver of a service that reports no changes.
type unwatched struct{ *memory.Driver }

func (d unwatched) Describe() backend.Description {
	s := d.Driver.Describe()
	s.Capabilities &^= backend.CapWatch | backend.CapWatchReplay
	return s
}

// slow is a driver of a service whose Look takes a second.
type slow struct{ *memory.Driver }

func (d slow) Look(ctx context.Context, name string) (backend.State, error) {
	time.Sleep(time.Second)
	return d.Driver.Look(ctx, name)
}

// slowUnwatched is slow, and reports no changes.
type slowUnwatched struct{ slow }

func (d slowUnwatched) Describe() backend.Description { return unwatched{d.Driver}.Describe() }

// A client that reads the first line of a watch gets all later changes, however slow the service is.
func TestWatchHasBegunWithItsResponse(t *testing.T) {
	for name, of := range map[string]func(*memory.Driver) backend.Driver{
		"notifications": func(d *memory.Driver) backend.Driver { return slow{d} },
		"polling":       func(d *memory.Driver) backend.Driver { return slowUnwatched{slow{d}} },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				driver := memory.New(&memory.Options{Clock: backend.GoClock()})
				d := newDoor(t, of(driver))
				defer driver.Close(context.Background())
				defer d.g.Close(context.Background())
				ctx, hangUp := context.WithCancel(t.Context())
				p := d.watch(ctx, "/v1/locks/x/watch", nil)
				if got := <-p.lines; got != ": watching\n\n" {
					t.Errorf("the first line is %q", got)
				}
				d.granted(d.post(acquireX, acquireOf("a", "")))
				select {
				case got := <-p.lines:
					if !strings.Contains(got, "event: acquired\n") {
						t.Errorf("the first event is %q", got)
					}
				case <-time.After(time.Minute):
					t.Error("the acquire is missing")
				}
				hangUp()
				for range p.lines {
				}
			})
		})
	}
}

// With a backend without watches, a watch compares states, and reports that there is no replay.
func TestWatchByPolling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		driver := memory.New(&memory.Options{Clock: backend.GoClock()})
		d := newDoor(t, unwatched{driver})
		defer driver.Close(context.Background())
		defer d.g.Close(context.Background())
		d.refuses(d.get("/v1/locks/x/watch?since=1"), 501, codeUnsupported)

		ctx, hangUp := context.WithCancel(t.Context())
		defer hangUp()
		p := d.watch(ctx, "/v1/locks/x/watch", nil)
		if got := <-p.lines; got != ": watching\n\n" || p.header.Get(headerReplay) != "none" {
			t.Errorf("the first line is %q, with %v", got, p.header)
		}
		l := d.granted(d.post(acquireX, acquireOf("a", "")))
		first := <-p.lines
		d.is(d.post(releaseX, released(l)), 200, `{"status":"RELEASED","lockKey":"x"}`)
		second := <-p.lines
		for i, got := range []string{first, second} {
			want := []string{"acquired", "released"}[i]
			if !strings.HasPrefix(got, "event: "+want+"\n") || !strings.Contains(got, `"at":9466848`) ||
				strings.Contains(got, "revision") {
				t.Errorf("event %q, want %s with a time and without a revision", got, want)
			}
		}
		hangUp()
		for range p.lines {
		}
	})
}

// The state of a lock has the queue in its order, and the number of free permits.
func TestStateHasQueueAndPermits(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		body := func(owner string, permits string) string {
			return `{"ownerId":"` + owner + `","ttlMillis":60000,"kind":"permits","limit":5,"wait":true,"permits":` + permits + `}`
		}
		d.granted(d.post(acquireX, body("a", "3")))
		ctx, cancel := context.WithCancel(t.Context())
		later := d.soon(ctx, acquireX, body("b", "4"))
		d.waiters(1)
		last := d.soon(ctx, acquireX, body("c", "1"))
		d.waiters(2)
		var s State
		if err := json.Unmarshal([]byte(d.get("/v1/locks/x").text), &s); err != nil {
			t.Fatal(err)
		}
		if s.Remaining == nil || *s.Remaining != 2 || s.Limit != 5 || s.Holders[0].Permits != 3 {
			t.Errorf("state %+v, want 2 of 5 permits free", s)
		}
		if len(s.Queue) != 2 || s.Queue[0].OwnerID != "b" || s.Queue[0].Permits != 4 || s.Queue[1].OwnerID != "c" ||
			s.Queue[0].Kind != "permits" || s.Queue[0].Since == 0 {
			t.Errorf("queue %+v, want b before c", s.Queue)
		}
		cancel()
		<-later
		<-last
	})
}
