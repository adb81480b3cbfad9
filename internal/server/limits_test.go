package server

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// like is an acquire that change makes special.
func like(session []byte, name string, change func(*lockpb.Acquire)) *lockpb.Request {
	q := acquireOf(session, name, backend.NewRequestID(), false)
	change(q.GetAcquire())
	return q
}

// Each limit is exceeded by one, and the answer says which it was.
func TestLimits(t *testing.T) {
	t.Parallel()
	unchanged := func(*lockpb.Acquire) {}
	for _, c := range []struct {
		limits  machine.Limits
		fill    func(x *client, session []byte) // up to the limit
		exceed  func(session []byte) *lockpb.Request
		code    lockpb.Code
		field   string
		message string
	}{
		{
			machine.Limits{Sessions: 1}, nil,
			func([]byte) *lockpb.Request {
				return &lockpb.Request{Session: sessionID(), Call: &lockpb.Request_OpenSession{
					OpenSession: &lockpb.OpenSession{TtlNanos: int64(time.Minute)},
				}}
			},
			lockpb.Code_CODE_EXHAUSTED, "sessions", "1",
		},
		{
			machine.Limits{Holds: 1}, func(x *client, session []byte) { x.hold(session, "x") },
			func(session []byte) *lockpb.Request { return like(session, "y", unchanged) },
			lockpb.Code_CODE_EXHAUSTED, "holds", "1",
		},
		{
			machine.Limits{Waits: 1},
			func(x *client, session []byte) {
				x.hold(session, "x")
				x.call(acquireOf(session, "x", backend.NewRequestID(), true))
			},
			func(session []byte) *lockpb.Request { return acquireOf(session, "x", backend.NewRequestID(), true) },
			lockpb.Code_CODE_EXHAUSTED, "waits", "1",
		},
		{
			machine.Limits{WaitersPerName: 1},
			func(x *client, session []byte) {
				x.hold(session, "x")
				x.call(acquireOf(session, "x", backend.NewRequestID(), true))
			},
			func(session []byte) *lockpb.Request { return acquireOf(session, "x", backend.NewRequestID(), true) },
			lockpb.Code_CODE_EXHAUSTED, "waiters-per-name", "1",
		},
		{
			machine.Limits{Unacked: 1},
			func(x *client, session []byte) {
				q := acquireOf(session, "x", backend.NewRequestID(), false)
				q.Sequence = 1
				x.call(q)
			},
			func(session []byte) *lockpb.Request {
				q := acquireOf(session, "y", backend.NewRequestID(), false)
				q.Sequence = 2
				return q
			},
			lockpb.Code_CODE_EXHAUSTED, "unacked", "1",
		},
		{
			machine.Limits{Requests: 1}, nil,
			func(session []byte) *lockpb.Request {
				all := []*lockpb.Acquire{like(nil, "x", unchanged).GetAcquire(), like(nil, "y", unchanged).GetAcquire()}
				return &lockpb.Request{
					Session: session, Call: &lockpb.Request_AcquireAll{AcquireAll: &lockpb.AcquireAll{Requests: all}},
				}
			},
			lockpb.Code_CODE_UNSUPPORTED, "requests", "limit requests of the servers, 1",
		},
		{
			machine.Limits{NameBytes: 3}, func(x *client, session []byte) { x.hold(session, "xxx") },
			func(session []byte) *lockpb.Request { return like(session, "xxxx", unchanged) },
			lockpb.Code_CODE_INVALID, "name", "limit name-bytes of the servers, 3",
		},
		{
			machine.Limits{Levels: 2},
			func(x *client, session []byte) {
				x.call(like(session, "a/b", func(a *lockpb.Acquire) { a.Hierarchical = true }))
			},
			func(session []byte) *lockpb.Request {
				return like(session, "c/d/e", func(a *lockpb.Acquire) { a.Hierarchical = true })
			},
			lockpb.Code_CODE_INVALID, "name", "limit levels of the servers, 2",
		},
		{
			machine.Limits{MetadataBytes: 4}, nil,
			func(session []byte) *lockpb.Request {
				return like(session, "x", func(a *lockpb.Acquire) { a.Metadata = map[string]string{"k": "four"} })
			},
			lockpb.Code_CODE_INVALID, "metadata", "limit metadata-bytes of the servers, 4",
		},
		{
			machine.Limits{}, nil,
			func(session []byte) *lockpb.Request { return like(session, strings.Repeat("x", 513), unchanged) },
			lockpb.Code_CODE_INVALID, "Name", "512",
		},
		{
			machine.Limits{}, nil,
			func(session []byte) *lockpb.Request {
				return like(session, "x", func(a *lockpb.Acquire) { a.Owner = strings.Repeat("x", 257) })
			},
			lockpb.Code_CODE_INVALID, "Owner", "256",
		},
		{
			machine.Limits{}, nil,
			func([]byte) *lockpb.Request { return openOf(sessionID(), DefaultMinTTL-1) },
			lockpb.Code_CODE_INVALID, "ttl", "not between 3s and 1h",
		},
		{
			machine.Limits{}, nil,
			func([]byte) *lockpb.Request { return openOf(sessionID(), DefaultMaxTTL+1) },
			lockpb.Code_CODE_INVALID, "ttl", "not between 3s and 1h",
		},
		{
			machine.Limits{},
			func(x *client, _ []byte) {
				for range watchesPerConn {
					x.call(watchOf("x", false, 0))
				}
			},
			func([]byte) *lockpb.Request { return watchOf("x", false, 0) },
			lockpb.Code_CODE_EXHAUSTED, "watches", "1024",
		},
	} {
		t.Run(c.field, func(t *testing.T) {
			x := attach(t, alone(t, Config{Limits: c.limits}))
			session := x.open(longTTL)
			if c.fill != nil {
				c.fill(x, session)
			}
			e := x.call(c.exceed(session)).GetError()
			if e.GetCode() != c.code || e.GetField() != c.field || !strings.Contains(e.GetMessage(), c.message) {
				t.Errorf("answered %v; want %v, field %q, with %q", e, c.code, c.field, c.message)
			}
			if r := x.call(keepAliveOf(session)); !r.Renewed {
				t.Errorf("afterwards the session is not renewed: %v", r)
			}
		})
	}
}

