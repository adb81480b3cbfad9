package server

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/machine"
)

func keepAliveOf(session []byte) *lockpb.Request {
	return &lockpb.Request{Session: session, Call: &lockpb.Request_KeepAlive{KeepAlive: &lockpb.KeepAlive{}}}
}

func attachOf(session []byte, after string, limit uint32) *lockpb.Request {
	return &lockpb.Request{Session: session, Call: &lockpb.Request_Attach{
		Attach: &lockpb.Attach{After: after, Limit: limit},
	}}
}

func holderOf(name string) *lockpb.Request {
	return &lockpb.Request{Call: &lockpb.Request_GetHolder{GetHolder: &lockpb.GetHolder{Name: name}}}
}

func TestSessionExpires(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{MinTTL: 100 * time.Millisecond})
	const ttl = 10 * time.Second // a busy machine does not use it up before b waits
	a, b := attach(t, s), attach(t, s)
	dead, alive := a.open(ttl), b.open(time.Minute)
	began := time.Now()
	_, token := a.hold(dead, "x")
	if r := b.call(acquireOf(alive, "x", backend.NewRequestID(), true)); !r.GetAcquired().GetQueued() {
		t.Fatalf("%v", r)
	}
	lost := a.next().GetLost()
	if string(lost.GetSession()) != string(dead) || lost.Reason != lockpb.Reason_REASON_SESSION_ENDED {
		t.Errorf("lost: %v", lost)
	}
	if lived := time.Since(began); lived < ttl {
		t.Errorf("it ended after %v", lived)
	}
	granted := b.next().GetGranted()
	if len(granted.GetGrants()) != 1 || granted.Grants[0].Token <= token {
		t.Errorf("granted: %v", granted)
	}
	if r := a.call(keepAliveOf(dead)); codeOf(r) != lockpb.Code_CODE_SESSION_ENDED || r.Renewed {
		t.Errorf("keepalive of a dead session: %v", r)
	}
	if r := a.call(attachOf(dead, "", 0)); codeOf(r) != lockpb.Code_CODE_SESSION_ENDED || r.Renewed {
		t.Errorf("attach of a dead session: %v", r)
	}
	if r := a.call(acquireOf(dead, "y", backend.NewRequestID(), false)); codeOf(r) != lockpb.Code_CODE_SESSION_ENDED ||
		r.Renewed {
		t.Errorf("acquire of a dead session: %v", r)
	}
}

// Whatever a session asks for keeps it alive.
func TestSessionIsKeptAlive(t *testing.T) {
	t.Parallel()
	const ttl = 2 * time.Second
	for name, request := range map[string]func([]byte) *lockpb.Request{
		"keepalive": keepAliveOf,
		"attach":    func(s []byte) *lockpb.Request { return attachOf(s, "", 0) },
		"held":      func(s []byte) *lockpb.Request { return acquireOf(s, "x", backend.NewRequestID(), false) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := alone(t, Config{MinTTL: 100 * time.Millisecond})
			c := attach(t, s)
			c.hold(c.open(time.Minute), "x")
			// A renewal that went out later than the TTL allows proves nothing: the machine stood still.
			var session []byte
			var began, renewed time.Time
			for ; session == nil || renewed.Sub(began) < 2*ttl; time.Sleep(ttl / 20) {
				if session == nil {
					began = time.Now()
					session, renewed = c.open(ttl), began
				}
				sent := time.Now()
				r := c.call(request(session))
				switch {
				case r.Renewed:
					renewed = sent
				case time.Since(renewed) < ttl:
					t.Fatalf("not renewed: %v", r)
				default:
					session = nil
				}
			}
		})
	}
}

