package machine

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// rig is a machine with words for what tests do to it.
type rig struct {
	*testing.T
	m    *Machine
	told []Notice // by the last command
}

func newRig(t *testing.T) *rig {
	return &rig{T: t, m: New(1000)}
}

// id makes a request id, or a session, of a short text.
func id(text string) string { return text + strings.Repeat("-", max(0, minIDBytes-len(text))) }

func sid(text string) (id SessionID) {
	copy(id[:], text)
	return id
}

func (r *rig) apply(c Command) Result {
	r.Helper()
	result, told := r.m.Apply(1, &c)
	r.told = told
	checkState(r.T, r.m)
	return result
}

func (r *rig) want(c Command, code Code) Result {
	r.Helper()
	got := r.apply(c)
	if got.Code != code {
		r.Fatalf("%+v: code %d, want %d; %+v", c, got.Code, code, got)
	}
	return got
}

func (r *rig) open(sessions ...string) {
	r.Helper()
	for _, s := range sessions {
		r.want(Command{Op: OpOpenSession, Session: sid(s), TTL: time.Second}, CodeOK)
	}
}

// ask makes a command that takes names exclusively, and waits. The request id is made of session and name.
func ask(session string, names ...string) Command {
	c := Command{Op: OpAcquire, Session: sid(session), Wait: true}
	for _, name := range names {
		c.Requests = append(c.Requests, Request{Name: name, ID: id(session + "-request"), Owner: session})
	}
	return c
}

// as changes every request of c.
func (c Command) as(change func(*Request)) Command {
	c.Requests = slices.Clone(c.Requests)
	for i := range c.Requests {
		change(&c.Requests[i])
	}
	return c
}

func (c Command) try() Command {
	c.Wait = false
	return c
}

func give(session, name string) Command {
	return Command{Op: OpRelease, Session: sid(session), Name: name, RequestID: id(session + "-request")}
}

func tree(r *Request)     { r.Hierarchical = true }
func asShared(r *Request) { r.Kind = Shared }

func asPermits(n, limit uint32) func(*Request) {
	return func(r *Request) { r.Kind, r.Permits, r.Limit = Permits, n, limit }
}

// under makes c a request under the holds of the sessions, by the usual request ids.
func (c Command) under(sessions ...string) Command {
	for _, s := range sessions {
		c.Under = append(slices.Clone(c.Under), id(s+"-request"))
	}
	return c
}

// holders returns the owners of name, in the order of their tokens.
func (r *rig) holders(name string) string {
	var owners []string
	for _, h := range r.m.Holder(name).Holders {
		owner := h.Owner
		if h.Lingering {
			owner = "(" + owner + ")"
		}
		owners = append(owners, owner)
	}
	return strings.Join(owners, " ")
}

func (r *rig) held(name, want string) {
	r.Helper()
	if got := r.holders(name); got != want {
		r.Fatalf("%s is held by %q, want %q", name, got, want)
	}
}

// granted returns the owners of the sessions that the last command granted something.
func (r *rig) granted() string {
	var who []string
	for _, n := range r.told {
		if n.Type == NoticeGranted {
			who = append(who, strings.TrimRight(string(n.Session[:]), "\x00"))
		}
	}
	return strings.Join(who, " ")
}

func TestFirstComeFirstServed(t *testing.T) {
	r := newRig(t)
	r.open("a", "b", "c", "d")
	first := r.want(ask("a", "x"), CodeGranted).Grants[0]
	r.want(ask("b", "x"), CodeQueued)
	r.want(ask("c", "x"), CodeQueued)
	if got := r.want(ask("d", "x").try(), CodeHeld); got.Holder.Owner != "a" || got.Holder.Waits {
		t.Errorf("in the way is %+v, want the holder a", got.Holder)
	}
	if info := r.m.Holder("x"); info.Waiters != 2 || info.Holders[0].Token != first.Token ||
		info.Revision != r.m.Revision() {
		t.Errorf("x is %+v, want 2 waiters and token %v", info, first.Token)
	}
	r.want(give("a", "x"), CodeOK)
	if r.granted() != "b" || r.told[0].Grants[0].Token <= first.Token || r.told[0].Grants[0].Name != "x" {
		t.Errorf("after the release of %v: %+v, want a later grant to b", first.Token, r.told)
	}
	r.want(give("b", "x"), CodeOK)
	r.held("x", "c")
	r.want(give("c", "x"), CodeOK)
	if info := r.m.Holder("x"); len(info.Holders) != 0 || info.Waiters != 0 {
		t.Errorf("x is %+v, want nobody", info)
	}
}

func TestOneWhoTriesDoesNotBarge(t *testing.T) {
	r := newRig(t)
	r.open("reader", "writer", "second")
	r.want(ask("reader", "x").as(asShared), CodeGranted)
	r.want(ask("writer", "x"), CodeQueued)
	if got := r.want(ask("second", "x").as(asShared).try(), CodeHeld); got.Holder.Owner != "writer" ||
		!got.Holder.Waits {
		t.Errorf("in the way is %+v, want the waiting writer", got.Holder)
	}
	r.want(ask("second", "x").as(asShared), CodeQueued)
	r.want(give("reader", "x"), CodeOK)
	r.held("x", "writer")
	r.want(give("writer", "x"), CodeOK)
	r.held("x", "second")
}

