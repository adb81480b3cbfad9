package server

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/serverfault"
)

// setPolicies has the cluster use a text, and expects that it does.
func setPolicies(t *testing.T, s *Server, text string) {
	t.Helper()
	set, err := operate(t, s.AdminAddr()).SetPolicies(t.Context(), &lockpb.SetPoliciesRequest{Text: text})
	if err != nil || set.GetText() != text {
		t.Fatalf("set: %v, %v", set, err)
	}
}

// push is the next push.
func (c *client) push() *lockpb.Reply {
	c.t.Helper()
	select {
	case r, open := <-c.pushes:
		if open {
			return r
		}
	case <-time.After(patience):
	}
	c.t.Fatal("no push")
	return nil
}

// A hold is ended at its maximum although its session lives on, and the name is granted only then.
func TestMaximumHoldOnTheWire(t *testing.T) {
	t.Parallel()
	const ttl, step, most = time.Hour, 20 * time.Minute, 3 * time.Hour
	var ahead atomic.Int64 // of the true time
	s := alone(t, Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0", MaxTTL: 4 * ttl, Rig: &serverfault.Rig{
		Now: func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) },
	}})
	setPolicies(t, s, "max-hold=3h a\n")
	heed := func(a *lockpb.Acquire) { a.HeedsMaxHold = true }
	c, next := dial(t, s.Addr().String()), dial(t, s.Addr().String())
	session, waiting := c.open(ttl), next.open(ttl)

	if r := c.call(acquireOf(session, "a", backend.NewRequestID(), false)); codeOf(r) != lockpb.Code_CODE_INVALID ||
		r.GetError().Field != "HeedsMaxHold" {
		t.Errorf("a client that does not heed it: %v", r)
	}
	if r := c.call(like(c.open(4*ttl), "a", heed)); codeOf(r) != lockpb.Code_CODE_INVALID || r.GetError().Field != "TTL" {
		t.Errorf("a TTL above the maximum: %v", r)
	}
	first := like(session, "a", heed)
	grant := c.call(first).GetAcquired().GetGrants()
	if len(grant) != 1 || grant[0].LastNanos != int64(most) {
		t.Fatalf("granted %v", grant)
	}
	wait := like(waiting, "a", heed)
	wait.GetAcquire().Wait = true
	if r := next.call(wait); !r.GetAcquired().GetQueued() {
		t.Fatal(r)
	}
	pass := func() {
		ahead.Add(int64(step))
		for _, x := range []struct {
			c       *client
			session []byte
		}{{c, session}, {next, waiting}} {
			if r := x.c.call(keepAliveOf(x.session)); !r.Renewed {
				t.Fatalf("a session ended: %v", r)
			}
		}
	}
	for range 8 {
		pass()
	}
	again := c.call(first).GetAcquired().GetGrants()
	if len(again) != 1 || again[0].Token != grant[0].Token || time.Duration(again[0].LastNanos) > most-8*step {
		t.Fatalf("reported again: %v", again)
	}
	holder := c.call(holderOf("a")).GetName().GetHolders()
	if len(holder) != 1 || time.Duration(holder[0].ExpiresInNanos) > most-8*step {
		t.Errorf("shown as %v", holder)
	}
	pass()
	lost := c.push().GetLost()
	if lost.GetReason() != lockpb.Reason_REASON_MAX_HOLD || lost.GetToken() != grant[0].Token || lost.GetName() != "a" {
		t.Errorf("the holder hears %v", lost)
	}
	granted := next.push().GetGranted().GetGrants()
	if len(granted) != 1 || granted[0].LastNanos != int64(most) {
		t.Errorf("the next one hears %v", granted)
	}
	pass() // the sessions live on
}

// What policies do to queues and permits that are in use, and that they outlast a restart.
func TestPoliciesOfQueuesAndPermits(t *testing.T) {
	t.Parallel()
	config := Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0"}
	s := alone(t, config)
	const text = "max-queue=1 q\npermits=1 p\n"
	setPolicies(t, s, text)
	_, err := operate(t, s.AdminAddr()).SetPolicies(t.Context(), &lockpb.SetPoliciesRequest{Text: "permits=0 p"})
	expectCode(t, err, codes.InvalidArgument, `line 1: "permits=0": want none, or a number`)

	c := dial(t, s.Addr().String())
	session, other := c.open(longTTL), c.open(2*longTTL)
	c.hold(session, "q")
	if r := c.call(acquireOf(other, "q", backend.NewRequestID(), true)); !r.GetAcquired().GetQueued() {
		t.Fatal(r)
	}
	r := c.call(acquireOf(other, "q", backend.NewRequestID(), true))
	if e := r.GetError(); e.GetCode() != lockpb.Code_CODE_EXHAUSTED || e.Field != "waiters-per-name" ||
		e.Message != `the policy of "q" lets 1 wait` {
		t.Errorf("a full queue: %v", r)
	}
	permit := func(a *lockpb.Acquire) { a.Kind, a.Permits, a.Limit, a.Wait = lockpb.Kind_KIND_PERMITS, 1, 9, true }
	if r := c.call(like(session, "p", permit)); len(r.GetAcquired().GetGrants()) != 1 {
		t.Fatal(r)
	}
	if r := c.call(like(other, "p", permit)); !r.GetAcquired().GetQueued() {
		t.Fatal(r)
	}
	setPolicies(t, s, strings.Replace(text, "permits=1", "permits=2", 1))
	if r := c.push(); len(r.GetGranted().GetGrants()) != 1 || r.GetGranted().Grants[0].Name != "p" {
		t.Errorf("with another permit: %v", r)
	}
	setPolicies(t, s, text)
	if err := s.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	again := alone(t, config)
	if got, err := operate(t, again.AdminAddr()).GetPolicies(t.Context(), &lockpb.GetPoliciesRequest{}); err != nil ||
		got.GetText() != text {
		t.Errorf("after a restart: %v, %v", got, err)
	}
}

// As long as a member may not know policies there are none, and requests are not marked with what it does not know.
func TestPoliciesNeedTheirLevel(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{
		DataDir: t.TempDir(), Listen: "127.0.0.1:0", Rig: &serverfault.Rig{Level: machine.LevelRules - 1},
	})
	eventually(t, "the level is raised", func() bool { return s.level() == machine.LevelRules-1 })
	c := dial(t, s.Addr().String())
	if r := c.call(like(c.open(longTTL), "a", func(a *lockpb.Acquire) { a.HeedsMaxHold = true })); len(
		r.GetAcquired().GetGrants()) != 1 {
		t.Errorf("below the level: %v", r)
	}
	_, err := operate(t, s.AdminAddr()).SetPolicies(t.Context(), &lockpb.SetPoliciesRequest{Text: "permits=1 a\n"})
	expectCode(t, err, codes.FailedPrecondition, "runs a version without rules and policies")
}
