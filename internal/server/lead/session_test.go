package lead

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// ends records the proposals of a timekeeper, and their times.
type ends struct {
	began    time.Time
	sessions map[machine.SessionID]time.Duration
	freed    map[fencing.Token]time.Duration
	refuse   int  // the number of proposals to fail, for lack of room or in the log
	slow     bool // the log has not answered yet
}

// keepTime runs a timekeeper in simulated time.
func keepTime(t *testing.T) (*Timekeeper, *ends) {
	e := &ends{
		began: time.Now(), sessions: map[machine.SessionID]time.Duration{}, freed: map[fencing.Token]time.Duration{},
	}
	k := newTimekeeper(time.Now, func(c machine.Command, done func(error)) error {
		if e.refuse > 0 {
			if e.refuse--; e.refuse%2 == 0 {
				return ErrBusy
			}
			done(replica.ErrNotLeader)
			return nil
		}
		switch c.Op {
		case machine.OpExpire:
			if _, twice := e.sessions[c.Session]; twice {
				t.Errorf("session %v ends twice", c.Session)
			}
			e.sessions[c.Session] = time.Since(e.began)
		case machine.OpFree:
			e.freed[c.Token] = time.Since(e.began)
		}
		if !e.slow {
			done(nil)
		}
		return nil
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); k.run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return k, e
}

func TestSessionEndsAfterItsTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k, e := keepTime(t)
		e.slow = true
		idle, busy, short := machine.SessionID{1}, machine.SessionID{2}, machine.SessionID{3}
		k.Opened(idle, 10*time.Second, time.Now())
		k.Opened(busy, 10*time.Second, time.Now())
		time.Sleep(time.Second)
		k.Opened(short, 2*time.Second, time.Now()) // due before the sessions that the timer knows
		for range 3 {
			time.Sleep(8 * time.Second)
			if !k.Renew(busy, time.Now()) {
				t.Fatal("a session that is renewed in time cannot be renewed")
			}
		}
		if left := k.Left(busy); left != 10*time.Second+grace {
			t.Errorf("%v are left of a session that was renewed just now", left)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		want := map[machine.SessionID]time.Duration{
			idle: 10*time.Second + grace, short: 3*time.Second + grace, busy: 35*time.Second + grace,
		}
		if fmt.Sprint(e.sessions) != fmt.Sprint(want) {
			t.Errorf("ends at %v; want %v", e.sessions, want)
		}
		if k.Renew(idle, time.Now()) || !k.ending(idle) {
			t.Error("a session is renewed although its end is proposed")
		}
		k.Ended(idle)
		if k.ending(idle) || k.Renew(idle, time.Now()) {
			t.Error("a session that ended is still known")
		}
	})
}

// A request with an earlier receipt that is handled later must not shorten the deadline.
func TestRenewalCountsFromItsReceipt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k, e := keepTime(t)
		id := machine.SessionID{1}
		began := time.Now()
		k.Opened(id, 10*time.Second, began)
		time.Sleep(5 * time.Second)
		k.Renew(id, time.Now())
		k.Renew(id, began.Add(time.Second))
		time.Sleep(time.Minute)
		synctest.Wait()
		if at := e.sessions[id]; at != 15*time.Second+grace {
			t.Errorf("it ended after %v", at)
		}
	})
}

func TestEndIsProposedAgainIfThereIsNoRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k, e := keepTime(t)
		e.refuse = 3
		id := machine.SessionID{1}
		k.Opened(id, 10*time.Second, time.Now())
		time.Sleep(10*time.Second + grace + retryAfter)
		synctest.Wait()
		if k.Renew(id, time.Now()) {
			t.Error("a session is renewed during its end")
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if at, want := e.sessions[id], 10*time.Second+grace+3*retryAfter; at != want {
			t.Errorf("it ended after %v; want %v", at, want)
		}
	})
}

func TestMinimumHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k, e := keepTime(t)
		const held, left, late = fencing.Token(1), fencing.Token(2), fencing.Token(3)
		for _, token := range []fencing.Token{held, left, late} {
			k.Granted("x", token, 10*time.Second)
		}
		k.Granted("x", 4, 0)
		time.Sleep(3 * time.Second)
		if k.Closed(left) != 7*time.Second || k.Closed(4) != 0 {
			t.Errorf("closed for %v and %v", k.Closed(left), k.Closed(4))
		}
		k.linger("x", left)
		time.Sleep(8 * time.Second)
		synctest.Wait()
		if k.AnyClosed() {
			t.Error("a minimum that is over is kept")
		}
		k.linger("x", late)
		synctest.Wait()
		want := map[fencing.Token]time.Duration{left: 10 * time.Second, late: 11 * time.Second}
		if fmt.Sprint(e.freed) != fmt.Sprint(want) {
			t.Errorf("freed at %v; want %v", e.freed, want)
		}
	})
}

