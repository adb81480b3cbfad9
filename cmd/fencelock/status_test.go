//go:build unix

package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc"

	"github.com/fencelock/fencelock/builtin/lockpb"
)

// differing is a member with a state that differs from the leader's.
type differing struct {
	lockpb.UnimplementedAdminServiceServer
}

func (differing) Status(context.Context, *lockpb.StatusRequest) (*lockpb.MemberStatus, error) {
	return &lockpb.MemberStatus{NodeId: "odd", LeaderId: "other", AgreedIndex: 41, DiffersIndex: 42}, nil
}

func TestStatusReportsDifferingMembers(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	lockpb.RegisterAdminServiceServer(s, differing{})
	go s.Serve(l)
	t.Cleanup(s.Stop)
	url := "fencelock://" + l.Addr().String()
	start(t, "status", "--backend", url).
		expectExit(exitUnavailable, "its state differs from the leader's at log entry 42")
	p := start(t, "status", "--backend", url, "--json")
	if all := objects[member](t, p.output()); len(all) != 1 || all[0].DiffersIndex != 42 || all[0].AgreedIndex != 41 {
		t.Errorf("with --json: %+v", all)
	}
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	p := start(t, "serve", "--dev", "--listen", "127.0.0.1:0", "--ops-listen", "127.0.0.1:0")
	watched := p.await("fencelock: serving probes at ")
	address := p.await("fencelock: serving clients at ")
	exports(t, watched, "fencelock_member_leader 1", "fencelock_member_differs_index 0",
		"fencelock_server_sessions{", "go_goroutines ")
	g := start(t, "gateway", "--backend", "fencelock://"+address, "--http-listen", "127.0.0.1:0",
		"--ops-listen", "127.0.0.1:0")
	watched = g.await("fencelock: serving probes at ")
	if status, _ := fetch(t, g.await("fencelock: serving HTTP at ")+"/metrics"); status != http.StatusNotFound {
		t.Errorf("clients are answered metrics: %d", status)
	}
	exports(t, watched, `fencelock_build_info{`,
		`fencelock_http_request_duration_seconds_count{code="404",method="GET",route="other"} 1`)
}

// exports awaits lines that begin so at /metrics.
func exports(t *testing.T, door string, lines ...string) {
	t.Helper()
	for _, line := range lines {
		eventually(t, "/metrics has "+line, func() bool {
			r, err := http.Get(door + "/metrics") //nolint:noctx // of this machine
			if err != nil {
				return false
			}
			defer r.Body.Close()
			all, err := io.ReadAll(r.Body)
			return err == nil && r.StatusCode == http.StatusOK && strings.Contains(string(all), "\n"+line)
		})
	}
}
