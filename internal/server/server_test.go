package server

import (
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// alone starts one server that leads.
func alone(t testing.TB, c Config) *Server {
	t.Helper()
	s := start(t, c)
	eventually(t, "the only member leads", s.Leads)
	return s
}

func TestAcquireWaitRelease(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]Config{
		"memory": {}, "wal": {DataDir: t.TempDir()}, "bolt": {DataDir: t.TempDir(), Store: replica.StoreBolt},
		"grpc": {Listen: "127.0.0.1:0"},
	} {
		t.Run(name, func(t *testing.T) {
			s := alone(t, c)
			connect := func() *client {
				if s.Addr() != nil {
					return dial(t, s.Addr().String())
				}
				return attach(t, s)
			}
			a, b := connect(), connect()
			sa, sb := a.open(time.Minute), b.open(time.Minute)
			id, token := a.hold(sa, "x")
			if r := b.call(acquireOf(sb, "x", backend.NewRequestID(), false)); codeOf(r) != lockpb.Code_CODE_HELD ||
				r.GetError().Holder != "somebody" || !r.Renewed || r.GetError().RetryAfterNanos <= 0 {
				t.Errorf("held by another: %v", r)
			}
			waiting := backend.NewRequestID()
			if r := b.call(acquireOf(sb, "x", waiting, true)); !r.GetAcquired().GetQueued() {
				t.Fatalf("waiting: %v", r)
			}
			if r := a.call(releaseOf(sa, "x", id, token)); r.GetDone() == nil || !r.Renewed {
				t.Errorf("release: %v", r)
			}
			granted := b.next().GetGranted()
			if len(granted.GetGrants()) != 1 || granted.Grants[0].RequestId != waiting ||
				granted.Grants[0].Token <= token {
				t.Errorf("granted %v after token %d", granted, token)
			}
		})
	}
}