func TestReadersShare(t *testing.T) {
	r := newRig(t)
	r.open("a", "b", "c", "d")
	r.want(ask("a", "x"), CodeGranted)
	for _, s := range []string{"b", "c"} {
		r.want(ask(s, "x").as(asShared), CodeQueued)
	}
	r.want(ask("d", "x"), CodeQueued)
	r.want(give("a", "x"), CodeOK)
	r.held("x", "b c")
	for _, h := range r.m.Holder("x").Holders {
		if h.Token.Exclusive() {
			t.Errorf("the shared hold %+v has a token that fences", h)
		}
	}
}

func TestPermits(t *testing.T) {
	r := newRig(t)
	r.open("a", "b", "c", "d")
	r.want(ask("a", "x").as(asPermits(3, 4)), CodeGranted)
	r.want(ask("b", "x").as(asPermits(2, 4)), CodeQueued)
	r.want(ask("c", "x").as(asPermits(1, 4)).try(), CodeHeld) // it would fit, and b is first
	r.want(ask("c", "x").as(asPermits(2, 4)), CodeQueued)
	for what, c := range map[string]Command{
		"another limit": ask("d", "x").as(asPermits(1, 5)),
		"exclusive":     ask("d", "x"),
		"shared":        ask("d", "x").as(asShared),
		"hierarchical":  ask("d", "x").as(tree),
	} {
		if got := r.apply(c).Code; got != CodeMismatch {
			t.Errorf("%s: code %d, want CodeMismatch", what, got)
		}
	}
	r.want(give("a", "x"), CodeOK)
	r.held("x", "b c")
}

func TestHierarchy(t *testing.T) {
	for _, c := range []struct {
		first, second         string
		firstKind, secondKind Kind
		together              bool
	}{
		{"a/b", "a/b", Exclusive, Exclusive, false},
		{"a/b", "a", Exclusive, Exclusive, false},
		{"a", "a/b", Exclusive, Exclusive, false},
		{"a", "a/b/c/d", Exclusive, Exclusive, false},
		{"a", "a/b", Exclusive, Shared, false},
		{"a", "a/b", Shared, Exclusive, false},
		{"a/b/c", "a", Exclusive, Shared, false},
		{"a", "a/b", Shared, Shared, true},
		{"a/b", "a/c", Exclusive, Exclusive, true},
		{"a/b", "a/bc", Exclusive, Exclusive, true},
		{"a/b", "ab", Exclusive, Exclusive, true},
		{"/a", "/b", Exclusive, Exclusive, true},
		{"a/", "a", Exclusive, Exclusive, false},
	} {
		r := newRig(t)
		r.open("one", "two")
		r.want(ask("one", c.first).as(tree).as(func(r *Request) { r.Kind = c.firstKind }), CodeGranted)
		second := ask("two", c.second).as(tree).as(func(r *Request) { r.Kind = c.secondKind })
		if c.together {
			r.want(second, CodeGranted)
			continue
		}
		r.want(second, CodeQueued)
		r.want(give("one", c.first), CodeOK)
		r.held(c.second, "two")
	}
}

func TestHierarchyHasNoConvoys(t *testing.T) {
	r := newRig(t)
	r.open("a", "b", "c", "d")
	r.want(ask("a", "root/x").as(tree), CodeGranted)
	r.want(ask("b", "root/x").as(tree), CodeQueued)
	r.want(ask("c", "root/y").as(tree), CodeGranted) // b waits below root too, and is in nobody's way there
	r.want(ask("d", "root").as(tree), CodeQueued)
	r.want(ask("a", "root/z").as(tree), CodeQueued) // but d is
}

func TestOneMayPassAWaiterThatItDoesNotDisturb(t *testing.T) {
	r := newRig(t)
	r.open("a", "b", "c", "d")
	r.want(ask("a", "x"), CodeGranted)
	r.want(ask("d", "y"), CodeGranted)
	r.want(ask("b", "x", "y").as(asShared), CodeQueued)
	r.want(ask("c", "x").as(asShared), CodeQueued)
	r.want(give("a", "x"), CodeOK) // b goes on waiting for y, and shares x with c in any case
	r.held("x", "c")
	r.want(give("d", "y"), CodeOK)
	r.held("x", "c b")
}

func TestFlatAndHierarchicalDoNotMix(t *testing.T) {
	r := newRig(t)
	r.open("a", "b")
	r.want(ask("a", "x/y"), CodeGranted)
	r.want(ask("b", "x/y/z").as(tree), CodeMismatch)
	r.want(ask("b", "x/y").as(tree), CodeMismatch)
	r.want(ask("b", "x").as(tree), CodeGranted)
	r.want(ask("a", "x"), CodeMismatch)
}

func TestAllOrNone(t *testing.T) {
	r := newRig(t)
	r.open("a", "b", "c", "d")
	r.want(ask("a", "y"), CodeGranted)
	r.want(ask("b", "x", "y").try(), CodeHeld)
	r.held("x", "")
	both := r.want(ask("b", "x", "y"), CodeQueued)
	if got := r.want(ask("b", "x", "y"), CodeQueued); got.Ticket != both.Ticket {
		t.Errorf("asked again: ticket %d, want %d", got.Ticket, both.Ticket)
	}
	r.want(ask("b", "y"), CodeConflict)
	r.want(ask("c", "x"), CodeQueued) // behind b
	r.want(ask("d", "z"), CodeGranted)
	r.want(give("a", "y"), CodeOK)
	if r.granted() != "b" || len(r.told[0].Grants) != 2 || r.told[0].Grants[1].Name != "y" {
		t.Fatalf("told %+v, want b granted x and y", r.told)
	}
	if got := r.want(ask("b", "x", "y"), CodeGranted); !slices.Equal(got.Grants, r.m.grants(t, "b", "x", "y")) {
		t.Errorf("asked again: %+v", got.Grants)
	}
	r.want(give("b", "x"), CodeOK)
	r.held("x", "c")
	r.held("y", "b")
	r.want(ask("b", "x", "y"), CodeConflict)
}

