package memory_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

// watcher is a watch in another goroutine.
type watcher struct {
	t      *testing.T
	events chan backend.Change
	end    chan error
	cancel context.CancelFunc
}

func watch(t *testing.T, d *memory.Driver, name string, since uint64) *watcher {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	w := &watcher{t: t, events: make(chan backend.Change, 10000), end: make(chan error, 1), cancel: cancel}
	t.Cleanup(cancel)
	go func() {
		for e, err := range d.Watch(ctx, name, since) {
			if err != nil {
				w.end <- err
				return
			}
			w.events <- e
		}
		w.end <- errors.New("ended without an error")
	}()
	return w
}

// saw compares what has come so far, as "type token reason".
func (w *watcher) saw(want ...string) {
	w.t.Helper()
	synctest.Wait()
	var got []string
	var last uint64
	for len(w.events) > 0 {
		e := <-w.events
		got = append(got, strings.TrimSpace(fmt.Sprintf("%s %v %s", e.Type, e.Token, e.Reason)))
		if e.Revision <= last || e.Owner != "test" {
			w.t.Errorf("event %+v after revision %d, want a later one of the owner", e, last)
		}
		last = e.Revision
	}
	if !slices.Equal(got, want) {
		w.t.Errorf("events = %q, want %q", got, want)
	}
}

func (w *watcher) ended(want error) {
	w.t.Helper()
	synctest.Wait()
	select {
	case err := <-w.end:
		if !errors.Is(err, want) {
			w.t.Errorf("the watch ended with %v, want %v", err, want)
		}
	default:
		w.t.Errorf("the watch goes on, want it to end with %v", want)
	}
}

func revision(t *testing.T, d *memory.Driver, name string) uint64 {
	t.Helper()
	info, err := d.Look(t.Context(), name)
	if err != nil || info.Revision == 0 {
		t.Fatalf("Holder = %+v, %v; want a revision", info, err)
	}
	return info.Revision
}

// turn acquires and releases name n times.
func turn(t *testing.T, d *memory.Driver, name string, n int) {
	t.Helper()
	for range n {
		if err := d.Release(t.Context(), acquire(t, d, request(name, time.Minute))); err != nil {
			t.Fatal(err)
		}
	}
}

func TestWatchReportsEachEndOfAHold(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		a, b := s.Driver(), s.Driver()
		start := revision(t, a, "x")
		live := watch(t, b, "x", 0)
		synctest.Wait()
		released := acquire(t, a, request("x", time.Minute))
		turn(t, a, "y", 1)
		if err := a.Release(t.Context(), released); err != nil {
			t.Fatal(err)
		}
		expired := acquire(t, a, request("x", time.Second))
		time.Sleep(time.Second)
		forced := acquire(t, a, request("x", time.Minute))
		if err := b.ForceRelease(t.Context(), backend.ForceRequest{Name: "x", Reason: "pod is gone"}); err != nil {
			t.Fatal(err)
		}
		evicted := acquire(t, a, request("x", time.Minute))
		s.Evict("x")
		want := []string{
			fmt.Sprint("acquired ", released.Token), fmt.Sprint("released ", released.Token),
			fmt.Sprint("acquired ", expired.Token), fmt.Sprint("expired ", expired.Token),
			fmt.Sprint("acquired ", forced.Token), fmt.Sprint("force-released ", forced.Token, " pod is gone"),
			fmt.Sprint("acquired ", evicted.Token), fmt.Sprint("released ", evicted.Token, " evicted"),
		}
		live.saw(want...)
		watch(t, b, "x", start).saw(want...)
		for info, err := range a.List(t.Context(), "") {
			t.Errorf("List = %v, %v", info, err)
		}
	})
}

func TestListReportsTheRevision(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		d := s.Driver()
		g := acquire(t, d, request("x", time.Minute))
		for info, err := range d.List(t.Context(), "") {
			if err != nil || info.Revision != revision(t, d, "x") {
				t.Errorf("List = %+v, %v; want the revision of Holder", info, err)
			}
			if err := d.Release(t.Context(), g); err != nil {
				t.Fatal(err)
			}
			watch(t, d, "x", info.Revision).saw(fmt.Sprint("released ", g.Token))
		}
	})
}

func TestWatchOfAQuietNameOutlivesABusyStore(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		d := s.Driver()
		before := revision(t, d, "x")
		turn(t, d, "x", 1)
		quiet := watch(t, d, "x", revision(t, d, "x"))
		synctest.Wait()
		turn(t, d, "y", 5000)
		g := acquire(t, d, request("x", time.Minute))
		quiet.saw(fmt.Sprint("acquired ", g.Token))
		watch(t, d, "x", before).ended(backend.ErrCompacted)
	})
}