func TestCloseSession(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{})
	c := attach(t, s)
	session := c.open(time.Minute)
	c.hold(session, "x")
	r := c.call(&lockpb.Request{
		Session: session, Call: &lockpb.Request_CloseSession{CloseSession: &lockpb.CloseSession{}},
	})
	if r.GetDone() == nil || r.Renewed {
		t.Errorf("close: %v", r)
	}
	if n := c.call(holderOf("x")).GetName(); len(n.GetHolders()) != 0 {
		t.Errorf("held after the session was closed: %v", n)
	}
	if r := c.call(keepAliveOf(session)); codeOf(r) != lockpb.Code_CODE_SESSION_ENDED {
		t.Errorf("keepalive of a closed session: %v", r)
	}
}

func TestAttachListsHoldsAndWaitsOfTheSession(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{})
	a := attach(t, s)
	session, other := a.open(time.Minute), a.open(time.Minute)
	a.hold(other, "taken")
	want := map[string]uint64{"taken": 0}
	for i := range 7 {
		name := fmt.Sprint("name/", i)
		_, want[name] = a.hold(session, name)
	}
	a.call(acquireOf(session, "taken", backend.NewRequestID(), true))

	b := attach(t, s)
	got := map[string]uint64{}
	for after, pages := "", 0; ; pages++ {
		r := b.call(attachOf(session, after, 3))
		if !r.Renewed || r.GetSession().GetTtlNanos() != int64(time.Minute) {
			t.Fatalf("attach: %v", r)
		}
		for _, e := range r.GetSession().Holds {
			got[e.Name] = e.Token
		}
		for _, e := range r.GetSession().Waits {
			got[e.Name] = 0
		}
		if after = r.GetSession().NextAfter; after == "" {
			if pages != 2 {
				t.Errorf("%d pages", pages+1)
			}
			break
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("it returns %v; want %v", got, want)
	}
	a.call(&lockpb.Request{Session: other, Call: &lockpb.Request_CloseSession{CloseSession: &lockpb.CloseSession{}}})
	if g := b.next().GetGranted(); len(g.GetGrants()) != 1 || g.Grants[0].Name != "taken" {
		t.Errorf("the last connection that attached got %v", g)
	}
}

func TestMinimumHoldOutlivesItsHolder(t *testing.T) {
	t.Parallel()
	const minimum = 10 * time.Second // a busy machine does not use it up before somebody waits
	s := alone(t, Config{})
	c := attach(t, s)
	session := c.open(time.Minute)
	for _, end := range []string{"release", "close"} {
		t.Run(end, func(t *testing.T) {
			t.Parallel()
			c := attach(t, s)
			session, mine := c.open(time.Minute), c.open(time.Minute)
			id := backend.NewRequestID()
			q := acquireOf(mine, end, id, false)
			q.GetAcquire().MinHoldNanos = int64(minimum)
			began := time.Now()
			g := c.call(q).GetAcquired().GetGrants()
			if len(g) != 1 || time.Duration(g[0].ClosedNanos) > minimum || g[0].ClosedNanos <= 0 {
				t.Fatalf("granted %v", g)
			}
			switch end {
			case "release":
				c.call(releaseOf(mine, end, id, g[0].Token))
			default:
				c.call(&lockpb.Request{
					Session: mine, Call: &lockpb.Request_CloseSession{CloseSession: &lockpb.CloseSession{}},
				})
			}
			if r := c.call(acquireOf(session, end, backend.NewRequestID(), true)); !r.GetAcquired().GetQueued() {
				t.Fatalf("not closed: %v", r)
			}
			if n := c.call(holderOf(end)).GetName(); len(n.Holders) != 1 || !n.Holders[0].Lingering || n.Waiters != 1 {
				t.Errorf("the name is %v", n)
			}
			if c.next().GetGranted() == nil || time.Since(began) < minimum {
				t.Errorf("open after %v", time.Since(began))
			}
		})
	}
	t.Run("over", func(t *testing.T) {
		id := backend.NewRequestID()
		q := acquireOf(session, "over", id, false)
		q.GetAcquire().MinHoldNanos = int64(time.Millisecond)
		token := c.call(q).GetAcquired().Grants[0].Token
		eventually(t, "the minimum is over", func() bool { return !s.leadership.Load().Time.AnyClosed() })
		c.call(releaseOf(session, "over", id, token))
		c.hold(session, "over")
	})
	t.Run("unused", func(t *testing.T) {
		id := backend.NewRequestID()
		q := acquireOf(session, "unused", id, false)
		q.GetAcquire().MinHoldNanos = int64(time.Hour)
		token := c.call(q).GetAcquired().Grants[0].Token
		c.call(releaseOf(session, "unused", id, token)) // it lingers
		next := backend.NewRequestID()
		if r := c.call(acquireOf(session, "unused", next, true)); !r.GetAcquired().GetQueued() {
			t.Fatalf("not closed: %v", r)
		}
		if r := c.call(releaseOf(session, "unused", id, 0)); r.GetError() != nil {
			t.Errorf("release of a lingering hold by its request: %v", r)
		}
		if g := c.next().GetGranted().GetGrants(); len(g) != 1 {
			t.Errorf("the waiter got %v", g)
		}
	})
}