// grants returns what session holds of names.
func (m *Machine) grants(t *testing.T, session string, names ...string) (grants []Grant) {
	t.Helper()
	for _, name := range names {
		h, ok := m.HoldOf(name, id(session+"-request"), 0)
		if !ok {
			t.Fatalf("%s does not hold %s", session, name)
		}
		grants = append(grants, Grant{Name: name, RequestID: h.RequestID, Token: h.Token, MinHold: h.MinHold})
	}
	return grants
}

func TestAllOrNoneThatExcludeEachOther(t *testing.T) {
	r := newRig(t)
	r.open("a")
	r.want(ask("a", "x", "x"), CodeInvalid)
	r.want(ask("a", "x", "x").as(asShared), CodeInvalid)
	r.want(ask("a", "x", "x").as(asPermits(1, 4)), CodeInvalid)
	r.want(ask("a", "x/y", "x").as(tree), CodeInvalid)
	mixed := ask("a", "x/y", "x").as(tree)
	mixed.Requests[1].Hierarchical = false
	r.want(mixed, CodeInvalid)
	r.want(ask("a", "x/y", "x").as(tree).as(asShared), CodeGranted)
	r.want(ask("a", "z/1", "z/2", "z/2/3/4").as(tree), CodeInvalid)
	r.want(ask("a", "z/1", "z/2", "z/3/4").as(tree), CodeGranted)
}

func TestAcquireAgain(t *testing.T) {
	r := newRig(t)
	r.open("a", "b")
	first := r.want(ask("a", "x"), CodeGranted)
	before := r.m.Hash()
	if again := r.want(ask("a", "x"), CodeGranted); again.Grants[0] != first.Grants[0] {
		t.Errorf("asked again: %+v, want %+v", again.Grants, first.Grants)
	}
	if r.m.Hash() != before {
		t.Error("asking again changed the state")
	}
	stolen := ask("b", "x")
	stolen.Requests[0].ID = id("a-request")
	r.want(stolen, CodeConflict)
}

func TestReleaseComparesRequestAndToken(t *testing.T) {
	r := newRig(t)
	r.open("a", "b")
	token := r.want(ask("a", "x"), CodeGranted).Grants[0].Token
	other := give("a", "x")
	other.Token = token + 1
	r.want(other, CodeNotHeld)
	r.want(give("b", "x"), CodeNotHeld)
	r.want(give("a", "y"), CodeNotHeld)
	r.held("x", "a")
	mine := give("a", "x")
	mine.Token = token
	r.want(mine, CodeOK)
	r.want(mine, CodeNotHeld)
}

func TestReleaseFromOutsideIsTold(t *testing.T) {
	r := newRig(t)
	r.open("a", "b")
	token := r.want(ask("a", "x"), CodeGranted).Grants[0].Token
	ticket := r.want(ask("b", "x"), CodeQueued).Ticket
	outside := give("b", "x")
	outside.Session = SessionID{}
	r.want(outside, CodeOK)
	if n := r.told[0]; n.Type != NoticeLost || n.Session != sid("b") || n.Ticket != ticket ||
		n.Cause != CauseGivenBack {
		t.Errorf("the waiter was told %+v", n)
	}
	outside = give("a", "x")
	outside.Session = sid("b")
	r.want(outside, CodeOK)
	if n := r.told[0]; n.Type != NoticeLost || n.Session != sid("a") || n.Token != token || n.Cause != CauseGivenBack {
		t.Errorf("the holder was told %+v", n)
	}
}

func TestCancelWait(t *testing.T) {
	r := newRig(t)
	r.open("a", "b", "c")
	cancel := func(session, name string) Command {
		c := give(session, name)
		c.Op = OpCancelWait
		return c
	}
	r.want(ask("a", "x").as(asShared), CodeGranted)
	r.want(ask("b", "x", "y"), CodeQueued)
	r.want(ask("c", "x").as(asShared), CodeQueued)
	r.want(cancel("b", "y"), CodeOK)
	if r.granted() != "c" {
		t.Errorf("told %+v, want c granted: the writer is gone", r.told)
	}
	r.want(cancel("b", "y"), CodeNotHeld)
	if got := r.want(cancel("a", "x"), CodeGranted); got.Grants[0] != r.m.grants(t, "a", "x")[0] {
		t.Errorf("a holds and is told %+v", got)
	}
	r.held("x", "a c")
}

