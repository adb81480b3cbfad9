package fencelock_test

import (
	"context"
	"maps"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
)

// There is one EventSuspect for all attempts that fail between two renewals that succeed, and one before a loss.
func TestSuspectOncePerOutage(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		var seen recorder
		s := &scripted{Driver: b.store.Driver()}
		var attempts atomic.Int64
		var down atomic.Bool
		s.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			if !down.Load() {
				return s.Driver.Renew(ctx, grants)
			}
			attempts.Add(1)
			return []backend.Renewal{{Err: backend.ErrUnavailable}}
		}
		c := b.over(s, fencelock.Options{TTL: 30 * time.Second, Observer: &seen})
		lease := mustAcquire(t, c, "x")
		outage := func(d time.Duration, suspects int) {
			t.Helper()
			attempts.Store(0)
			down.Store(true)
			time.Sleep(d)
			down.Store(false)
			synctest.Wait()
			if got := len(seen.of(fencelock.EventSuspect)); got != suspects || attempts.Load() < 4 {
				t.Errorf("%d suspect events after %d failed attempts, want %d", got, attempts.Load(), suspects)
			}
		}
		outage(15*time.Second, 1)
		time.Sleep(15 * time.Second)
		outage(15*time.Second, 2)
		time.Sleep(15 * time.Second)
		outage(time.Minute, 3)
		wantErr(t, lease.Err(), fencelock.ErrLost)
		if got := len(seen.of(fencelock.EventLost)); got != 1 {
			t.Errorf("%d losses, want 1", got)
		}
	})
}

// The event of the outcome of a reported wait names the holder for which it waited.
func TestTheOutcomeOfAWaitNamesTheHolder(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		var seen recorder
		holder, _ := b.client(fencelock.Options{Owner: "the holder"})
		c, _ := b.client(fencelock.Options{Observer: &seen})
		mark := map[string]string{"ticket": "OPS-12"}
		held := mustAcquire(t, holder, "x", fencelock.Metadata(mark))
		_, err := c.Acquire(t.Context(), "x", fencelock.WaitAtMost(time.Second))
		wantErr(t, err, fencelock.ErrHeld)
		time.AfterFunc(time.Second, func() { release(t, held) })
		release(t, mustAcquire(t, c, "x"))
		release(t, mustAcquire(t, c, "x"))
		delivered()
		acquired := seen.of(fencelock.EventAcquired)
		if len(acquired) != 2 || acquired[1].Waited || acquired[1].Holder != nil {
			t.Fatalf("acquired: %+v, want two, the second without a wait", acquired)
		}
		for _, e := range append(seen.of(fencelock.EventContended), acquired[0]) {
			if !e.Waited || e.Holder == nil || e.Holder.Owner != "the holder" || !maps.Equal(e.Holder.Metadata, mark) {
				t.Errorf("%s: Waited %t, Holder %+v, want the holder with its metadata", e.Type, e.Waited, e.Holder)
			}
		}
	})
}

// Refusals before any request are reported, too: a deadlock, and a closed client.
func TestRefusalsAreReported(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		var seen recorder
		c, _ := b.client(fencelock.Options{Observer: &seen})
		lease := mustAcquire(t, c, "x")
		_, err := c.Acquire(lease.Context(), "x")
		wantErr(t, err, fencelock.ErrDeadlock)
		_, err = c.AcquireAll(lease.Context(), []string{"y", "x"})
		wantErr(t, err, fencelock.ErrDeadlock)
		drained := make(chan error)
		go func() { drained <- c.Drain(t.Context()) }()
		synctest.Wait()
		_, err = c.TryAcquire(t.Context(), "z")
		wantErr(t, err, fencelock.ErrClosed)
		release(t, lease)
		if err := <-drained; err != nil {
			t.Error(err)
		}
		failed := seen.of(fencelock.EventFailed)
		if len(failed) != 4 {
			t.Fatalf("failed: %+v, want x, y, x and z", failed)
		}
		for i, want := range []struct {
			name string
			err  error
		}{
			{"x", fencelock.ErrDeadlock}, {"y", fencelock.ErrDeadlock}, {"x", fencelock.ErrDeadlock},
			{"z", fencelock.ErrClosed},
		} {
			wantErr(t, failed[i].Err, want.err)
			if failed[i].Name != want.name || failed[i].Wait != 0 {
				t.Errorf("event %d is of %q after %v, want %q after 0", i, failed[i].Name, failed[i].Wait, want.name)
			}
		}
	})
}

