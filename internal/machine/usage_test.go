package machine

import (
	"testing"
	"time"
)

// A client uses up its share, and another client still gets its locks; the machine grants repeats to the first one.
func TestClientShare(t *testing.T) {
	r := newRig(t)
	limits := DefaultLimits()
	limits.Sessions, limits.Holds, limits.Waits, limits.ClientShare = 8, 8, 8, 25
	r.want(Command{Op: OpSetLimits, Limits: &limits}, CodeOK)
	open := func(s, client string, code Code) Result {
		return r.want(Command{Op: OpOpenSession, Session: sid(s), TTL: time.Second, Client: client}, code)
	}
	open("a", "mallory", CodeInvalid) // members of this level do not know it
	r.want(Command{Op: OpRaiseLevel, Level: LevelDeadlines}, CodeOK)
	open("a", "mallory", CodeOK)
	open("b", "mallory", CodeOK)
	open("a", "mallory", CodeOK) // repeated
	full := func(got Result, field string) {
		t.Helper()
		if got.Field != field {
			t.Errorf("refused for %q, want %q", got.Field, field)
		}
	}
	full(open("c", "mallory", CodeLimit), "ClientSessions")
	open("x", "alice", CodeOK)
	open("y", "", CodeOK)

	r.want(ask("a", "1"), CodeGranted)
	r.want(ask("b", "2"), CodeGranted)
	r.want(ask("a", "1"), CodeGranted) // repeated
	full(r.want(ask("b", "3"), CodeLimit), "ClientHolds")
	r.want(ask("x", "3"), CodeGranted)
	r.want(give("b", "2"), CodeOK)
	for _, name := range []string{"4", "5", "6"} {
		r.want(ask("y", name), CodeGranted) // nobody's sessions have no share
	}
	r.want(ask("a", "4"), CodeQueued)
	r.want(ask("b", "4"), CodeQueued)
	full(r.want(ask("b", "5"), CodeLimit), "ClientWaits")
	r.want(ask("x", "5"), CodeQueued)
	r.want(give("y", "4"), CodeOK) // a grant to who waits is never refused

	r.want(Command{Op: OpCloseSession, Session: sid("a")}, CodeOK)
	open("c", "mallory", CodeOK)
}