func TestSessionEnds(t *testing.T) {
	for op, want := range map[Op]struct {
		cause Cause
		event EventType
	}{OpExpire: {CauseExpired, EventExpired}, OpCloseSession: {CauseClosed, EventReleased}} {
		r := newRig(t)
		r.open("a", "b")
		r.want(ask("a", "x"), CodeGranted)
		r.want(ask("a", "y"), CodeGranted)
		r.want(ask("b", "z"), CodeGranted)
		r.want(ask("a", "z"), CodeQueued)
		r.want(ask("b", "x", "y"), CodeQueued)
		since := r.m.Revision()
		r.want(Command{Op: op, Session: sid("a")}, CodeOK)
		r.held("x", "b")
		r.held("y", "b")
		if n := r.told[0]; n.Type != NoticeSessionEnded || n.Session != sid("a") || n.Cause != want.cause {
			t.Errorf("told %+v first", n)
		}
		events, _ := r.m.EventsSince(since, 100)
		if got := eventTypes(events); !slices.Equal(got, []EventType{
			EventCancelled, want.event, want.event, EventAcquired, EventAcquired,
		}) {
			t.Errorf("events %v", got)
		}
		r.want(Command{Op: op, Session: sid("a")}, CodeNoSession)
		r.want(ask("a", "x"), CodeNoSession)
		if r.m.SessionOpen(sid("a")) {
			t.Error("the session is open")
		}
	}
}

func eventTypes(events []Event) (types []EventType) {
	for _, e := range events {
		types = append(types, e.Type)
	}
	return types
}

func TestOpenSession(t *testing.T) {
	r := newRig(t)
	r.open("a")
	r.want(ask("a", "x"), CodeGranted)
	r.open("a")
	r.held("x", "a")
	r.want(Command{Op: OpOpenSession, Session: sid("a"), TTL: time.Minute}, CodeConflict)
	r.want(Command{Op: OpOpenSession, Session: sid("b")}, CodeInvalid)
	r.want(Command{Op: OpOpenSession, TTL: time.Second}, CodeInvalid)
	if got := r.m.Sessions(); len(got) != 1 || got[0].SessionTTL != (SessionTTL{sid("a"), time.Second, 0}) {
		t.Errorf("sessions %v", got)
	}
}

func TestMinimumHold(t *testing.T) {
	minimum := func(r *Request) { r.MinHold = time.Minute }
	for what, end := range map[string]Command{
		"release": give("a", "x"),
		"expiry":  {Op: OpExpire, Session: sid("a")},
		"close":   {Op: OpCloseSession, Session: sid("a")},
	} {
		t.Run(what, func(t *testing.T) {
			r := newRig(t)
			r.open("a", "b")
			token := r.want(ask("a", "x").as(minimum), CodeGranted).Grants[0].Token
			r.want(ask("b", "x"), CodeQueued)
			end.Linger = true
			r.want(end, CodeOK)
			if n := r.told[0]; n.Type != NoticeLingering || n.Token != token || n.MinHold != time.Minute ||
				n.Name != "x" {
				t.Errorf("told %+v", n)
			}
			r.held("x", "(a)")
			if _, mine := r.m.HoldOf("x", id("a-request"), 0); mine {
				t.Error("what lingers is held by the request")
			}
			r.want(give("b", "y"), CodeNotHeld)
			back := give("a", "x")
			back.Token, back.Session = token, sid("b")
			r.want(back, CodeNotHeld)
			if left := r.m.Lingering(); len(left) != 1 || left[0].Token != token || left[0].Session != (SessionID{}) {
				t.Errorf("lingering: %+v", left)
			}
			r.want(Command{Op: OpFree, Name: "x", Token: token + 1}, CodeNotHeld)
			r.want(Command{Op: OpFree, Name: "y", Token: token}, CodeNotHeld)
			r.want(Command{Op: OpFree, Name: "x", Token: token}, CodeOK)
			r.held("x", "b")
			r.want(Command{Op: OpFree, Name: "x", Token: r.m.Holder("x").Holders[0].Token}, CodeNotHeld)
		})
	}
}

func TestMinimumHoldThatIsOver(t *testing.T) {
	r := newRig(t)
	r.open("a")
	r.want(ask("a", "x").as(func(r *Request) { r.MinHold = time.Minute }), CodeGranted)
	r.want(ask("a", "y"), CodeGranted)
	over := give("a", "x")
	r.want(over, CodeOK) // without Linger
	without := give("a", "y")
	without.Linger = true // without a minimum
	r.want(without, CodeOK)
	r.held("x", "")
	r.held("y", "")
}

func TestForceRelease(t *testing.T) {
	r := newRig(t)
	r.open("a", "b", "c")
	r.want(ask("a", "x").as(asShared).as(func(r *Request) { r.MinHold = time.Minute }), CodeGranted)
	r.want(ask("b", "x").as(asShared), CodeGranted)
	r.want(ask("c", "x"), CodeQueued)
	away := give("a", "x")
	away.Linger = true
	r.want(away, CodeOK)
	r.held("x", "(a) b")
	force := Command{Op: OpForceRelease, Name: "x", Reason: "pod is gone", By: "root"}
	since := r.m.Revision()
	r.want(force, CodeOK)
	r.held("x", "c")
	if n := r.told[0]; n.Type != NoticeLost || n.Session != sid("b") || n.Cause != CauseForced ||
		n.Detail != "pod is gone" {
		t.Errorf("told %+v", r.told)
	}
	if len(r.told) != 2 || r.granted() != "c" {
		t.Errorf("told %+v, want one loss and one grant", r.told)
	}
	events, _ := r.m.EventsSince(since, 10)
	if got := eventTypes(events); !slices.Equal(got, []EventType{EventFreed, EventForced, EventAcquired}) ||
		events[1].Reason != "pod is gone" || events[1].By != "root" {
		t.Errorf("events %+v", events)
	}
	r.want(give("b", "x"), CodeNotHeld)
	r.want(Command{Op: OpForceRelease, Name: "y"}, CodeNotHeld)
	r.want(Command{Op: OpForceRelease, Name: "x", Reason: "\x00"}, CodeInvalid)
}

