package check

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

// Options.Writer receives the whole history, as the parents of child processes need.
func TestRecorderWritesWhatItRecords(t *testing.T) {
	store := memory.NewStore(nil)
	var all []History
	var want []Event
	for child := range 2 {
		var out bytes.Buffer
		r := NewRecorder(Options{Writer: &out, Client: fmt.Sprint("child-", child)})
		var work sync.WaitGroup
		for i := range 3 {
			driver := store.Driver()
			core, err := fencelock.ForCorrectness(driver, nil)
			if err != nil {
				t.Fatal(err)
			}
			l := r.Wrap(fmt.Sprint("c", i), core)
			work.Go(func() {
				for range 20 {
					h, err := l.Acquire(t.Context(), "x", fencelock.Metadata(map[string]string{"a": "b"}))
					if err != nil {
						t.Error(err)
						return
					}
					if err := h.Release(t.Context()); err != nil {
						t.Error(err)
					}
				}
				_ = core.Close(t.Context())
			})
		}
		work.Wait()
		if err := r.Err(); err != nil {
			t.Fatal(err)
		}
		h, err := ReadHistory(&out)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, h)
		want = append(want, r.History().Events...)
	}
	merged := Merge(all...)
	if len(merged.Events) != len(want) || len(want) != 2*3*20*4 {
		t.Fatalf("%d events were written, %d recorded", len(merged.Events), len(want))
	}
	for i, e := range merged.Events {
		if fmt.Sprintf("%+v", e) != fmt.Sprintf("%+v", want[i]) {
			t.Errorf("event %d was written as %+v, and is %+v", i, e, want[i])
		}
	}
	p := Verify(t.Context(), merged, Rules{Fencing: true, Exact: true, Patience: time.Minute})
	if len(p.Violations) > 0 || p.Grants != 120 || p.Operations != 240 {
		t.Errorf("%v\n%s", p, p.Text())
	}
}

// If its writer fails, a recorder goes on and reports the error.
func TestRecorderWriterFails(t *testing.T) {
	broken := errors.New("broken pipe")
	r := NewRecorder(Options{Writer: writerFunc(func([]byte) (int, error) { return 0, broken }), StreamOnly: true})
	r.Begin(t.Context(), "a", OpTry, "x").Return(Refused, nil)
	if !errors.Is(r.Err(), broken) {
		t.Errorf("the error is %v", r.Err())
	}
	if n := len(r.History().Events); n != 0 {
		t.Errorf("%d events were kept", n)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

func TestOutcomes(t *testing.T) {
	store := memory.NewStore(nil)
	r := NewRecorder(Options{})
	locker := func(name string) *Locker {
		core, err := fencelock.ForCorrectness(store.Driver(), nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = core.Close(context.Background()) })
		return r.Wrap(name, core)
	}
	a, b := locker("a"), locker("b")
	h, err := a.Acquire(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.TryAcquire(t.Context(), "x"); !errors.Is(err, fencelock.ErrHeld) {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := b.Acquire(ctx, "x"); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	if err := h.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := h.Release(t.Context()); !errors.Is(err, fencelock.ErrNotHeld) {
		t.Fatal(err)
	}
	r.Killed("b")

	var got []string
	for _, e := range r.History().Events {
		if e.Type == TypeReturn {
			got = append(got, fmt.Sprint(e.Client, " ", e.Op, " ", e.Outcome))
		}
	}
	want := []string{"a acquire ok", "b try refused", "b acquire unknown", "a release ok", "a release gone"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A hold ends at the lease's deadline, not when a goroutine records the end.
func TestBeliefEndsAtTheDeadline(t *testing.T) {
	h := simulate(t, 2, nil, func(w *world) {
		a := w.clients[0].must(w, "x", fencelock.NoRenew())
		w.clients[0].link().Drop(memory.Both)
		b := w.clients[1].must(w, "x")
		time.Sleep(time.Second)
		_ = release(b, time.Second)
		_ = release(a, time.Second)
	})
	r := gather(h, Rules{})
	holds := r.names[0].holds
	if len(holds) != 2 {
		t.Fatal(script(h))
	}
	a := holds[0]
	driver := memory.New(nil)
	want := a.sentAt.Add(driver.Describe().Validity(2 * time.Second))
	if off := a.end.Sub(want).Abs(); off > time.Microsecond || a.why != string(backend.ReasonExpired) {
		t.Errorf("%v ended %v from its deadline", a, off)
	}
	if err := driver.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// Several leases of one hold are one hold.
func TestReentrantIsOneHold(t *testing.T) {
	h := simulate(t, 2, nil, func(w *world) {
		a := w.clients[0].must(w, "x")
		inner, err := w.clients[0].Acquire(a.Lease().Context(), "x", fencelock.Reentrant())
		if err != nil {
			t.Error(err)
			return
		}
		time.Sleep(latency)
		_ = release(inner, time.Second)
		w.work.Go(func() { _ = release(w.clients[1].must(w, "x"), time.Second) })
		time.Sleep(w.ttl)
		_ = release(a, time.Second)
	})
	p := Verify(t.Context(), h, fenced)
	if len(p.Violations) > 0 || p.Grants != 2 {
		t.Errorf("%v\n%s\n%s", p, p.Text(), script(h))
	}
}

// A caller can record a lock that is no fencelock.Locker.
func TestRecordedByHand(t *testing.T) {
	r := NewRecorder(Options{})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	call := r.Begin(ctx, "a", OpAcquire, "x")
	a := call.Granted(Grant{TTL: time.Minute})
	call = r.Begin(ctx, "b", OpAcquire, "x")
	b := call.Granted(Grant{TTL: time.Minute})
	a.Renewed(Grant{SentAt: r.Now(), TTL: time.Minute})
	a.Lost("told", Grant{})
	a.Lost("told again", Grant{})
	a.Renewed(Grant{SentAt: r.Now(), TTL: time.Minute})
	a.Release(ctx, Grant{}).Return(Gone, nil)
	b.Release(ctx, Grant{}).Return(OK, nil)
	p := Verify(t.Context(), r.History(), Rules{})
	if got := kindsOf(p); !slices.Equal(got, []Kind{Overlap, Early}) {
		t.Errorf("%v\n%s", got, script(p.History))
	}
	if p.NotifiedAfter != 1 || p.Renewals != 1 || p.Losses != 1 {
		t.Errorf("%+v", p.Figures)
	}
	if s := script(p.History); strings.Count(s, " end ") != 1 {
		t.Errorf("the belief ended more than once\n%s", s)
	}
}
