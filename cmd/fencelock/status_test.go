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

// differing is a member whose state is another than the leader's.
type differing struct {
	lockpb.UnimplementedAdminServiceServer
}

func (differing) Status(context.Context, *lockpb.StatusRequest) (*lockpb.MemberStatus, error) {
	return &lockpb.MemberStatus{NodeId: "odd", LeaderId: "other", AgreedIndex: 41, DiffersIndex: 42}, nil
}

func TestStatusTellsWhoDiffers(t *testing.T) {
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
		expectExit(exitUnavailable, "its state is another than the leader's, after log entry 42")
	p := start(t, "status", "--backend", url, "--json")
	if all := objects[member](t, p.output()); len(all) != 1 || all[0].DiffersIndex != 42 || all[0].AgreedIndex != 41 {
		t.Errorf("with --json: %+v", all)
	}
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	p := start(t, "serve", "--dev", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
	door := p.await("fencelock: serving HTTP at ")
	eventually(t, "the member leads, and says so", func() bool {
		r, err := http.Get(door + "/metrics") //nolint:noctx // of this machine
		if err != nil {
			return false
		}
		defer r.Body.Close()
		all, err := io.ReadAll(r.Body)
		text := string(all)
		return err == nil && r.StatusCode == http.StatusOK && strings.Contains(text, "\nfencelock_member_leader 1\n") &&
			strings.Contains(text, "\nfencelock_member_differs_index 0\n")
	})
}
