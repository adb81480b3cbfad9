package server

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"path/filepath"
	"regexp"
	"testing"

	"google.golang.org/grpc/credentials"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/serverfault"
	"github.com/fencelock/fencelock/internal/testcert"
)

func moveOf(session []byte, name, id string) *lockpb.Request {
	return &lockpb.Request{Session: session, Call: &lockpb.Request_Move{Move: &lockpb.Move{Name: name, RequestId: id}}}
}

func cancelOf(session []byte, name, id string) *lockpb.Request {
	return &lockpb.Request{Session: session, Call: &lockpb.Request_CancelWait{
		CancelWait: &lockpb.CancelWait{Name: name, RequestId: id},
	}}
}

func (s *Server) level() uint32 { return s.replica.State.Machine.Level() }

// A thief with a backup tries everything in it that may be an id. At the previous level, that is enough to take a
// session, and a hold with its token. From the present level on, the backup helps nobody.
func TestStolenBackupMovesNothing(t *testing.T) {
	t.Parallel()
	for level, stolen := range map[uint32]bool{machine.LevelNonces: true, machine.LevelHiddenIDs: false} {
		t.Run(fmt.Sprint("level ", level), func(t *testing.T) {
			s := alone(t, Config{Rig: &serverfault.Rig{Level: level}})
			eventually(t, "the level is raised", func() bool { return s.level() == level })
			victim := attach(t, s)
			session := victim.open(longTTL)
			_, token := victim.hold(session, "x")
			waits := acquireOf(victim.open(2*longTTL), "x", backend.NewRequestID(), true)
			if r := victim.call(waits); !r.GetAcquired().GetQueued() {
				t.Fatal(r)
			}
			backup := backupOf(t, s)

			thief := attach(t, s)
			own := thief.open(longTTL)
			moved, attached := 0, 0
			for _, text := range regexp.MustCompile(`[A-Za-z0-9_-]{16,}`).FindAllString(string(backup), -1) {
				for from := range text { // an id has a length before it that may look like a part of it
					for _, size := range []int{22, 24, 32, 43, len(text) - from} {
						if from+size > len(text) || size < 16 {
							continue
						}
						if r := thief.call(moveOf(own, "x", text[from:from+size])); r.GetError() == nil {
							moved++
						}
					}
				}
			}
			for from := range len(backup) - 15 {
				if r := thief.call(attachOf(backup[from:from+16], "", 0)); r.GetSession() != nil &&
					!bytes.Equal(backup[from:from+16], own) {
					attached++
				}
			}
			if (moved > 0) != stolen || (attached > 0) != stolen {
				t.Errorf("the thief has moved %d and attached %d", moved, attached)
			}
			if stolen {
				return
			}
			if r := victim.call(keepAliveOf(session)); !r.Renewed || r.GetPushed() != 0 {
				t.Errorf("the victim's session: %v", r)
			}
			holders := victim.call(holderOf("x")).GetName()
			if len(holders.GetHolders()) != 1 || holders.Holders[0].Token != token || holders.Waiters != 1 {
				t.Errorf("afterwards: %v", holders)
			}
		})
	}
}

// While one member is of an earlier version, the state has ids. When it is replaced the level rises, and clients find
// all that they had by the ids that they know.
func TestIDsAreHiddenOnceAllMembersKnowHow(t *testing.T) {
	t.Parallel()
	made := 0
	c := newCluster(t, 3, func(c *Config) {
		calm(c)
		if made++; made == 3 {
			c.Rig = &serverfault.Rig{Level: machine.LevelNonces}
		}
	})
	level := func() uint32 { return c.servers[c.leader()].level() }
	eventually(t, "the level is that of the earlier version", func() bool { return level() == machine.LevelNonces })
	x := c.connect()
	holding, waiting := x.open(longTTL), x.open(2*longTTL)
	id, token := x.hold(holding, "x")
	shared := acquireOf(holding, "s", backend.NewRequestID(), false)
	shared.GetAcquire().Kind = lockpb.Kind_KIND_SHARED
	if r := x.call(shared); len(r.GetAcquired().GetGrants()) != 1 {
		t.Fatal(r)
	}
	wait := acquireOf(waiting, "x", backend.NewRequestID(), true)
	wait.GetAcquire().Under = []string{shared.GetAcquire().RequestId}
	if r := x.call(wait); !r.GetAcquired().GetQueued() {
		t.Fatal(r)
	}

	c.stop(2)
	c.configs[2].Rig = nil
	c.start(2)
	eventually(t, "the level is raised", func() bool { return level() == machine.MaxLevel })
	var y *client
	eventually(t, "the leader serves", func() bool { y = c.connect(); return y != nil })
	state := y.call(attachOf(holding, "", 0)).GetSession()
	if h := state.GetHolds(); len(h) != 2 || h[0].Name != "s" || h[0].RequestId != shared.GetAcquire().RequestId ||
		h[1].Name != "x" || h[1].RequestId != id || h[1].Token != token {
		t.Errorf("the holder finds %v", h)
	}
	state = y.call(attachOf(waiting, "", 0)).GetSession()
	if w := state.GetWaits(); len(w) != 1 || w[0].RequestId != wait.GetAcquire().RequestId {
		t.Errorf("the waiter finds %v", w)
	}
	if r := y.call(wait); !r.GetAcquired().GetQueued() {
		t.Errorf("the waiter asks again: %v", r)
	}
	if r := y.call(releaseOf(holding, "x", id, token)); r.GetDone() == nil {
		t.Errorf("released: %v", r)
	}
	granted := y.next().GetGranted()
	if g := granted.GetGrants(); !bytes.Equal(granted.GetSession(), waiting) || len(g) != 1 ||
		g[0].RequestId != wait.GetAcquire().RequestId || g[0].Token <= token {
		t.Errorf("pushed to the waiter: %v", granted)
	}
	for i := range c.servers {
		eventually(t, "each member has a snapshot", func() bool {
			all, err := filepath.Glob(filepath.Join(c.configs[i].DataDir, "snapshots", "*[0-9]", "state.bin"))
			return err == nil && len(all) > 0
		})
	}
	// A further leader hides ids from the start.
	before := c.leader()
	eventually(t, "another leads", func() bool {
		_ = c.servers[before].replica.HandOver(t.Context()) // a busy machine may refuse it
		return c.leader() != before
	})
	eventually(t, "the next leader serves", func() bool { y = c.connect(); return y != nil })
	if h := y.call(attachOf(waiting, "", 0)).GetSession().GetHolds(); len(h) != 1 ||
		h[0].RequestId != wait.GetAcquire().RequestId {
		t.Errorf("at the next leader the waiter, which holds, finds %v", h)
	}
}

