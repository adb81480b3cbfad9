package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// fencelockSystem is the bundled server: a cluster, or one server that may keep its state in memory only. Its trips are
// round trips on the connections of the clients in this process; its commands are log entries, each a batch.
type fencelockSystem struct {
	members
	size     int                // members
	memory   bool               // it keeps nothing
	lines    []*grpc.ClientConn // to each member, for operators
	operator *builtin.Driver
	traffic  traffic
	info     string
}

// buildFencelock builds the command of this tree into dir and returns its path.
func buildFencelock(ctx context.Context, dir string) (string, error) {
	const module = "github.com/fencelock/fencelock"
	tree, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", module).Output()
	if err != nil {
		return "", fmt.Errorf("where %s is can be found in the folder bench only: %w", module, err)
	}
	path := filepath.Join(dir, "fencelock")
	build := exec.CommandContext(ctx, "go", "build", "-o", path, "./cmd/fencelock")
	build.Dir = strings.TrimSpace(string(tree))
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build fencelock: %w\n%s", err, out)
	}
	return path, nil
}

// fencelockMinTTL is what the servers are told, for quick runs. Their other settings are the defaults, fsync and all.
const fencelockMinTTL = 2 * time.Second

// start starts the members. Whoever calls it owes close, also after an error.
func (s *fencelockSystem) start(ctx context.Context, binary string) error {
	addrs, err := freeAddrs(2 * s.size)
	if err != nil {
		return err
	}
	s.addresses = addrs[:s.size]
	peers := addrs[s.size:]
	for i, address := range s.addresses {
		server, err := startProcess(binary, func(dir string) []string {
			args := []string{"serve", "--listen", address, "--min-ttl", fencelockMinTTL.String()}
			if s.memory {
				args = append(args, "--dev")
			} else {
				args = append(args, "--data-dir", filepath.Join(dir, "data"))
			}
			if s.size > 1 {
				args = append(args, "--join", strings.Join(peers, ","), "--bootstrap-expect", fmt.Sprint(s.size))
			}
			if s.size > 1 || !s.memory {
				args = append(args, "--peer-listen", peers[i])
			}
			return args
		})
		if err != nil {
			return err
		}
		s.servers = append(s.servers, server)
		line, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return err
		}
		s.lines = append(s.lines, line)
	}
	s.operator = builtin.New(s.addresses, nil)
	for i := range s.servers {
		if err := s.serving(ctx, i); err != nil {
			return err
		}
	}
	return nil
}

func (s *fencelockSystem) name() string    { return "builtin" }
func (s *fencelockSystem) version() string { return s.info }
func (s *fencelockSystem) addr() string    { return s.leading(s) }

func (s *fencelockSystem) leader(ctx context.Context) (int, error) {
	return awaitLeader(ctx, len(s.addresses), func(ctx context.Context, member int) (bool, error) {
		status, err := s.status(ctx, member)
		return status.GetLeader(), err
	})
}

func (s *fencelockSystem) serving(ctx context.Context, member int) error {
	err := s.servers[member].answers(ctx, func(ctx context.Context) error {
		status, err := s.status(ctx, member)
		switch {
		case err != nil:
			return err
		case status.LeaderId == "":
			return errors.New("it has no leader")
		case status.LeaderId == status.NodeId && !status.Leader:
			return errors.New("it does not serve yet")
		}
		s.info = "fencelock " + status.ServerVersion
		return nil
	})
	if err != nil {
		return fmt.Errorf("fencelock at %s: %w", s.addresses[member], err)
	}
	return nil
}

func (s *fencelockSystem) status(ctx context.Context, member int) (*lockpb.MemberStatus, error) {
	line := s.lines[member]
	line.ResetConnectBackoff() // the member may have been started again just now
	return lockpb.NewAdminServiceClient(line).Status(ctx, &lockpb.StatusRequest{})
}

// counters implements system.
func (s *fencelockSystem) counters(ctx context.Context) (counters, error) {
	sum := counters{trips: float64(s.traffic.turns.Load()), commands: math.NaN()}
	for _, p := range s.servers {
		spent, err := p.cpu()
		if err != nil {
			return counters{}, err
		}
		sum.cpu += spent
	}
	leader, err := s.leader(ctx)
	if err != nil {
		return counters{}, err
	}
	status, err := s.status(ctx, leader)
	if err != nil {
		return counters{}, err
	}
	sum.commands = float64(status.LastIndex)
	return sum, nil
}