func TestHistoryKeepsTheLast4096Events(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		d := s.Driver()
		turn(t, d, "x", 3000)
		last := revision(t, d, "x")
		all := watch(t, d, "x", last-4096)
		synctest.Wait()
		if len(all.events) != 4096 {
			t.Errorf("%d events, want 4096", len(all.events))
		}
		for r := last - 4095; r <= last; r++ {
			if e := <-all.events; e.Revision != r {
				t.Fatalf("event %+v, want revision %d", e, r)
			}
		}
		watch(t, d, "x", last-4097).ended(backend.ErrCompacted)
		watch(t, d, "x", last+1).ended(backend.ErrInvalidOption)
	})
}

func TestSlowWatchIsOverrun(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		d := s.Driver()
		start := revision(t, d, "x")
		turn(t, d, "x", 1)
		var tokens []uint64
		for e, err := range d.Watch(t.Context(), "x", start) {
			if err != nil {
				if !errors.Is(err, backend.ErrCompacted) {
					t.Errorf("a watch that was overrun = %v, want ErrCompacted", err)
				}
				tokens = append(tokens, 0)
				continue
			}
			// The first answer has brought both events already; what comes now is lost, in part.
			turn(t, d, "x", 3000)
			tokens = append(tokens, uint64(e.Token))
		}
		if !slices.Equal(tokens, []uint64{2, 2, 0}) {
			t.Errorf("events of tokens %v, want two of the first hold and the error", tokens)
		}
	})
}

func TestWatchEnds(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		d := s.Driver()
		cancelled := watch(t, d, "x", 0)
		synctest.Wait()
		cancelled.cancel()
		cancelled.ended(context.Canceled)
		wiped := watch(t, d, "x", 0)
		since := revision(t, d, "x")
		synctest.Wait()
		s.Wipe()
		wiped.ended(backend.ErrHistoryLost)
		watch(t, d, "x", since).ended(backend.ErrHistoryLost)
		d = s.Driver()
		closed := watch(t, d, "x", 0)
		since = revision(t, d, "x")
		synctest.Wait()
		if err := d.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		closed.ended(backend.ErrClosed)

		// The body of the loop may close the driver.
		d = s.Driver()
		turn(t, d, "x", 2)
		n := 0
		for _, err := range d.Watch(t.Context(), "x", since) {
			if n++; n == 1 {
				_ = d.Close(t.Context())
			} else if !errors.Is(err, backend.ErrClosed) {
				t.Errorf("after Close = %v, want ErrClosed", err)
			}
		}
		if n != 2 {
			t.Errorf("the loop ran %d times, want one event and one error", n)
		}
	})
}

func TestWatchSurvivesANetworkInTrouble(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		a, b := s.Driver(), s.Driver()
		w := watch(t, b, "x", 0)
		synctest.Wait()
		var want []string
		for i, trouble := range []func(){
			func() { b.Network().Hold(memory.Both) },
			func() { b.Network().Hold(memory.Replies) },
			func() { b.Network().Drop(memory.Replies) },
			func() { b.Network().Drop(memory.Both) },
			func() { b.Network().Delay(memory.Both, 10*time.Second) },
			func() { b.Network().Refuse() },
			func() { b.Network().Reset(); b.Network().Hold(memory.Requests) },
			func() { s.Pause(); time.Sleep(5 * time.Second); s.Resume() },
			func() { s.Stop(); time.Sleep(5 * time.Second); s.Start() },
		} {
			trouble()
			if i < 7 {
				w.saw()
			}
			for range 2 {
				g := acquire(t, a, request("x", time.Minute))
				if err := a.Release(t.Context(), g); err != nil {
					t.Fatal(err)
				}
				want = append(want, fmt.Sprint("acquired ", g.Token), fmt.Sprint("released ", g.Token))
				time.Sleep(3 * time.Second)
			}
			b.Network().Pass()
			time.Sleep(5 * time.Second)
			w.saw(want...)
			want = nil
		}
		b.Network().Drop(memory.Both)
		time.Sleep(5 * time.Second)
		w.cancel()
		w.ended(context.Canceled)
		b.Network().Refuse()
		watch(t, b, "x", 0).ended(backend.ErrUnavailable)
	})
}

func TestWatchBesideContenders(t *testing.T) {
	s := memory.NewStore(nil)
	d := s.Driver()
	const workers, rounds = 8, 200
	for range workers {
		go func() {
			own := s.Driver()
			for range rounds {
				g, err := own.Acquire(context.Background(), waiting(request("x", time.Minute)))
				if err != nil {
					t.Error(err)
					return
				}
				if err := own.Release(context.Background(), g); err != nil {
					t.Error(err)
				}
			}
		}()
	}
	var seen int
	var last backend.Change
	for e, err := range d.Watch(t.Context(), "x", 1) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Revision <= last.Revision || (e.Type == backend.ChangeAcquired) == (last.Type == backend.ChangeAcquired) {
			t.Fatalf("%+v follows %+v", e, last)
		}
		last = e
		if seen++; seen == 2*workers*rounds {
			break
		}
	}
}
