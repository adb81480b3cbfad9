package machine

import (
	"bytes"
	"strings"
	"testing"
)

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
	s := busy(t)
	before, known := s.m.Sessions(), secrets(s.m)
	if data := snapshot(t, s.m); !bytes.Contains(data, known[0]) {
		t.Fatal("the test does not see ids")
	}
	s.wantTold("ok", "raise level=4")
	data := snapshot(t, s.m)
	for _, id := range known {
		if bytes.Contains(data, id) {
			t.Errorf("the snapshot contains %q", id)
		}
	}
	if after := s.m.Sessions(); len(after) != len(before) {
		t.Errorf("%d sessions, before %d", len(after), len(before))
	}

	// Each client finds its holds and waits.
	if got := s.requests("a"); got != "kept=a t/1/2=a x=a z=a" {
		t.Errorf("the requests of a: %s", got)
	}
	s.wantTold(`a: granted x (token 2)
b: queued with ticket 8
b: refused: a holds x`, "acquire a x hold=of-a", "acquire b x y under=c wait", "acquire b x id=b-other seq=3")

	// A thief with the snapshot can take nothing.
	s.tell("open thief")
	for _, victim := range s.m.Sessions() {
		for _, e := range entriesOf(s.m, victim.ID) {
			if len(e.Sealed) >= minIDBytes && validID(e.Sealed, minIDBytes, maxIDBytes) {
				t.Errorf("%s: the sealed id looks like an id: %q", e.Name, e.Sealed)
			}
			stolen := Command{Op: OpMove, Session: sid("thief"), Name: e.Name, RequestID: e.RequestID}
			if got := s.apply(stolen); got != "not held" {
				t.Errorf("the thief moves %s: %s", e.Name, got)
			}
		}
		if got := s.apply(Command{Op: OpRenew, Session: victim.ID}); got != "no session" {
			t.Errorf("the thief renews a session: %s", got)
		}
	}

	// The holder releases the name, and the waiter has it.
	s.wantTold("a: ok; to b: ticket 8 is granted x (token 10), y (token 11)", "release a x")
}

func entriesOf(m *Machine, s SessionID) []SessionEntry {
	page, _ := m.SessionPage(s, "", 1000)
	return page.Entries
}

// requests returns the names of a session with the ids that its client reads.
func (s *story) requests(session string) string {
	var all []string
	for _, e := range entriesOf(s.m, sid(session).Hidden()) {
		all = append(all, e.Name+"="+strings.TrimRight(NewSeal(sid(session)).Open(e.RequestID, e.Sealed), "-"))
	}
	return strings.Join(all, " ")
}

// A request that moves is sealed for its new session. The requests of a set move one by one.
func TestMoveSealsAnew(t *testing.T) {
	s := newStory(t, 8)
	s.tell("raise level=4", "open a,b,c", "acquire a x id=first", "acquire b x y=id:second wait", "move a x id=first to=c",
		"move b x to=a")
	if got := s.requests("a"); got != "x=b y=" {
		t.Errorf("after one of a set has moved: %s", got)
	}
	s.tell("move b y id=second to=a")
	if a, c := s.requests("a"), s.requests("c"); a != "x=b y=second" || c != "x=first" {
		t.Errorf("after all have moved: %s; %s", a, c)
	}
}