func TestForceReleaseLeavesRelatives(t *testing.T) {
	r := newRig(t)
	r.open("a", "b")
	r.want(ask("a", "x/y").as(tree), CodeGranted)
	r.want(Command{Op: OpForceRelease, Name: "x"}, CodeNotHeld)
	r.held("x/y", "a")
}

func TestDeadlock(t *testing.T) {
	r := newRig(t)
	r.open("a", "b", "c")
	r.want(ask("a", "x"), CodeGranted)
	r.want(ask("b", "y"), CodeGranted)
	r.want(ask("c", "z"), CodeGranted)
	r.want(ask("a", "y").under("a"), CodeQueued)
	r.want(ask("b", "z").under("b"), CodeQueued)
	got := r.want(ask("c", "x").under("c"), CodeDeadlock)
	if text := cycleText(got.Cycle); text != "c waits x, a holds x, b holds y, c holds z" {
		t.Errorf("cycle %q", text)
	}
	r.held("z", "c")
	r.want(ask("c", "x"), CodeQueued) // a request under no hold is in no cycle
}

func cycleText(cycle []Blocker) string {
	var steps []string
	for _, b := range cycle {
		does := "holds"
		if b.Waits {
			does = "waits"
		}
		steps = append(steps, fmt.Sprintf("%s %s %s", b.Owner, does, b.Name))
	}
	return strings.Join(steps, ", ")
}

func TestDeadlockThroughTheQueue(t *testing.T) {
	r := newRig(t)
	r.open("a", "b", "c")
	r.want(ask("a", "x").as(asShared), CodeGranted)
	r.want(ask("b", "y"), CodeGranted)
	r.want(ask("b", "x").under("b"), CodeQueued) // behind a's shared hold
	r.want(ask("c", "z"), CodeGranted)
	r.want(ask("c", "x").under("c").as(asShared), CodeQueued) // behind b's place in the queue, not behind a
	got := r.want(ask("a", "z").under("a"), CodeDeadlock)
	if text := cycleText(got.Cycle); text != "a waits z, c holds z, b waits x, a holds x" {
		t.Errorf("cycle %q", text)
	}
}

func TestNobodyWaitsForThoseBehind(t *testing.T) {
	r := newRig(t)
	r.open("holder", "first", "second", "newcomer")
	r.want(ask("holder", "x"), CodeGranted)
	r.want(ask("newcomer", "y"), CodeGranted)
	r.want(ask("first", "z"), CodeGranted)
	r.want(ask("first", "x").under("first"), CodeQueued)
	r.want(ask("second", "x", "y").under("second"), CodeQueued) // waits for first and newcomer, who do not wait for it
	r.want(ask("newcomer", "z").under("newcomer"), CodeQueued)
}

func TestNoDeadlockWithinASession(t *testing.T) {
	r := newRig(t)
	r.open("a")
	named := func(c Command, request string, under ...string) Command {
		c = c.as(func(r *Request) { r.ID = id(request) })
		for _, u := range under {
			c.Under = append(c.Under, id(u))
		}
		return c
	}
	r.want(named(ask("a", "x"), "r1"), CodeGranted)
	r.want(named(ask("a", "y"), "r2"), CodeGranted)
	r.want(named(ask("a", "y"), "r3"), CodeQueued)
	r.want(named(ask("a", "x"), "r4"), CodeQueued)
	// Work under a hold that waits for that hold is a deadlock, though.
	r.want(named(ask("a", "x"), "r5", "r1"), CodeDeadlock)
	r.want(named(ask("a", "y"), "r6", "r1"), CodeQueued)
	r.want(named(ask("a", "x"), "r7", "r2"), CodeDeadlock)
}

// What work holds for different times hangs on different sessions.
func TestDeadlockAcrossSessions(t *testing.T) {
	r := newRig(t)
	r.open("a", "a2", "b")
	r.want(ask("a", "x"), CodeGranted)
	r.want(ask("b", "y"), CodeGranted)
	r.want(ask("b", "x").under("b"), CodeQueued)
	got := r.want(ask("a2", "y").under("a"), CodeDeadlock)
	if text := cycleText(got.Cycle); text != "a2 waits y, b holds y, a holds x" {
		t.Errorf("cycle %q", text)
	}
}

// Two requests under one hold that want the same name wait for each other like strangers.
func TestSiblingsQueue(t *testing.T) {
	r := newRig(t)
	r.open("parent", "one", "two", "other")
	r.want(ask("parent", "x"), CodeGranted)
	r.want(ask("one", "y").under("parent"), CodeGranted)
	r.want(ask("two", "y").under("parent"), CodeQueued)
	// One would wait for the parent, which the sibling's wait for one keeps from being released.
	got := r.want(ask("one", "x").under("one"), CodeDeadlock)
	if text := cycleText(got.Cycle); text != "one waits x, parent holds x, one holds y" {
		t.Errorf("cycle %q", text)
	}
	// A hold that was released is nobody's ancestor.
	r.want(give("parent", "x"), CodeOK)
	r.want(ask("other", "x"), CodeGranted)
	r.want(ask("one", "x").under("one"), CodeQueued)
}