// The Timekeeper ends all of many sessions that expire at the same time.
func TestManySessionsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 5*endsAtOnce + 7
		k, e := keepTime(t)
		for i := range n {
			k.Opened(machine.SessionID{byte(i), byte(i >> 8), 1}, 10*time.Second, time.Now())
		}
		time.Sleep(11 * time.Second)
		synctest.Wait()
		if len(e.sessions) != n {
			t.Errorf("%d of %d ended", len(e.sessions), n)
		}
	})
}

// A new leader gives all sessions and holds their full time, because it does not know the promises of its predecessor.
func TestNewLeaderGivesFullTime(t *testing.T) {
	m := machine.New(1)
	apply := func(c machine.Command) machine.Result {
		r, _ := m.Apply(0, &c)
		if r.Code != machine.CodeOK && r.Code != machine.CodeGranted {
			t.Fatalf("%+v: %+v", c, r)
		}
		return r
	}
	session, gone := machine.SessionID{1}, machine.SessionID{2}
	hold := func(s machine.SessionID, name string) fencing.Token {
		return apply(machine.Command{Op: machine.OpAcquire, Session: s, Requests: []machine.Request{
			{Name: name, ID: "0123456789abcdef", MinHold: 5 * time.Second, HeedsMaxHold: true},
		}}).Grants[0].Token
	}
	apply(machine.Command{Op: machine.OpRaiseLevel, Level: machine.MaxLevel})
	apply(machine.Command{Op: machine.OpSetPolicies, Rules: "max-hold=20s a\n"})
	apply(machine.Command{Op: machine.OpOpenSession, Session: session, TTL: 10 * time.Second})
	apply(machine.Command{Op: machine.OpOpenSession, Session: gone, TTL: 10 * time.Second})
	held, lingering := hold(session, "a"), hold(gone, "b")
	apply(machine.Command{Op: machine.OpExpire, Session: gone, Linger: true})

	synctest.Test(t, func(t *testing.T) {
		k, e := keepTime(t)
		k.inherit(m)
		if k.Closed(held) != 5*time.Second {
			t.Errorf("the hold's minimum goes on for %v", k.Closed(held))
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if len(e.sessions) != 1 || e.sessions[session] != 10*time.Second+grace {
			t.Errorf("sessions end at %v", e.sessions)
		}
		if len(e.freed) != 2 || e.freed[lingering] != 5*time.Second || e.freed[held] != 20*time.Second+grace {
			t.Errorf("minimums and the maximum end at %v", e.freed)
		}
	})
}

func TestProposerRefuses(t *testing.T) {
	t.Parallel()
	p := newProposer(nil, time.Now) // it does not run, so the queue fills
	ignore := Proposal{Done: func(Outcome, error) {}}
	for range maxQueued {
		if err := p.submit(ignore); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.submit(ignore); !errors.Is(err, ErrBusy) {
		t.Errorf("a full queue takes more: %v", err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(replica.ErrNotLeader)
	p.run(ctx)
	if err := p.submit(ignore); !errors.Is(err, replica.ErrNotLeader) {
		t.Errorf("a proposer that has ended takes more: %v", err)
	}
}

// The Timekeeper ends a hold after its maximum and the grace, unless the hold has ended before. It retries if the
// proposal fails.
func TestMaximumHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k, e := keepTime(t)
		e.refuse = 3
		const held, released = fencing.Token(1), fencing.Token(2)
		if k.Last(held, 10*time.Second) != 10*time.Second || k.Last(3, 0) != 0 {
			t.Error("a hold that is not noted has not its whole maximum")
		}
		for _, token := range []fencing.Token{held, released} {
			k.Bounded("x", token, 10*time.Second)
		}
		k.Bounded("x", 3, 0)
		time.Sleep(4 * time.Second)
		k.Bounded("x", held, 10*time.Second) // reported again
		if left := k.Last(held, 10*time.Second); left != 6*time.Second {
			t.Errorf("it lasts for another %v, want 6s", left)
		}
		k.untimed(released)
		time.Sleep(time.Minute)
		synctest.Wait()
		want := map[fencing.Token]time.Duration{held: 10*time.Second + grace + 3*retryAfter}
		if fmt.Sprint(e.freed) != fmt.Sprint(want) || len(k.maximums)+len(k.heap) != 0 {
			t.Errorf("ended at %v, want %v; %d maximums are left", e.freed, want, len(k.maximums))
		}
	})
}
