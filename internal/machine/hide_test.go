package machine

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/principal"
)

// hiding is a rig that proposes commands as the leader of the present level does.
type hiding struct{ *rig }

// hidden is c as a leader proposes it from LevelHiddenIDs on.
func hidden(t *testing.T, c Command) Command {
	t.Helper()
	c.Requests = slices.Clone(c.Requests)
	if bad := c.HideRequests(NewSeal(c.Session)); bad != nil {
		t.Fatalf("%+v: %+v", c, bad)
	}
	c.Session = c.Session.Hidden()
	return c
}

func (r hiding) want(c Command, code Code) Result { return r.rig.want(hidden(r.T, c), code) }

// secrets are the ids that the machine knows before the level is raised.
func secrets(m *Machine) (all [][]byte) {
	for _, s := range m.sessions {
		all = append(all, s.id[:])
	}
	for _, h := range m.holds {
		all = append(all, []byte(h.ID))
	}
	for _, w := range m.waits {
		for _, r := range w.requests {
			all = append(all, []byte(r.ID))
		}
		for _, id := range w.under {
			all = append(all, []byte(id))
		}
	}
	return all
}

// Raising the level removes every id from the state and changes nothing else: a client finds its holds and waits by
// the ids that it knows, and nothing in the snapshot finds them.
func TestRaisingTheLevelHidesTheIDs(t *testing.T) {
	r := busy(t)
	before := r.m.Sessions()
	known, names := secrets(r.m), r.m.Holder("x").Holders[0]
	if data := snapshot(t, r.m); !bytes.Contains(data, known[0]) {
		t.Fatal("the test does not see ids")
	}
	copied := New(8)
	if err := copied.Restore(bytes.NewReader(snapshot(t, r.m))); err != nil {
		t.Fatal(err)
	}
	raise := Command{Op: OpRaiseLevel, Level: LevelHiddenIDs}
	r.want(raise, CodeOK)
	copied.Apply(r.m.now, &raise)
	checkState(t, r.m)
	if copied.Hash() != r.m.Hash() {
		t.Error("one that has its state from a snapshot comes to another state")
	}
	data := snapshot(t, r.m)
	for _, id := range known {
		if bytes.Contains(data, id) {
			t.Errorf("the snapshot contains %q", id)
		}
	}
	if err := copied.Restore(bytes.NewReader(data)); err != nil || copied.Hash() != r.m.Hash() {
		t.Errorf("the snapshot is read as another state, %v", err)
	}
	checkState(t, copied)
	if after := r.m.Sessions(); len(after) != len(before) {
		t.Errorf("%d sessions, before %d", len(after), len(before))
	}

	// Each client finds its holds and waits.
	h := hiding{r}
	page, open := r.m.SessionPage(sid("a").Hidden(), "", 100)
	if !open {
		t.Fatal("a session is gone")
	}
	seal := NewSeal(sid("a"))
	for _, e := range page.Entries {
		if got := seal.Open(e.RequestID, e.Sealed); got != id("a-request") {
			t.Errorf("%s: the request is %q", e.Name, got)
		}
	}
	again := h.want(ask("a", "x").as(func(r *Request) { r.HoldID = "of-a" }), CodeGranted)
	if again.Grants[0].Token != names.Token {
		t.Errorf("asked again: token %d, want %d", again.Grants[0].Token, names.Token)
	}
	h.want(ask("b", "x", "y").under("c"), CodeQueued)
	numbered := ask("b", "x").try().as(func(r *Request) { r.ID = id("b-other") })
	numbered.Seq = 3
	if again := h.want(numbered, CodeHeld); again.Holder.Session != sid("a").Hidden() {
		t.Errorf("the remembered answer names session %v", again.Holder.Session)
	}

	// A thief with the snapshot can take nothing.
	h.open("thief")
	for _, s := range r.m.Sessions() {
		for _, e := range entriesOf(r.m, s.ID) {
			stolen := hidden(t, Command{Op: OpMove, Session: sid("thief"), Name: e.Name, RequestID: e.RequestID})
			if len(e.Sealed) >= minIDBytes && validID(e.Sealed, minIDBytes, maxIDBytes) {
				t.Errorf("%s: what is sealed looks like an id: %q", e.Name, e.Sealed)
			}
			r.want(stolen, CodeNotHeld)
		}
		r.want(hidden(t, Command{Op: OpRenew, Session: s.ID}), CodeNoSession)
	}

	// The holder gives the name back, and the waiter has it.
	h.want(give("a", "x"), CodeOK)
	last := r.told[len(r.told)-1]
	waiter := NewSeal(sid("b"))
	if last.Type != NoticeGranted || last.Session != sid("b").Hidden() ||
		waiter.Open(last.Grants[0].RequestID, last.Grants[0].Sealed) != id("b-request") {
		t.Errorf("told: %+v", last)
	}
}