func TestForceRelease(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{})
	a, b := attach(t, s), attach(t, s)
	session := a.open(time.Minute)
	id, token := a.hold(session, "x")
	force := &lockpb.Request{Call: &lockpb.Request_ForceRelease{
		ForceRelease: &lockpb.ForceRelease{Name: "x", Reason: "maintenance", By: "somebody"},
	}}
	if r := b.call(force); r.GetDone() == nil {
		t.Fatalf("force release: %v", r)
	}
	lost := a.next().GetLost()
	if lost.GetName() != "x" || lost.RequestId != id || lost.Token != token || lost.Message != "maintenance" ||
		lost.Reason != lockpb.Reason_REASON_FORCE_RELEASED {
		t.Errorf("lost: %v", lost)
	}
	if r := b.call(force); codeOf(r) != lockpb.Code_CODE_NOT_HELD {
		t.Errorf("force release of what nobody holds: %v", r)
	}
	if r := a.call(releaseOf(session, "x", id, token)); codeOf(r) != lockpb.Code_CODE_NOT_HELD || !r.Renewed {
		t.Errorf("release of what was taken away: %v", r)
	}
}

// The answer to a keepalive says how much was pushed before it, and that a session is attached elsewhere, or nowhere.
func TestKeepAliveCountsPushes(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{})
	a, b := attach(t, s), attach(t, s)
	session := a.open(longTTL)
	for want := range uint64(3) {
		if r := a.call(keepAliveOf(session)); !r.Renewed || r.Pushed == nil || r.GetPushed() != want {
			t.Errorf("keepalive after %d pushes: %v", want, r)
		}
		a.hold(session, "x")
		b.call(&lockpb.Request{Call: &lockpb.Request_ForceRelease{ForceRelease: &lockpb.ForceRelease{Name: "x"}}})
		a.next()
	}
	if r := b.call(keepAliveOf(session)); codeOf(r) != lockpb.Code_CODE_CONFLICT {
		t.Errorf("keepalive on a connection to which the session is not attached: %v", r)
	}
	if r := b.call(attachOf(session, "", 0)); r.GetSession() == nil {
		t.Fatalf("attach: %v", r)
	}
	if r := b.call(keepAliveOf(session)); !r.Renewed || r.GetPushed() != 0 {
		t.Errorf("keepalive on another connection: %v", r)
	}
	if r := a.call(keepAliveOf(session)); codeOf(r) != lockpb.Code_CODE_CONFLICT {
		t.Errorf("keepalive on the connection before: %v", r)
	}
	s.leadership.Load().Forget(machine.SessionID(session).Hidden()) // by a fault
	if r := b.call(keepAliveOf(session)); codeOf(r) != lockpb.Code_CODE_CONFLICT {
		t.Errorf("keepalive of a session without a connection for pushes: %v", r)
	}
}

