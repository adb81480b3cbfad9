package engine_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
)

// oneEntry is a binding on which the attempts of a request share one place in the queue.
type oneEntry struct {
	sessions
	feed
}

func (*oneEntry) OneEntry() {}

func (s *oneEntry) Enter(ctx context.Context, r engine.Entering) (engine.Position, error) {
	p, err := s.sessions.Enter(ctx, r)
	p.Placed = err == nil
	return p, err
}

func (s *oneEntry) Leave(ctx context.Context, l engine.Leaving) (engine.Left, error) {
	if s.holder() != l.RequestID {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.left++
		return engine.Left{Was: true}, s.leave
	}
	return s.sessions.Leave(ctx, l)
}

// The last attempt of a request removes the place that all share, and no attempt ends the hold of another one.
func TestLastAttemptRemovesTheEntry(t *testing.T) {
	for _, granted := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s := &oneEntry{}
			d, front, r := engine.New(s), request("x"), request("x")
			first, err := d.Acquire(t.Context(), front)
			if err != nil {
				t.Fatal(err)
			}
			r.Wait = true
			var ends [3]context.CancelFunc
			ended := make(chan error, len(ends))
			for i := range ends {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				ends[i] = cancel
				go func() {
					_, err := d.Acquire(ctx, r)
					ended <- err
				}()
			}
			left := func() int {
				s.sessions.mu.Lock()
				defer s.sessions.mu.Unlock()
				return s.left
			}
			synctest.Wait()
			early := 2
			if granted {
				early = 1
			}
			for i, end := range ends[:early] {
				end()
				if err := <-ended; !errors.Is(err, context.Canceled) || left() != 0 {
					t.Errorf("attempt %d of 3 = %v, and %d removals", i+1, err, left())
				}
			}
			if granted {
				if err := d.Release(t.Context(), first); err != nil {
					t.Fatal(err)
				}
				if err := <-ended; err != nil || s.holder() != r.RequestID {
					t.Errorf("the first of two attempts = %v, and %q holds", err, s.holder())
				}
				ends[1]()
				ends[2]()
				if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
					t.Errorf("the other attempt = %v", err)
				}
				if time.Sleep(time.Second); s.holder() != r.RequestID {
					t.Error("an attempt that ended has ended the hold")
				}
			} else {
				ends[2]()
				if err := <-ended; !errors.Is(err, context.Canceled) {
					t.Errorf("the last attempt = %v", err)
				}
				if time.Sleep(time.Second); left() != 1 {
					t.Errorf("%d removals, want 1", left())
				}
			}
			closed(t, d)
		})
	}
}

// A cleanup that is repeated does not end the hold of a later attempt of its request.
func TestCleanupSparesALaterAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &oneEntry{}
		d, front, r := engine.New(s), request("x"), request("x")
		if _, err := d.Acquire(t.Context(), front); err != nil {
			t.Fatal(err)
		}
		refuse := func(err error) {
			s.sessions.mu.Lock()
			defer s.sessions.mu.Unlock()
			s.leave = err
		}
		r.Wait = true
		refuse(errRefused)
		if _, err := d.Acquire(within(t, time.Second), r); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a wait that ends = %v", err)
		}
		granted := make(chan error, 1)
		go func() {
			_, err := d.Acquire(t.Context(), r)
			granted <- err
		}()
		synctest.Wait()
		s.service.mu.Lock()
		s.owner = "" // the service ends the first hold
		s.service.mu.Unlock()
		if err := <-granted; err != nil {
			t.Errorf("the later attempt = %v", err)
		}
		refuse(nil)
		if time.Sleep(5 * time.Second); s.holder() != r.RequestID {
			t.Error("the cleanup of the first attempt has ended the hold of the later one")
		}
		closed(t, d)
	})
}

// feed is a history with a change each second, in pages of one name.
type feed struct{ reads []time.Time }

func (f *feed) Feed(string, func()) engine.Feed { return f }
func (f *feed) Stop()                           {}
func (f *feed) Every() time.Duration            { return 200 * time.Millisecond }

func (f *feed) Read(context.Context, uint64) ([]backend.Change, error) {
	f.reads = append(f.reads, time.Now())
	if len(f.reads) < 10 {
		return nil, nil
	}
	return []backend.Change{{Revision: 1}}, nil
}

func (f *feed) Look(context.Context, string) (backend.State, error) { return backend.State{}, nil }

func (f *feed) Names(_ context.Context, _, after string) (page []backend.State, next string, err error) {
	for _, name := range []string{"a", "b", "c"} {
		if name > after {
			return []backend.State{{Name: name, Held: true}}, name, nil
		}
	}
	return nil, "", nil
}

// A feed that nothing wakes is read as often as it says.
func TestPolledFeed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &oneEntry{}
		d, began := engine.New(s), time.Now()
		for _, err := range d.Watch(t.Context(), "x", 0) {
			if err != nil {
				t.Error(err)
			}
			break
		}
		if took := time.Since(began); took < time.Second || took > 3*time.Second {
			t.Errorf("ten reads took %v, want about 2 s", took)
		}
		closed(t, d)
	})
}

// A list may begin after a name.
func TestListAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := engine.New(&oneEntry{})
		var names []string
		for s, err := range engine.ListAfter(t.Context(), d, "", "a") {
			if err != nil {
				t.Error(err)
			}
			names = append(names, s.Name)
		}
		if want := []string{"b", "c"}; !slices.Equal(names, want) {
			t.Errorf("names after a: %q, want %q", names, want)
		}
		closed(t, d)
	})
}