func entriesOf(m *Machine, s SessionID) []SessionEntry {
	page, _ := m.SessionPage(s, "", 1000)
	return page.Entries
}

func (r hiding) open(sessions ...string) {
	for _, s := range sessions {
		r.want(Command{Op: OpOpenSession, Session: sid(s), TTL: time.Minute}, CodeOK)
	}
}

// A request that moves is sealed for the session to which it moves, one by one of a set.
func TestMoveSealsAnew(t *testing.T) {
	r := newRig(t)
	r.want(Command{Op: OpRaiseLevel, Level: LevelHiddenIDs}, CodeOK)
	h := hiding{r}
	h.open("a", "b", "c")
	h.want(ask("a", "x"), CodeGranted)
	set := ask("b", "x", "y")
	set.Requests[1].ID = id("b-second")
	h.want(set, CodeQueued)
	move := func(to, name, request string) Command {
		return Command{Op: OpMove, Session: sid(to), Name: name, RequestID: id(request)}
	}
	ids := func(session string) string {
		var all []string
		for _, e := range entriesOf(r.m, sid(session).Hidden()) {
			all = append(all, e.Name+"="+strings.TrimRight(NewSeal(sid(session)).Open(e.RequestID, e.Sealed), "-"))
		}
		return strings.Join(all, " ")
	}
	h.want(move("c", "x", "a-request"), CodeGranted)
	h.want(move("a", "x", "b-request"), CodeQueued)
	if got := ids("a"); got != "x=b-request y=" {
		t.Errorf("after one of a set has moved: %s", got)
	}
	h.want(move("a", "y", "b-second"), CodeQueued)
	if a, c := ids("a"), ids("c"); a != "x=b-request y=b-second" || c != "x=a-request" {
		t.Errorf("after all have moved: %s; %s", a, c)
	}
	checkState(t, r.m)
}

// Another principal can neither open a session again nor take over its holds.
func TestSessionsBelongToPrincipals(t *testing.T) {
	r := newRig(t)
	open := func(session string, p principal.Principal, client string) Command {
		return Command{Op: OpOpenSession, Session: sid(session), TTL: time.Minute, Client: client, Principal: p}
	}
	r.want(Command{Op: OpRaiseLevel, Level: LevelNonces}, CodeOK)
	ann, bob := principal.Certificate("ann"), principal.Certificate("bob")
	r.want(open("new", ann, "certificate ann"), CodeInvalid) // members of this level do not know it
	r.want(open("old", "", "certificate ann"), CodeOK)
	r.want(open("plain", "", "address ::1"), CodeOK)
	r.want(open("process", "", ""), CodeOK)
	r.want(open("door", "", "http"), CodeOK)
	r.want(Command{Op: OpRaiseLevel, Level: LevelHiddenIDs}, CodeOK)
	h := hiding{r}
	h.want(open("ann", ann, "certificate ann"), CodeOK)
	h.want(open("bob", bob, "certificate bob"), CodeOK)
	h.want(open("bob", ann, "certificate ann"), CodeDenied)
	for session, want := range map[string]principal.Principal{
		"old": ann, "plain": "", "process": principal.Process, "door": principal.Process, "ann": ann, "bob": bob,
	} {
		if got, open := r.m.Principal(sid(session).Hidden()); !open || got != want {
			t.Errorf("session %s: principal %q, want %q", session, got, want)
		}
	}
	h.want(ask("ann", "x"), CodeGranted)
	h.want(ask("old", "x"), CodeQueued)
	move := func(to, request string) Command {
		return Command{Op: OpMove, Session: sid(to), Name: "x", RequestID: id(request)}
	}
	for _, thief := range []string{"bob", "plain"} {
		h.want(move(thief, "ann-request"), CodeDenied)
		h.want(move(thief, "old-request"), CodeDenied)
	}
	end := func(op Op, session, request string, p principal.Principal) Command {
		return Command{Op: op, Session: sid(session), Name: "x", RequestID: id(request), Principal: p}
	}
	for _, op := range []Op{OpRelease, OpCancelWait} {
		for _, request := range []string{"ann-request", "old-request"} {
			h.want(end(op, "bob", request, bob), CodeDenied)
			h.want(end(op, "plain", request, principal.Nobody), CodeDenied)
			c := end(op, "", request, bob)
			c.Session = SessionID{}
			h.want(c, CodeDenied)
		}
	}
	h.want(end(OpCancelWait, "old", "ann-request", ann), CodeGranted)
	h.want(move("old", "ann-request"), CodeGranted)
	h.want(move("ann", "old-request"), CodeQueued)
	if err := r.m.Restore(bytes.NewReader(snapshot(t, r.m))); err != nil {
		t.Fatal(err)
	}
	h.want(move("bob", "ann-request"), CodeDenied)
	h.want(end(OpRelease, "ann", "ann-request", ann), CodeOK)
	h.want(move("process", "old-request"), CodeGranted)
}