// A client asks again for a lost answer, over another connection.
func TestSequenceMakesRequestsHarmless(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{})
	a, b := attach(t, s), attach(t, s)
	session := a.open(time.Minute)
	id := backend.NewRequestID()
	acquire := func() *lockpb.Request {
		q := acquireOf(session, "x", id, false)
		q.Sequence = 1
		return q
	}
	token := a.call(acquire()).GetAcquired().Grants[0].Token
	if r := b.call(acquire()); codeOf(r) != lockpb.Code_CODE_CONFLICT {
		t.Errorf("acquire on a connection to which the session is not attached: %v", r)
	}
	if r := b.call(&lockpb.Request{
		Session: session, Call: &lockpb.Request_Attach{Attach: &lockpb.Attach{}},
	}); r.GetSession() == nil {
		t.Fatalf("attach: %v", r)
	}
	if r := b.call(acquire()); r.GetAcquired().GetGrants()[0].Token != token {
		t.Errorf("acquire again: %v", r)
	}
	release := func() *lockpb.Request {
		q := releaseOf(session, "x", id, token)
		q.Sequence, q.Acknowledged = 2, 1
		return q
	}
	for range 2 {
		if r := b.call(release()); r.GetDone() == nil {
			t.Errorf("release: %v", r)
		}
	}
	if r := b.call(acquire()); codeOf(r) != lockpb.Code_CODE_STALE {
		t.Errorf("an acquire that arrives late: %v", r)
	}
	// The client cancels an acquire before it arrives.
	cancel := &lockpb.Request{Session: session, Sequence: 4, Call: &lockpb.Request_CancelWait{
		CancelWait: &lockpb.CancelWait{Name: "y", RequestId: id, Target: 3},
	}}
	if r := b.call(cancel); codeOf(r) != lockpb.Code_CODE_NOT_HELD {
		t.Errorf("cancel: %v", r)
	}
	late := acquireOf(session, "y", id, true)
	late.Sequence = 3
	if r := b.call(late); codeOf(r) != lockpb.Code_CODE_CANCELLED {
		t.Errorf("an abandoned acquire: %v", r)
	}
}

func TestAcquireAllAndDeadlock(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{})
	c := attach(t, s)
	session := c.open(time.Minute)
	under := map[string][]string{}
	ask := func(agent string, wait bool, names ...string) *lockpb.Reply {
		all := &lockpb.AcquireAll{Under: under[agent]}
		for _, name := range names {
			r := &lockpb.Acquire{Name: name, RequestId: backend.NewRequestID(), HoldId: agent, Owner: agent, Wait: wait}
			all.Requests = append(all.Requests, r)
			under[agent] = append(under[agent], r.RequestId)
		}
		return c.call(&lockpb.Request{Session: session, Call: &lockpb.Request_AcquireAll{AcquireAll: all}})
	}
	if r := ask("one", true, "a", "b"); len(r.GetAcquired().GetGrants()) != 2 {
		t.Fatalf("acquire all: %v", r)
	}
	if r := ask("two", true, "c"); len(r.GetAcquired().GetGrants()) != 1 {
		t.Fatalf("acquire all: %v", r)
	}
	if r := ask("two", false, "d", "b"); codeOf(r) != lockpb.Code_CODE_HELD || r.GetError().Name != "b" ||
		r.GetError().HoldId != "one" {
		t.Errorf("all or none: %v", r)
	}
	if r := ask("two", true, "b", "d"); !r.GetAcquired().GetQueued() {
		t.Fatalf("waiting: %v", r)
	}
	r := ask("one", true, "c")
	if cycle := r.GetError().GetCycle(); codeOf(r) != lockpb.Code_CODE_DEADLOCK || len(cycle) != 3 ||
		cycle[0].Owner != "one" {
		t.Errorf("deadlock: %v", r)
	}
}

