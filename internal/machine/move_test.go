package machine

import (
	"testing"

	"github.com/fencelock/fencelock/fencing"
)

func moving(session, of, name string) Command {
	return Command{Op: OpMove, Session: sid(session), Name: name, RequestID: ask(of, name).Requests[0].ID}
}

func TestHoldMovesToAnotherSession(t *testing.T) {
	r := newRig(t)
	r.open("a", "b")
	first := r.want(ask("a", "x"), CodeGranted).Grants[0]
	moved := r.want(moving("b", "a", "x"), CodeGranted).Grants[0]
	if moved.Token != first.Token {
		t.Errorf("token %v after the move, want %v", moved.Token, first.Token)
	}
	if len(r.told) != 1 || r.told[0].Cause != CauseMoved || r.told[0].Session != sid("a") ||
		r.told[0].Token != first.Token {
		t.Errorf("the old session was told %+v", r.told)
	}
	r.want(moving("b", "a", "x"), CodeGranted)
	if len(r.told) != 0 {
		t.Errorf("a move to where it is was told: %+v", r.told)
	}
	r.want(Command{Op: OpExpire, Session: sid("a")}, CodeOK)
	if info := r.m.Holder("x"); len(info.Holders) != 1 || info.Holders[0].Session != sid("b") {
		t.Errorf("after the end of the old session: %+v", info)
	}
	r.want(Command{Op: OpExpire, Session: sid("b")}, CodeOK)
	if info := r.m.Holder("x"); len(info.Holders) != 0 {
		t.Errorf("after the end of the new session: %+v", info)
	}
}

func TestMoveTakesOnlyWhatIsNamed(t *testing.T) {
	r := newRig(t)
	r.open("a", "b")
	r.want(moving("b", "a", "x"), CodeNotHeld)
	held := r.want(ask("a", "x"), CodeGranted).Grants[0]
	c := moving("b", "a", "x")
	c.Token = held.Token + 1
	r.want(c, CodeNotHeld)
	c.Token = held.Token
	r.want(c, CodeGranted)
	r.want(Command{Op: OpMove, Session: sid("none"), Name: "x", RequestID: c.RequestID}, CodeNoSession)
	r.want(Command{Op: OpMove, Name: "x", RequestID: c.RequestID}, CodeInvalid)
}

func TestWaitKeepsItsPlaceWhenItMoves(t *testing.T) {
	r := newRig(t)
	r.open("holder", "a", "b", "c")
	held := r.want(ask("holder", "x"), CodeGranted).Grants[0]
	ticket := r.want(ask("a", "x"), CodeQueued).Ticket
	r.want(ask("b", "x"), CodeQueued)
	c := moving("c", "a", "x")
	c.Token = 1
	r.want(c, CodeNotHeld) // a token names a hold
	c.Token = 0
	if got := r.want(c, CodeQueued).Ticket; got != ticket {
		t.Errorf("ticket %d after the move, want %d", got, ticket)
	}
	if len(r.told) != 1 || r.told[0].Cause != CauseMoved || r.told[0].Session != sid("a") ||
		r.told[0].Ticket != ticket {
		t.Errorf("the old session was told %+v", r.told)
	}
	r.want(Command{Op: OpExpire, Session: sid("a")}, CodeOK)
	r.want(Command{Op: OpRelease, Name: "x", RequestID: held.RequestID, Token: held.Token}, CodeOK)
	if i := len(r.told) - 1; i < 0 || r.told[i].Type != NoticeGranted || r.told[i].Session != sid("c") {
		t.Errorf("after the release: %+v, want the grant to whom the wait moved", r.told)
	}
}

// An own release, with a token or without, does not touch a hold that another session has taken over.
func TestOwnReleaseLeavesWhatHasMoved(t *testing.T) {
	r := newRig(t)
	r.open("a", "b")
	token := r.want(ask("a", "x"), CodeGranted).Grants[0].Token
	r.want(moving("b", "a", "x"), CodeGranted)
	own := func(session string, token fencing.Token) Command {
		return Command{
			Op: OpRelease, Session: sid(session), Name: "x", RequestID: ask("a", "x").Requests[0].ID,
			Token: token, Own: true,
		}
	}
	r.want(own("a", token), CodeNotHeld)
	r.want(own("a", 0), CodeNotHeld)
	if info := r.m.Holder("x"); len(info.Holders) != 1 {
		t.Errorf("after releases by the former session: %+v", info)
	}
	r.want(own("b", token), CodeOK)
	none := own("b", token)
	none.Session = SessionID{}
	r.want(none, CodeInvalid)
}