// A lingering hold has no owner that could wait: it ends by itself.
func TestWhatLingersIsNoDeadlock(t *testing.T) {
	r := newRig(t)
	r.open("a")
	minimum := func(r *Request) { r.MinHold = time.Minute }
	r.want(ask("a", "x").as(minimum), CodeGranted)
	release := give("a", "x")
	release.Linger = true
	r.want(release, CodeOK)
	r.held("x", "(a)")
	r.want(ask("a", "x").under("a").as(func(r *Request) { r.ID = id("another") }), CodeQueued)
}

// The cycle names the contended name, not other names of the request or names below it.
func TestCycleNamesWhatIsContended(t *testing.T) {
	r := newRig(t)
	r.open("a", "b", "c")
	r.want(ask("a", "y/z").as(tree), CodeGranted)
	r.want(ask("b", "x"), CodeGranted)
	r.want(ask("b", "y").as(tree).under("b"), CodeQueued)
	got := r.want(ask("a", "w", "x").under("a").as(func(r *Request) { r.ID = id("another") }), CodeDeadlock)
	if text := cycleText(got.Cycle); text != "a waits x, b holds x, a holds y" {
		t.Errorf("cycle %q", text)
	}
}

func TestPermitsAreALinkOnlyIfNobodyElseCanMakeRoom(t *testing.T) {
	r := newRig(t)
	r.open("a", "b", "c")
	r.want(ask("a", "pool").as(asPermits(1, 2)), CodeGranted)
	r.want(ask("b", "pool").as(asPermits(1, 2)), CodeGranted)
	r.want(ask("c", "x"), CodeGranted)
	r.want(ask("a", "x").under("a"), CodeQueued)
	r.want(ask("c", "pool").as(asPermits(2, 2)).under("c"), CodeDeadlock) // needs a's permit in any case
	r.want(ask("c", "pool").as(asPermits(1, 2)).under("c"), CodeQueued)   // b's will do
}

func TestDeadlockSearchIsBounded(t *testing.T) {
	r := newRig(t)
	limits := DefaultLimits()
	limits.DeadlockSteps = 2
	r.want(Command{Op: OpSetLimits, Limits: &limits}, CodeOK)
	r.open("a", "b", "c")
	for i, s := range []string{"a", "b", "c"} {
		r.want(ask(s, string(rune('x'+i))), CodeGranted)
	}
	r.want(ask("a", "y").under("a"), CodeQueued)
	r.want(ask("b", "z").under("b"), CodeQueued)
	r.want(ask("c", "x").under("c"), CodeQueued) // three steps away
}

func TestSequence(t *testing.T) {
	r := newRig(t)
	r.open("a", "b")
	numbered := func(c Command, seq, acked uint64) Command {
		c.Seq, c.Acked = seq, acked
		return c
	}
	r.want(ask("b", "y"), CodeGranted)
	first := r.want(numbered(ask("a", "x"), 1, 0), CodeGranted)
	r.want(numbered(ask("a", "y"), 2, 0), CodeQueued)
	held := r.want(numbered(ask("a", "y").try().as(func(r *Request) { r.ID = id("other") }), 3, 0), CodeHeld)

	if got := r.want(numbered(ask("a", "x"), 1, 0), CodeGranted); got.Grants[0] != first.Grants[0] {
		t.Errorf("retried: %+v, want %+v", got.Grants, first.Grants)
	}
	r.want(give("b", "y"), CodeOK)
	granted := r.told[0].Grants
	if got := r.want(numbered(ask("a", "y"), 2, 0), CodeGranted); !slices.Equal(got.Grants, granted) {
		t.Errorf("retried after the wait: %+v, want %+v", got.Grants, granted)
	}
	if got := r.want(numbered(ask("a", "y").try(), 3, 0), CodeHeld); *got.Holder != *held.Holder {
		t.Errorf("retried: in the way is %+v, want %+v", got.Holder, held.Holder)
	}

	r.want(numbered(give("a", "x"), 4, 0), CodeOK)
	r.want(numbered(give("a", "x"), 4, 0), CodeOK)
	r.want(numbered(ask("a", "x"), 1, 0), CodeNotHeld) // the machine does not grant it again
	r.held("x", "")
	r.want(numbered(give("a", "x"), 1, 0), CodeConflict)

	r.want(numbered(ask("a", "z"), 5, 4), CodeGranted)
	r.want(numbered(ask("a", "x"), 1, 0), CodeStale)
	r.want(numbered(ask("a", "x"), 4, 0), CodeStale)
	r.held("x", "")
	r.want(numbered(ask("a", "x"), 6, 6), CodeInvalid)
	if s := r.m.sessions[sid("a")]; len(s.results) != 1 || s.acked != 4 {
		t.Errorf("%d results are remembered up from %d, want 1 from 4", len(s.results), s.acked)
	}
}

func TestGivenUpBeforeItArrives(t *testing.T) {
	r := newRig(t)
	r.open("a")
	late := ask("a", "x")
	late.Seq = 7
	up := give("a", "x")
	up.Seq, up.Target = 8, 7
	r.want(up, CodeNotHeld)
	r.want(late, CodeCancelled)
	r.want(late, CodeCancelled)
	r.held("x", "")

	inTime := ask("a", "x")
	inTime.Seq = 9
	r.want(inTime, CodeGranted)
	up.Seq, up.Target = 0, 9
	r.want(up, CodeOK)
	r.want(inTime, CodeNotHeld)
}