func TestWhatMakesNoSense(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{})
	c := attach(t, s)
	session := c.open(time.Minute)
	open := func(ttl time.Duration) *lockpb.Request {
		return &lockpb.Request{Session: sessionID(), Call: &lockpb.Request_OpenSession{
			OpenSession: &lockpb.OpenSession{TtlNanos: int64(ttl)},
		}}
	}
	kind := acquireOf(session, "x", backend.NewRequestID(), false)
	kind.GetAcquire().Kind = 77
	for _, x := range []struct {
		name  string
		q     *lockpb.Request
		code  lockpb.Code
		field string
	}{
		{"no call", &lockpb.Request{}, lockpb.Code_CODE_UNSUPPORTED, "call"},
		{"no session", acquireOf(nil, "x", backend.NewRequestID(), false), lockpb.Code_CODE_INVALID, "session"},
		{"short session", keepAliveOf([]byte{1}), lockpb.Code_CODE_INVALID, "session"},
		{"zero session", keepAliveOf(make([]byte, 16)), lockpb.Code_CODE_INVALID, "session"},
		{"unknown session", keepAliveOf(sessionID()), lockpb.Code_CODE_SESSION_ENDED, ""},
		{"short TTL", open(DefaultMinTTL - 1), lockpb.Code_CODE_INVALID, "ttl"},
		{"long TTL", open(DefaultMaxTTL + 1), lockpb.Code_CODE_INVALID, "ttl"},
		{"negative TTL", open(-1), lockpb.Code_CODE_INVALID, "ttl"},
		{"no name", acquireOf(session, "", backend.NewRequestID(), false), lockpb.Code_CODE_INVALID, "Name"},
		{
			"long name", acquireOf(session, strings.Repeat("x", 513), backend.NewRequestID(), false),
			lockpb.Code_CODE_INVALID, "Name",
		},
		{"short request id", acquireOf(session, "x", "short", false), lockpb.Code_CODE_INVALID, "ID"},
		{"unknown kind", kind, lockpb.Code_CODE_INVALID, "kind"},
		{
			"nothing",
			&lockpb.Request{Session: session, Call: &lockpb.Request_AcquireAll{AcquireAll: &lockpb.AcquireAll{}}},
			lockpb.Code_CODE_INVALID, "requests",
		},
	} {
		r := c.call(x.q)
		if codeOf(r) != x.code || !strings.Contains(r.GetError().GetField(), x.field) ||
			r.GetError().GetMessage() == "" {
			t.Errorf("%s: %v; want %v of %q", x.name, r, x.code, x.field)
		}
	}
}

func TestList(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{})
	c := attach(t, s)
	session := c.open(time.Minute)
	long := map[string]string{"key": strings.Repeat("x", 4000)}
	var want []string
	for i := range 600 { // with their metadata they are more than one answer takes
		q := acquireOf(session, fmt.Sprintf("list/%03d", i), backend.NewRequestID(), false)
		q.GetAcquire().Metadata = long
		if r := c.call(q); r.GetAcquired() == nil {
			t.Fatal(r)
		}
		want = append(want, q.GetAcquire().Name)
	}
	c.hold(session, "other")
	var got []string
	pages := 0
	for after := ""; ; pages++ {
		r := c.call(&lockpb.Request{Call: &lockpb.Request_List{List: &lockpb.List{Prefix: "list/", After: after}}})
		for _, n := range r.GetNames().GetNames() {
			got = append(got, n.Name)
			if len(n.Holders) != 1 || n.Holders[0].Metadata["key"] != long["key"] || n.Holders[0].ExpiresInNanos <= 0 {
				t.Fatalf("%v", n)
			}
		}
		if after = r.GetNames().GetNextAfter(); after == "" {
			break
		}
	}
	if strings.Join(got, " ") != strings.Join(want, " ") || pages == 0 {
		t.Errorf("%d names on %d pages", len(got), pages+1)
	}
}