// A session belongs to the certificate that opened it: another certificate gets nothing, even with all ids.
func TestSessionsBelongToCertificates(t *testing.T) {
	t.Parallel()
	authority := testcert.New(t)
	s := alone(t, Config{Listen: "127.0.0.1:0", TLS: mutual(t, authority)})
	eventually(t, "the level is raised", func() bool { return s.level() == machine.MaxLevel })
	as := func(name string) *client {
		pair, err := tls.LoadX509KeyPair(authority.Sign(t, name))
		if err != nil {
			t.Fatal(err)
		}
		config := mutual(t, authority)
		config.Certificates = []tls.Certificate{pair}
		conn := grpcTo(t, s.Addr().String(), credentials.NewTLS(config))
		stream, err := lockpb.NewLockServiceClient(conn).Connect(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return newClient(t, stream, func() {})
	}
	ann, bob := as("ann.test"), as("bob.test")
	session := sessionID()
	if r := ann.call(openOf(session, longTTL)); r.GetSession().GetPrincipal() != "cert:ann.test" {
		t.Fatalf("opened: %v", r)
	}
	id, token := ann.hold(session, "x")
	wait := acquireOf(ann.open(2*longTTL), "x", backend.NewRequestID(), true)
	if r := ann.call(wait); !r.GetAcquired().GetQueued() {
		t.Fatal(r)
	}
	own := bob.open(longTTL)
	for what, q := range map[string]*lockpb.Request{
		"open": openOf(session, longTTL), "attach": attachOf(session, "", 0), "move": moveOf(own, "x", id),
		"close":   {Session: session, Call: &lockpb.Request_CloseSession{CloseSession: &lockpb.CloseSession{}}},
		"release": releaseOf(nil, "x", id, token), "release on a session": releaseOf(own, "x", id, token),
		"release without a token": releaseOf(own, "x", id, 0), "cancel": cancelOf(own, "x", id),
		"cancel a wait":  cancelOf(own, "x", wait.GetAcquire().RequestId),
		"release a wait": releaseOf(nil, "x", wait.GetAcquire().RequestId, 0),
	} {
		if r := bob.call(q); codeOf(r) != lockpb.Code_CODE_DENIED {
			t.Errorf("%s by another principal: %v", what, r)
		}
	}
	if r := ann.call(keepAliveOf(session)); !r.Renewed || r.GetPushed() != 0 {
		t.Errorf("afterwards: %v", r)
	}
	if held := ann.call(holderOf("x")).GetName(); len(held.GetHolders()) != 1 || held.Waiters != 1 {
		t.Errorf("afterwards: %v", held)
	}
	again := as("ann.test")
	state := again.call(attachOf(session, "", 0)).GetSession()
	if len(state.GetHolds()) != 1 || state.Principal != "cert:ann.test" {
		t.Errorf("attached by another connection of the principal: %v", state)
	}
	if r := again.call(moveOf(again.open(2*longTTL), "x", id)); r.GetAcquired().GetGrants()[0].Token != token {
		t.Errorf("moved to another session of the principal: %v", r)
	}
	if r := again.call(cancelOf(again.open(2*longTTL), "x", wait.GetAcquire().RequestId)); r.GetDone() == nil {
		t.Errorf("cancelled by another session of the principal: %v", r)
	}
	if r := again.call(releaseOf(nil, "x", id, token)); r.GetDone() == nil {
		t.Errorf("released by the principal without a session: %v", r)
	}
}
