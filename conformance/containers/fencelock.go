package containers

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/fencelock/fencelock/builtin/lockpb"
)

// FencelockServer is one bundled lock server. Its data survives Restart.
type FencelockServer struct{ *Server }

// Fencelock starts a lock server for the test t, and stops it at the end. Every call starts a new server, with its
// own cluster id. Args are those of fencelock serve:
//
//	containers.Fencelock(t, containers.Args("--min-ttl", "200ms"))
//
// The image is FENCELOCK_IMAGE_FENCELOCK, by default localhost/fencelock, which is never pulled. The program is
// fencelock on PATH; otherwise the go command builds it from the module of the test or from a dependency of that
// module.
func Fencelock(t testing.TB, opts ...Option) *FencelockServer {
	t.Helper()
	sp := fencelockSpec()
	// Otherwise clients outside the container could not reach it.
	sp.command = append(sp.command, "--listen", "0.0.0.0:7480", "--insecure")
	sp.process = func(addr, dir string) []string {
		return []string{"serve", "--data-dir", dir + "/data", "--listen", addr}
	}
	sp.args = append(sp.args, "--advertise", "server.invalid:7480", "--peer-listen", "") // no other members
	return &FencelockServer{run(t, sp, opts, newContainer, newFencelockProcess(t))}
}

// fencelockSpec returns the common spec of a single server and a cluster's node.
func fencelockSpec() spec {
	return spec{
		name:    "fencelock",
		image:   "localhost/fencelock", // in no registry: see deploy/Dockerfile
		env:     "FENCELOCK_IMAGE_FENCELOCK",
		port:    "7480/tcp",
		command: []string{"serve"},
		binary:  "fencelock",
		ready:   fencelockReady,
		install: "a Docker engine with the image that `make images` builds, fencelock on PATH, or the go command",
	}
}

// newFencelockProcess is newProcess, but builds the program, once for all nodes, if it is not on PATH.
func newFencelockProcess(t testing.TB) create {
	var built string
	return func(ctx context.Context, sp spec) (node, string, error) {
		if _, err := exec.LookPath(sp.binary); err != nil && built == "" {
			path := filepath.Join(t.TempDir(), "fencelock")
			if err := buildFencelock(ctx, path); err != nil {
				return nil, "", err
			}
			built = path
		}
		if built != "" {
			sp.binary = built
		}
		return newProcess(ctx, sp)
	}
}

func buildFencelock(ctx context.Context, path string) error {
	const command = "github.com/fencelock/fencelock/cmd/fencelock"
	if out, err := exec.CommandContext(ctx, "go", "build", "-o", path, command).CombinedOutput(); err != nil {
		return fmt.Errorf("no fencelock on PATH, and it cannot be built: %w\n%s", err, out)
	}
	return nil
}

// FencelockStatus is the status that a node reports, even without a majority.
type FencelockStatus struct {
	Node   string // its id
	Leader string // the id of the leader that the node knows; empty without a leader
	Serves bool   // it leads, and is ready for clients
	Term   uint64 // of the log
}

// fencelockStatus returns the status of the server at addr.
func fencelockStatus(ctx context.Context, addr string) (FencelockStatus, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	cc, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithNoProxy())
	if err != nil {
		return FencelockStatus{}, err
	}
	defer cc.Close()
	s, err := lockpb.NewAdminServiceClient(cc).Status(ctx, &lockpb.StatusRequest{})
	if err != nil {
		return FencelockStatus{}, fmt.Errorf("status of fencelock at %s: %w", addr, err)
	}
	return FencelockStatus{Node: s.NodeId, Leader: s.LeaderId, Serves: s.Leader, Term: s.Term}, nil
}

// fencelockReady reports whether the server at addr serves, or knows another elected server.
func fencelockReady(ctx context.Context, addr string) bool {
	s, err := fencelockStatus(ctx, addr)
	return err == nil && (s.Serves || s.Leader != "" && s.Leader != s.Node)
}
