package server

import (
	"testing"
	"time"

	"github.com/fencelock/fencelock/builtin/lockpb"
)

func keepAllOf(sessions ...[]byte) *lockpb.Request {
	return &lockpb.Request{Call: &lockpb.Request_KeepAlive{KeepAlive: &lockpb.KeepAlive{Sessions: sessions}}}
}

// One keepalive renews all sessions of a client, and says of each why it is not renewed: it ended, or is attached
// elsewhere. If its deadline is in the log, a session is renewed through the log.
func TestOneKeepAliveForAllSessions(t *testing.T) {
	t.Parallel()
	const ttl = 20 * time.Second       // of which it is silent for half
	s := alone(t, Config{MinTTL: ttl}) // in a cluster another one may lead at any time, on a busy machine
	x, other := attach(t, s), attach(t, s)
	quick, kept, ended, elsewhere := x.open(longTTL), x.open(ttl), x.open(longTTL), x.open(longTTL)
	if r := x.call(&lockpb.Request{
		Session: ended, Call: &lockpb.Request_CloseSession{CloseSession: &lockpb.CloseSession{}},
	}); r.GetDone() == nil {
		t.Fatal(r)
	}
	if r := other.call(attachOf(elsewhere, "", 0)); r.GetSession() == nil {
		t.Fatal(r)
	}
	x.hold(kept, "kept")
	leads := s.leadership.Load()
	eventually(t, "the session is kept", func() bool { return leads.Time.IsKept(sessionIn(leads, [16]byte(kept))) })
	r := x.call(keepAllOf(quick, kept, ended, elsewhere))
	lives := r.GetAlive().GetLives()
	if len(lives) != 4 || r.Pushed == nil {
		t.Fatalf("kept alive: %v", r)
	}
	for i, want := range []lockpb.Code{0, 0, lockpb.Code_CODE_SESSION_ENDED, lockpb.Code_CODE_CONFLICT} {
		if got := lives[i].GetError().GetCode(); got != want || lives[i].Renewed != (want == 0) {
			t.Errorf("session %d: %v, want %v", i, lives[i], want)
		}
	}
	if lives[2].GetError().GetRevision() == 0 {
		t.Errorf("the end of a session has no revision: %v", lives[2])
	}
	if left := leads.Time.Left(sessionIn(leads, [16]byte(kept))); left < ttl/2 {
		t.Errorf("the session that was kept has %v left of %v", left, ttl)
	}
	if r := x.call(keepAllOf([]byte("short"))); codeOf(r) != lockpb.Code_CODE_INVALID {
		t.Errorf("a session of five bytes: %v", r)
	}
	if r := x.call(keepAllOf(make([][]byte, maxKeptAlive+1)...)); codeOf(r) != lockpb.Code_CODE_INVALID {
		t.Errorf("too many sessions: %v", r)
	}
}