// resident implements memoryTeller with the member that keeps most.
func (s *fencelockSystem) resident() (most float64, err error) {
	for _, p := range s.servers {
		one, err := p.resident()
		if err != nil {
			return 0, err
		}
		most = max(most, one)
	}
	return most, nil
}

func (s *fencelockSystem) reset(ctx context.Context) error {
	names, err := s.held(ctx)
	for name := range names {
		if err == nil {
			err = s.erase(ctx, name)
		}
		if errors.Is(err, backend.ErrNotHeld) { // its session has ended meanwhile
			err = nil
		}
	}
	return err
}

func (s *fencelockSystem) held(ctx context.Context) (map[string]bool, error) {
	names := map[string]bool{}
	for info, err := range s.operator.List(ctx, "") {
		if err != nil {
			return nil, err
		}
		if info.Held {
			names[info.Name] = true
		}
	}
	return names, nil
}

// erase implements system: an operator takes the lock away. A key is a name.
func (s *fencelockSystem) erase(ctx context.Context, key string) error {
	return s.operator.ForceRelease(ctx, key, "bench")
}

func (s *fencelockSystem) missing(ctx context.Context, keys []string) (int, error) {
	names, err := s.held(ctx)
	gone := 0
	for _, key := range keys {
		if !names[key] {
			gone++
		}
	}
	return gone, err
}

func (s *fencelockSystem) close() error {
	if s.operator != nil {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = s.operator.Close(ctx) // it has no session that would have to end
	}
	for _, line := range s.lines {
		line.Close()
	}
	return closeAll(s.servers)
}

func (s *fencelockSystem) peers() []peer {
	kind := ours
	switch {
	case s.memory:
		kind += ", in memory"
	case s.size == 1:
		kind += ", one node"
	}
	p := peer{
		name: kind, role: roleVariant, at: s, waits: true, renewEvery: ourRenewal, key: func(name string) string { return name },
		open: func(o clientOptions) (client, error) { return newOurs(s.driver(o), o.ttl, func() {}) },
		// A driver renews all locks of one TTL at once: these have one each.
		sessions: func(ctx context.Context, o clientOptions, n int) (sessions, error) {
			return openFencelockSessions(ctx, s.driver(o), o, n)
		},
		watch: func(ctx context.Context, c client, name string, seen func()) error {
			w, _ := backend.As[backend.Watcher](c.(ourClient).d)
			for _, err := range w.Watch(ctx, name, 0) {
				if err != nil {
					return err
				}
				seen()
			}
			return nil
		},
	}
	if kind == ours {
		p.role = roleOurs
	}
	return []peer{p}
}

// driver returns a driver whose round trips are counted.
func (s *fencelockSystem) driver(o clientOptions) *builtin.Driver {
	dial := o.dial
	if dial == nil {
		dial = (&net.Dialer{}).DialContext
	}
	return builtin.New(strings.Split(o.addr, ","), &builtin.Options{
		Dial: func(ctx context.Context, address string) (net.Conn, error) {
			if o.proxied {
				address = o.addr // whatever the servers tell
			}
			c, err := dial(ctx, "tcp", address)
			if err != nil {
				return nil, err
			}
			return &countedConn{Conn: c, t: &s.traffic}, nil
		},
	})
}

// fencelockSessions are grants whose TTLs differ by a millisecond, so that each has a session of its own.
type fencelockSessions struct {
	d      *builtin.Driver
	grants []backend.Grant
}

func openFencelockSessions(ctx context.Context, d *builtin.Driver, o clientOptions, n int) (sessions, error) {
	s := &fencelockSessions{d: d, grants: make([]backend.Grant, n)}
	err := each(n, func(i int) (err error) {
		s.grants[i], err = d.Acquire(ctx, backend.Request{
			Name: "session/" + backend.NewRequestID(), Owner: "bench", RequestID: backend.NewRequestID(), Fresh: true,
			TTL: o.ttl + time.Duration(i)*time.Millisecond,
		})
		return err
	})
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *fencelockSessions) renew(ctx context.Context, i int) error {
	return s.d.Renew(ctx, s.grants[i:i+1])[0].Err
}

func (s *fencelockSessions) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_ = s.d.Close(ctx) // what is left ends with its TTL
}

// fencelockBinary builds the command once, for all servers of a run.
func fencelockBinary(ctx context.Context) (path string, clean func() error, err error) {
	dir, err := os.MkdirTemp("", "fencelock-bench-")
	if err != nil {
		return "", nil, err
	}
	clean = func() error { return os.RemoveAll(dir) }
	if path, err = buildFencelock(ctx, dir); err != nil {
		return "", nil, errors.Join(err, clean())
	}
	return path, clean, nil
}
