package machine

import (
	"bytes"
	"testing"
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// A hold keeps the nonce of the request that took it, through a wait, a repeat, a move and a snapshot.
func TestNonceStaysWithTheHold(t *testing.T) {
	r := newRig(t)
	r.open("a", "b")
	first, other := fencing.Nonce{1}, fencing.Nonce{2}
	with := func(n fencing.Nonce) func(*Request) { return func(r *Request) { r.Nonce = n } }
	r.want(ask("a", "x").as(with(first)), CodeInvalid) // members of this level do not know it
	r.want(Command{Op: OpRaiseLevel, Level: LevelNonces}, CodeOK)
	is := func(what string, got Result, want fencing.Nonce) {
		t.Helper()
		if n := got.Grants[0].Nonce; n != want {
			t.Errorf("%s: nonce %v, want %v", what, n, want)
		}
	}
	is("granted", r.want(ask("a", "x").as(with(first)), CodeGranted), first)
	is("again", r.want(ask("a", "x").as(with(other)), CodeGranted), first)
	r.want(ask("b", "x").as(with(other)), CodeQueued)
	move := Command{Op: OpMove, Session: sid("b"), Name: "x", RequestID: id("a-request")}
	is("moved", r.want(move, CodeGranted), first)
	if err := r.m.Restore(bytes.NewReader(snapshot(t, r.m))); err != nil {
		t.Fatal(err)
	}
	if n := r.m.Holder("x").Holders[0].Nonce; n != first {
		t.Errorf("after a snapshot: nonce %v, want %v", n, first)
	}
	r.want(give("a", "x"), CodeOK)
	if n := r.told[len(r.told)-1].Grants[0].Nonce; n != other {
		t.Errorf("granted after a wait: nonce %v, want %v", n, other)
	}
	if n := r.m.Holder("x").Holders[0].Nonce; n != other {
		t.Errorf("after a wait: nonce %v, want %v", n, other)
	}
}

// A forced release with a condition ends the hold that it names, and no other.
func TestForceReleaseOfOneHold(t *testing.T) {
	r := newRig(t)
	r.open("a", "b", "c")
	force := Command{Op: OpForceRelease, Name: "x", Reason: "gone", By: "ann", Principal: "certificate ops"}
	r.want(Command{Op: OpForceRelease, Name: "x", Token: 3}, CodeInvalid) // members of this level do not know it
	r.want(Command{Op: OpRaiseLevel, Level: LevelNonces}, CodeOK)
	token := map[string]fencing.Token{}
	for i, s := range []string{"a", "b", "c"} {
		got := r.want(ask(s, "x").as(asShared).as(func(q *Request) { q.Nonce = fencing.Nonce{byte(i + 1)} }), CodeGranted)
		token[s] = got.Grants[0].Token
	}
	on := func(n fencing.Nonce, token fencing.Token) Command {
		c := force
		c.Nonce, c.Token = n, token
		return c
	}
	r.want(on(fencing.Nonce{9}, 0), CodeNotHeld)
	r.want(on(fencing.Nonce{}, 1), CodeNotHeld)
	r.want(on(fencing.Nonce{1}, token["b"]), CodeNotHeld)
	before := r.m.Revision()
	r.want(on(fencing.Nonce{2}, 0), CodeOK)
	if got := r.holders("x"); got != "a c" {
		t.Errorf("by the nonce of b: %q hold it", got)
	}
	events, err := r.m.EventsSince(before, 10)
	if err != nil || len(events) != 1 || events[0].By != "ann" || events[0].Principal != "certificate ops" {
		t.Errorf("events %+v, %v", events, err)
	}
	r.want(on(fencing.Nonce{2}, 0), CodeNotHeld)
	r.want(on(fencing.Nonce{}, token["c"]), CodeOK)
	r.want(on(fencing.Nonce{1}, token["a"]), CodeOK)
	if got := r.holders("x"); got != "" {
		t.Errorf("%q hold it", got)
	}
	r.want(Command{Op: OpOpenSession, Session: sid("d"), TTL: time.Second}, CodeOK)
	r.want(ask("d", "x"), CodeGranted)
	r.want(force, CodeOK)
}