func TestLimits(t *testing.T) {
	low := Limits{
		Sessions: 2, Holds: 3, Waits: 2, WaitersPerName: 1, Unacked: 2, Requests: 2, NameBytes: 8, Levels: 2,
		MetadataBytes: 4, DeadlockSteps: 10, ClientShare: 25,
	}
	r := newRig(t)
	r.want(Command{Op: OpSetLimits, Limits: &low}, CodeOK)
	if r.m.Limits() != low {
		t.Errorf("limits %+v, want %+v", r.m.Limits(), low)
	}
	limit := func(c Command, field string) {
		t.Helper()
		before := r.m.Hash()
		if got := r.want(c, CodeLimit); got.Field != field {
			t.Errorf("the limit is %s, want %s", got.Field, field)
		}
		if r.m.Hash() != before {
			t.Errorf("beyond %s: the state changed", field)
		}
	}
	r.open("a", "b")
	limit(Command{Op: OpOpenSession, Session: sid("c"), TTL: 1}, "Sessions")
	limit(ask("a", "x", "y", "z"), "Requests")
	limit(ask("a", "123456789"), "NameBytes")
	limit(ask("a", "x/y/z").as(tree), "Levels")
	limit(ask("a", "x").as(func(r *Request) { r.Metadata = map[string]string{"key": "it"} }), "MetadataBytes")
	r.want(ask("a", "x"), CodeGranted)
	r.want(ask("a", "y"), CodeGranted)
	r.want(ask("b", "x"), CodeQueued)
	limit(ask("b", "x").as(func(r *Request) { r.ID = id("more") }), "WaitersPerName")
	r.want(ask("b", "y"), CodeQueued)
	limit(ask("a", "1", "2"), "Holds")
	r.want(ask("a", "z"), CodeGranted)
	limit(ask("b", "z"), "Holds")
	r.want(give("a", "z"), CodeOK)
	seq := func(n uint64) Command {
		c := give("a", "none")
		c.Seq = n
		return c
	}
	r.want(seq(1), CodeNotHeld)
	r.want(seq(2), CodeNotHeld)
	limit(seq(3), "Unacked")

	for what, l := range map[string]*Limits{"none": nil, "zero": {}} {
		if got := r.apply(Command{Op: OpSetLimits, Limits: l}).Code; got != CodeInvalid {
			t.Errorf("%s: code %d, want CodeInvalid", what, got)
		}
	}
}

func TestWaitsLimit(t *testing.T) {
	low := DefaultLimits()
	low.Waits = 1
	r := newRig(t)
	r.want(Command{Op: OpSetLimits, Limits: &low}, CodeOK)
	r.open("a", "b")
	r.want(ask("a", "x", "y"), CodeGranted)
	r.want(ask("b", "x"), CodeQueued)
	if got := r.want(ask("b", "y"), CodeLimit); got.Field != "Waits" {
		t.Errorf("the limit is %s", got.Field)
	}
}

func TestInvalid(t *testing.T) {
	r := newRig(t)
	r.open("a")
	with := func(change func(*Request)) Command { return ask("a", "x").as(change) }
	for field, commands := range map[string][]Command{
		"Name": {
			ask("a", ""), ask("a", strings.Repeat("n", 513)), ask("a", "\xff"), ask("a", "tab\t"), ask("a", "\u0085"),
		},
		"RequestID": {
			with(func(r *Request) { r.ID = "" }), with(func(r *Request) { r.ID = "short" }),
			with(func(r *Request) { r.ID = strings.Repeat("i", 129) }), with(func(r *Request) { r.ID = id("né") }),
		},
		"Owner": {
			with(func(r *Request) { r.Owner = strings.Repeat("o", 257) }), with(func(r *Request) { r.Owner = "\n" }),
		},
		"HoldID": {
			with(func(r *Request) { r.HoldID = strings.Repeat("o", 65) }), with(func(r *Request) { r.HoldID = "a b" }),
		},
		"Kind":         {with(func(r *Request) { r.Kind = 3 })},
		"Permits":      {with(asPermits(0, 1)), with(asPermits(2, 1)), with(func(r *Request) { r.Limit = 1 })},
		"Hierarchical": {with(asPermits(1, 1)).as(tree)},
		"MinHold":      {with(func(r *Request) { r.MinHold = -1 })},
		"Metadata":     {with(func(r *Request) { r.Metadata = map[string]string{"a": "\xff"} })},
		"Requests":     {{Op: OpAcquire, Session: sid("a")}},
		"Session":      {{Op: OpAcquire, Requests: ask("a", "x").Requests}, {Op: OpExpire}},
		"Seq":          {{Op: OpExpire, Session: sid("a"), Seq: 1}, {Op: OpRelease, Seq: 1, Name: "x"}},
		"Target": {
			{Op: OpRelease, Target: 1, Name: "x"}, {Op: OpRelease, Session: sid("a"), Seq: 1, Target: 1, Name: "x"},
			{Op: OpAcquire, Session: sid("a"), Target: 1},
		},
	} {
		for i, c := range commands {
			before := r.m.Hash()
			if got := r.want(c, CodeInvalid); got.Field != field || got.Detail == "" {
				t.Errorf("%s %d: refused for %q: %q", field, i, got.Field, got.Detail)
			}
			if r.m.Hash() != before {
				t.Errorf("%s %d: the state changed", field, i)
			}
		}
	}
}