// A deadlock search that exceeds its limit finds no deadlock: the request waits, like one under no hold.
func TestLimitOfTheSearchForDeadlocks(t *testing.T) {
	t.Parallel()
	for steps, want := range map[int]lockpb.Code{1: 0, 100: lockpb.Code_CODE_DEADLOCK} {
		x := attach(t, alone(t, Config{Limits: machine.Limits{DeadlockSteps: steps}}))
		session := x.open(longTTL)
		ids := make([]string, 5)
		ask := func(name int, under ...string) *lockpb.Reply {
			return x.call(like(session, fmt.Sprint(name), func(a *lockpb.Acquire) {
				a.Under, a.Wait = under, true
				if len(under) == 0 {
					ids[name] = a.RequestId
				}
			}))
		}
		for i := range ids {
			ask(i)
		}
		for i := range len(ids) - 1 {
			ask(i+1, ids[i])
		}
		if r := ask(0, ids[len(ids)-1]); codeOf(r) != want {
			t.Errorf("with %d steps the last of a cycle is answered %v", steps, r)
		}
	}
}

// An oversized message ends the connection, with gRPC's reason.
func TestLimitOfAMessage(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{Listen: "127.0.0.1:0"})
	x := dial(t, s.Addr().String())
	session := x.open(longTTL)
	big := strings.Repeat("x", maxMessage)
	<-x.send(like(session, "x", func(a *lockpb.Acquire) { a.Metadata = map[string]string{"k": big} })) // closed
	x.mu.Lock()
	err := x.err
	x.mu.Unlock()
	if !errors.Is(err, errEnded) || !strings.Contains(err.Error(), codes.ResourceExhausted.String()) {
		t.Errorf("the stream ended with %v", err)
	}
	if r := dial(t, s.Addr().String()).call(attachOf(session, "", 0)); !r.Renewed {
		t.Errorf("the session afterwards: %v", r)
	}
}

// Members with different limits agree on those of the leader, also after another member becomes the leader.
func TestLimitsOfTheLeaderCount(t *testing.T) {
	t.Parallel()
	i := 0
	c := newCluster(t, 3, func(config *Config) {
		i++
		config.Limits = machine.Limits{Sessions: 10 * i}
	})
	for range 2 {
		leader := c.leader()
		eventually(t, "all have the limits of the leader", func() bool {
			for _, s := range c.servers {
				if s.replica.State.Machine.Limits() != c.configs[leader].Limits.WithDefaults() {
					return c.leader() != leader // another leads meanwhile: the next round shows it
				}
			}
			return true
		})
		if leader == c.leader() && c.servers[leader].replica.State.Machine.Limits().Sessions != 10*(leader+1) {
			t.Errorf("limits of leader %d: %+v", leader, c.servers[leader].replica.State.Machine.Limits())
		}
		c.stop(leader)
		next := c.leader()
		c.start(leader)
		if next == leader {
			t.Fatal("the stopped server leads")
		}
	}
}

func TestWrongLimitsAreRefused(t *testing.T) {
	t.Parallel()
	for _, limits := range []machine.Limits{{Sessions: -1}, {NameBytes: 513}, {Waits: 1<<30 + 1}} {
		var mistake *replica.ConfigError
		if s, err := Start(t.Context(), Config{Limits: limits}); !errors.As(err, &mistake) ||
			!strings.HasPrefix(mistake.Setting, "Limits.") {
			t.Errorf("%+v: %v, %v", limits, s, err)
		}
	}
}
