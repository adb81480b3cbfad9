package kit

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// testSession is a session as drivers have them.
type testSession struct {
	Session
	number int
}

// testSessions are sessions that open as the test wants.
type testSessions struct {
	*Sessions[time.Duration, *testSession]
	made int
}

func newTestSessions() *testSessions {
	return &testSessions{Sessions: NewSessions[time.Duration, *testSession](backend.GoClock())}
}

func (all *testSessions) blank() *testSession {
	all.made++
	return &testSession{Session: all.New(), number: all.made}
}

func (all *testSessions) join(ctx context.Context, key time.Duration) (*testSession, error) {
	return all.Join(ctx, key, all.blank, func(s *testSession) { all.Opened(s, nil) })
}

// mustJoin is join of a session that can be opened.
func (all *testSessions) mustJoin(t *testing.T, key time.Duration) *testSession {
	t.Helper()
	s, err := all.join(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestOneSessionForEachKey(t *testing.T) {
	all := newTestSessions()
	first, same, other := all.mustJoin(t, 1), all.mustJoin(t, 1), all.mustJoin(t, 2)
	if first != same || first == other {
		t.Errorf("the sessions of the keys 1, 1 and 2 are number %d, %d and %d",
			first.number, same.number, other.number)
	}
	if found, there := all.Find(2); !there || found != other {
		t.Error("the session of a key is not found")
	}
	if _, there := all.Find(3); there {
		t.Error("a session of a key that nobody has used is found")
	}
	if n := len(all.Live()); n != 2 {
		t.Errorf("%d sessions live, want 2", n)
	}
}

func TestAnEndedSessionIsReplaced(t *testing.T) {
	all := newTestSessions()
	s := all.mustJoin(t, 1)
	if s.Ended() || !s.Add(2) {
		t.Error("a session has ended that nobody has ended")
	}
	if !all.End(s) || all.End(s) {
		t.Error("End is not true once")
	}
	select {
	case <-s.Over():
	default:
		t.Error("nobody is notified of the session's end")
	}
	if !s.Ended() || s.Add(1) || len(all.Live()) != 0 {
		t.Error("a session that has ended takes users")
	}
	s.Leave(3) // has no effect any more
	if next := all.mustJoin(t, 1); next == s {
		t.Error("a session that has ended is joined")
	}
}

func TestAnAbandonedSessionLivesOn(t *testing.T) {
	all := newTestSessions()
	s := all.mustJoin(t, 1)
	if !all.Abandon(s) || all.Abandon(s) {
		t.Error("Abandon is not true once")
	}
	next := all.mustJoin(t, 1)
	if next == s || s.Ended() || !s.Add(1) {
		t.Error("a session that was abandoned has ended, or is joined")
	}
	if live := all.Live(); len(live) != 2 || !slices.Contains(live, s) {
		t.Error("a session that was abandoned does not live")
	}
	if all.End(s); next.Ended() || len(all.Live()) != 1 {
		t.Error("the end of a session that was abandoned has ended another one")
	}
}

// A session goes when nobody has used it for a while, and not before.
func TestIdleSessionsRetire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := newTestSessions()
		s := all.mustJoin(t, 1)
		s.Add(1)
		time.Sleep(time.Minute)
		s.Leave(1)
		if all.Retire(s, time.Minute) {
			t.Fatal("a session retires that is in use")
		}
		s.Leave(1)
		time.Sleep(time.Minute - 1)
		if all.Retire(s, time.Minute) {
			t.Fatal("a session retires before its time")
		}
		s.Add(1)
		s.Leave(1)
		time.Sleep(time.Minute - 1)
		if all.Retire(s, time.Minute) {
			t.Fatal("the time before a session was used counts")
		}
		time.Sleep(time.Nanosecond)
		if !all.Retire(s, time.Minute) || !s.Ended() || all.Retire(s, time.Minute) {
			t.Error("a session does not retire once")
		}
	})
}

// A caller that comes while a session is being opened waits for that, however the context of the first one ends.
func TestASessionOpensForAll(t *testing.T) {
	wrong := errors.New("the service is away")
	for _, failure := range []error{nil, wrong} {
		synctest.Test(t, func(t *testing.T) {
			all := newTestSessions()
			open := func(s *testSession) {
				go func() {
					time.Sleep(time.Second)
					all.Opened(s, failure)
				}()
			}
			impatient, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			if _, err := all.Join(impatient, 1, all.blank, open); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v for a context that ends before the session is open", err)
			}
			if s, there := all.Find(1); !there || all.Retire(s, time.Second) {
				t.Error("a session is not there while it is being opened")
			}
			began := time.Now()
			s, err := all.Join(t.Context(), 1, all.blank, open)
			if waited := time.Since(began); !errors.Is(err, failure) || waited != time.Second-time.Millisecond ||
				all.made != 1 {
				t.Errorf("%v after %v, with %d sessions made, want %v from the first one",
					err, waited, all.made, failure)
			}
			if failure == nil && s.Ended() || failure != nil && (!s.Ended() || len(all.Live()) > 0) {
				t.Error("a session lives that could not be opened, or has ended that could")
			}
		})
	}
}

// Join does not return a session that ends while it opens; a waiting caller gets another one.
func TestASessionEndsBeforeItIsOpen(t *testing.T) {
	all := newTestSessions()
	s, err := all.Join(t.Context(), 1, all.blank, func(s *testSession) {
		ends := s.number == 1
		if ends {
			all.End(s)
		}
		if all.Opened(s, nil) == ends {
			t.Errorf("session %d is open: %t", s.number, !ends)
		}
	})
	if err != nil || s.number != 2 || s.Ended() {
		t.Errorf("got session %d and %v, want the second one", s.number, err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	all.End(s)
	if _, err := all.join(ended, 1); !errors.Is(err, context.Canceled) {
		t.Errorf("%v for an ended context", err)
	}
}

func TestJoiningEndsWithTheGate(t *testing.T) {
	all, gate := newTestSessions(), NewGate()
	ctx, free := gate.Bind(t.Context())
	defer free()
	_, err := all.Join(ctx, 1, all.blank, func(*testSession) { gate.Close() })
	if !errors.Is(err, backend.ErrClosed) {
		t.Errorf("%v, want %v", err, backend.ErrClosed)
	}
}

// A panic or runtime.Goexit in open ends the session. Callers that wait for it open another one.
func TestUnopenedSessionEnds(t *testing.T) {
	for what, leave := range map[string]func(){"panic": func() { panic("bug") }, "Goexit": runtime.Goexit} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				all := newTestSessions()
				go func() {
					defer func() { _ = recover() }()
					_, err := all.Join(t.Context(), 1, all.blank, func(*testSession) {
						time.Sleep(time.Second)
						leave()
					})
					t.Errorf("Join returned with %v", err)
				}()
				synctest.Wait()
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				s, err := all.Join(ctx, 1, all.blank, func(s *testSession) { all.Opened(s, nil) })
				if err != nil || s.number != 2 || len(all.Live()) != 1 {
					t.Errorf("got session %d of %d and %v, want the second one", s.number, len(all.Live()), err)
				}
			})
		})
	}
}

// A driver that takes more users away than there are does not end the session under the next one.
func TestASessionHasNoNegativeUsers(t *testing.T) {
	all := newTestSessions()
	s, err := all.join(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	s.Leave(2)
	if !s.Add(1) || all.Retire(s, 0) {
		t.Error("the session retired under a user")
	}
	s.Leave(1)
	if !all.Retire(s, 0) {
		t.Error("the session does not retire without users")
	}
}