func TestUnknown(t *testing.T) {
	r := newRig(t)
	r.want(Command{}, CodeUnknown)
	before := r.m.Hash()
	r.want(Command{Op: 999, Payload: []byte("x")}, CodeUnknown)
	r.want(Command{Op: OpRaiseLevel, Level: MaxLevel + 1}, CodeUnknown)
	if r.m.Hash() != before {
		t.Error("the state changed")
	}
	r.want(Command{Op: OpRaiseLevel, Level: MaxLevel}, CodeOK)
	r.want(Command{Op: OpRaiseLevel, Level: firstLevel}, CodeOK)
	if r.m.Level() != MaxLevel {
		t.Errorf("the level is %d", r.m.Level())
	}
}

func TestEvents(t *testing.T) {
	m := New(4)
	r := &rig{T: t, m: m}
	r.open("a")
	if got, err := m.EventsSince(m.Revision(), 10); m.Revision() == 0 || len(got) != 0 || err != nil {
		t.Errorf("at the beginning: %v, %v", got, err)
	}
	for range 3 {
		r.want(ask("a", "x"), CodeGranted)
		r.want(give("a", "x"), CodeOK)
	}
	got, err := m.EventsSince(3, 10)
	if err != nil || len(got) != 4 || got[0].Revision != 4 || got[3].Revision != 7 || got[0].Type != EventAcquired ||
		got[0].Token != 4 || got[1].Type != EventReleased || got[1].Token != 4 || got[1].Owner != "a" ||
		got[1].At != 1 {
		t.Errorf("since 3: %+v, %v", got, err)
	}
	if got, err := m.EventsSince(4, 2); err != nil || len(got) != 2 || got[1].Revision != 6 {
		t.Errorf("two since 4: %+v, %v", got, err)
	}
	compacted := (*CompactedError)(nil)
	if _, err := m.EventsSince(2, 10); !errors.As(err, &compacted) || compacted.Revision != 3 || compacted.Since != 2 {
		t.Errorf("since 2: %v", err)
	}
	if _, err := m.EventsSince(8, 10); !errors.Is(err, ErrAhead) {
		t.Errorf("since 8: %v, want ErrAhead", err)
	}
}

func TestList(t *testing.T) {
	r := newRig(t)
	r.open("a", "b")
	for _, name := range []string{"p/1", "p/3", "q", "p/2"} {
		r.want(ask("a", name), CodeGranted)
	}
	r.want(ask("a", "tree/x").as(tree), CodeGranted)
	r.want(ask("b", "q"), CodeQueued)
	names := func(prefix, after string, limit int) string {
		infos, more := r.m.List(prefix, after, limit)
		var all []string
		for _, info := range infos {
			all = append(all, fmt.Sprintf("%s:%d+%d", info.Name, len(info.Holders), info.Waiters))
		}
		return fmt.Sprint(strings.Join(all, " "), " ", more)
	}
	for _, c := range []struct {
		prefix, after string
		limit         int
		want          string
	}{
		{"", "", 10, "p/1:1+0 p/2:1+0 p/3:1+0 q:1+1 tree/x:1+0 false"},
		{"p/", "", 2, "p/1:1+0 p/2:1+0 true"},
		{"p/", "p/2", 2, "p/3:1+0 false"},
		{"z", "", 2, " false"},
		{"", "", 0, " true"},
	} {
		if got := names(c.prefix, c.after, c.limit); got != c.want {
			t.Errorf("List(%q, %q, %d) = %q, want %q", c.prefix, c.after, c.limit, got, c.want)
		}
	}
}

func TestSessionShowsWhatHangsOnIt(t *testing.T) {
	r := newRig(t)
	r.open("a", "b")
	meta := map[string]string{"job": "nightly"}
	token := r.want(ask("a", "x").as(func(r *Request) { r.Metadata = meta }), CodeGranted).Grants[0].Token
	r.want(ask("b", "y"), CodeGranted)
	ticket := r.want(ask("a", "y"), CodeQueued).Ticket
	s, ok := r.m.Session(sid("a"))
	if !ok || s.TTL != time.Second || len(s.Holds) != 1 || len(s.Waits) != 1 {
		t.Fatalf("session %+v", s)
	}
	if h := s.Holds[0]; h.Token != token || h.Metadata["job"] != "nightly" || h.Since != 1 || h.Session != s.ID {
		t.Errorf("hold %+v", h)
	}
	if w := s.Waits[0]; w.Ticket != ticket || w.Requests[0].Name != "y" {
		t.Errorf("wait %+v", w)
	}
	if _, ok := r.m.Session(sid("c")); ok {
		t.Error("a session that is not open was found")
	}
	if h, ok := r.m.HoldOf("x", id("a-request"), token); !ok || h.Token != token {
		t.Errorf("HoldOf = %+v, %v", h, ok)
	}
	if _, ok := r.m.HoldOf("x", id("a-request"), fencing.Token(99)); ok {
		t.Error("HoldOf found another token")
	}
}

func TestRevisionsRunOutBeforeTheMark(t *testing.T) {
	r := newRig(t)
	r.open("a")
	r.want(ask("a", "x"), CodeGranted)
	r.m.revision = maxRevision
	r.m.past.base = maxRevision
	r.m.past.events = nil
	if got := r.want(ask("a", "y"), CodeLimit); got.Field != "Revision" {
		t.Errorf("the limit is %s", got.Field)
	}
	r.want(give("a", "x"), CodeOK)
}