func TestForcedReleasesAreReported(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		var seen recorder
		c, _ := b.client(fencelock.Options{Observer: &seen})
		lease := mustAcquire(t, c, "x")
		if err := c.ForceRelease(t.Context(), "x", "gone", fencelock.ForcedBy("Ann")); err != nil {
			t.Fatal(err)
		}
		wantErr(t, c.ForceRelease(t.Context(), "x", "again"), fencelock.ErrNotHeld)
		wantErr(t, c.ForceRelease(t.Context(), "x", ""), fencelock.ErrInvalidOption)
		<-lease.Context().Done()
		synctest.Wait()
		forced := seen.of(fencelock.EventForced)
		if len(forced) != 2 || forced[0].Name != "x" || forced[0].By != "Ann" || forced[0].Why != "gone" ||
			forced[0].Err != nil || forced[0].Driver != "memory" {
			t.Fatalf("forced: %+v, want a success by Ann and a failure", forced)
		}
		wantErr(t, forced[1].Err, fencelock.ErrNotHeld)
	})
}

// marker is an observer that adds metadata.
type marker struct {
	recorder
	marks map[string]string
}

func (m *marker) Metadata(context.Context) map[string]string { return m.marks }

// Metadata of observers reaches the hold. The caller's own metadata wins, and an acquire does not fail because of an
// observer's metadata.
func TestObserversAddMetadata(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		one := &marker{marks: map[string]string{"a": "one", "b": "one", "c": "one"}}
		two := &marker{marks: map[string]string{"b": "two", "c": "two"}}
		c, _ := b.client(fencelock.Options{Observer: fencelock.Observers(one, nil, two)})
		check := func(want map[string]string, opts ...fencelock.AcquireOption) {
			t.Helper()
			lease := mustAcquire(t, c, "x", opts...)
			state, err := c.Look(t.Context(), "x")
			if err != nil || !maps.Equal(state.Holders[0].Metadata, want) {
				t.Errorf("holder %+v, %v, want metadata %v", state.Holders, err, want)
			}
			release(t, lease)
		}
		check(map[string]string{"a": "one", "b": "two", "c": "mine"}, fencelock.Metadata(map[string]string{"c": "mine"}))
		large := map[string]string{"large": strings.Repeat("x", fencelock.MaxMetadataBytes-len("large"))}
		check(large, fencelock.Metadata(large))
		two.marks = map[string]string{"b": "\x00"}
		check(nil)
	})
}

// A second lease of a hold requests the hold's metadata, whatever an observer adds to each acquire.
func TestAddedMetadataDoesNotPartTheLeasesOfAHold(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		adds := &marker{marks: map[string]string{"trace": "1"}}
		c, _ := b.client(fencelock.Options{Observer: adds})
		mine := fencelock.Metadata(map[string]string{"ticket": "OPS-12"})
		first := mustAcquire(t, c, "x", mine, fencelock.RequestID(requestID))
		adds.marks = map[string]string{"trace": "2"}
		second := mustAcquire(t, c, "x", mine, fencelock.RequestID(requestID))
		if first.HoldID() != second.HoldID() {
			t.Error("the second lease has another hold")
		}
		release(t, second)
	})
}

// An observer that panics or ends its goroutine does not prevent the events of later observers.
func TestObserversDoNotDisturbEachOther(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		var before, after recorder
		broken := fencelock.ObserverFunc(func(context.Context, fencelock.Event) { panic("observer") })
		c, _ := b.client(fencelock.Options{Observer: fencelock.Observers(&before, broken, &after)})
		release(t, mustAcquire(t, c, "x"))
		delivered()
		for _, r := range []*recorder{&before, &after} {
			for _, typ := range []fencelock.EventType{fencelock.EventAcquired, fencelock.EventReleased} {
				if n := len(r.of(typ)); n != 1 {
					t.Errorf("%d events %s, want 1", n, typ)
				}
			}
			if n := len(r.of(fencelock.EventShed)); n != 2 {
				t.Errorf("%d events shed, want 2", n)
			}
		}
	})
}

// Events of acquires are delivered together, after a moment. Events for which an operator waits come without delay, in
// order.
func TestEventsAreDeliveredTogether(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		var seen recorder
		c, _ := b.client(fencelock.Options{Observer: &seen})
		for range 100 {
			release(t, mustAcquire(t, c, "x"))
		}
		synctest.Wait()
		if n := len(seen.of(fencelock.EventAcquired)); n != 0 {
			t.Errorf("%d events were delivered one by one", n)
		}
		time.Sleep(5 * time.Millisecond)
		synctest.Wait()
		if n := len(seen.of(fencelock.EventReleased)); n != 100 {
			t.Errorf("%d of 100 events were delivered after 5 ms", n)
		}
		lease := mustAcquire(t, c, "x")
		if err := c.ForceRelease(t.Context(), "x", "a test"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if len(seen.of(fencelock.EventForced)) != 1 || len(seen.of(fencelock.EventAcquired)) != 101 {
			t.Errorf("delivered %+v, want the acquire and the forced release", seen.events[200:])
		}
		_ = lease.Release(t.Context())
	})
}
