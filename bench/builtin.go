package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/machine"
)

// clusterSize is the number of members of the clusters.
const clusterSize = 3

// startBuiltin starts the bundled server beside etcd: clusters of three, and the bundled server alone, durable and not.
// All of them run at the same time; idle ones only send heartbeats.
func startBuiltin(life *scope) *system {
	binary := buildFencelock(life)
	three := fencelockMembers(life, binary, clusterSize, false)
	one, memory := fencelockMembers(life, binary, 1, false), fencelockMembers(life, binary, 1, true)
	etcd, _ := etcdMembers(life, clusterSize)
	s := &system{
		name: "builtin", binary: binary, parts: []*system{three, one, memory, etcd}, leads: three.leads,
		version: fmt.Sprintf("%s (%d members; one; one in memory), %s (%d members)",
			three.version, clusterSize, etcd.version, clusterSize),
	}
	for _, part := range s.parts {
		s.servers = append(s.servers, part.servers...)
	}
	s.reset = func(by *scope) {
		for _, part := range s.parts {
			part.reset(by)
		}
	}
	return s
}

// builtinPeers returns the peers of etcd without our driver for it, and our driver on each setting of the bundled
// server.
func builtinPeers(s *system) (all []peer) {
	parts := s.parts
	if parts == nil {
		parts = []*system{{}, {}, {}, {}} // in a child, which needs only addresses
	}
	for _, p := range etcdPeers(parts[3]) {
		if p.role != roleOurs {
			p.name, p.at = "etcd "+p.name, parts[3]
			all = append(all, p)
		}
	}
	for i, name := range []string{ours, ours + ", one node", ours + ", in memory"} {
		p := fencelockPeer(name, parts[i])
		if i > 0 {
			p.role = roleVariant
		}
		all = append(all, p)
	}
	return all
}

// buildFencelock builds the command of this tree, once for all servers of a run.
func buildFencelock(life *scope) string {
	const module = "github.com/fencelock/fencelock"
	tree, err := exec.CommandContext(life.ctx, "go", "list", "-m", "-f", "{{.Dir}}", module).Output()
	if err != nil {
		life.must(fmt.Errorf("where %s is can be found in the folder bench only: %w", module, err))
	}
	path := filepath.Join(life.folder(), "fencelock")
	build := exec.CommandContext(life.ctx, "go", "build", "-o", path, "./cmd/fencelock")
	build.Dir = strings.TrimSpace(string(tree))
	if out, err := build.CombinedOutput(); err != nil {
		life.must(fmt.Errorf("build fencelock: %w\n%s", err, out))
	}
	return path
}

// fencelockMinTTL is the servers' minimum TTL, for quick runs. Their other settings are the defaults, with fsync.
const fencelockMinTTL = 2 * time.Second

// fencelockMembers starts a cluster of the bundled server, or one server, which keeps its state in memory only if
// memory is set. Its trips are round trips on the connections of the clients in this process; its commands are log
// entries, each a batch.
func fencelockMembers(life *scope, binary string, size int, memory bool) *system {
	s := &system{name: "builtin", addresses: life.addrs(size), traffic: &traffic{}}
	peers := life.addrs(size)
	lines := make([]*grpc.ClientConn, size) // to each member, for operators
	for i, address := range s.addresses {
		s.servers = append(s.servers, life.process(binary, func(dir string) []string {
			args := []string{"serve", "--listen", address, "--min-ttl", fencelockMinTTL.String()}
			if memory {
				return append(args, "--dev")
			}
			args = append(args, "--data-dir", filepath.Join(dir, "data"), "--peer-listen", peers[i])
			if size > 1 {
				args = append(args, "--join", strings.Join(peers, ","), "--bootstrap-expect", fmt.Sprint(size))
			}
			return args
		}))
		var err error
		lines[i], err = grpc.NewClient("passthrough:///"+address,
			grpc.WithTransportCredentials(insecure.NewCredentials()))
		life.must(err)
		life.closing(lines[i])
	}
	operator := builtin.New(s.addresses, nil)
	life.later(func() { bounded(operator.Close) })
	ask := func(ctx context.Context, member int) (*lockpb.MemberStatus, error) {
		lines[member].ResetConnectBackoff() // the member may have just been restarted
		return lockpb.NewAdminServiceClient(lines[member]).Status(ctx, &lockpb.StatusRequest{})
	}
	s.leads = func(ctx context.Context, member int) (bool, error) {
		status, err := ask(ctx, member)
		return status.GetLeader(), err
	}
	s.serves = func(ctx context.Context, member int) (string, error) {
		status, err := ask(ctx, member)
		if err == nil && (status.LeaderId == "" || status.LeaderId == status.NodeId && !status.Leader) {
			err = errors.New("it has no leader, or does not serve yet")
		}
		return "fencelock " + status.GetServerVersion(), err
	}
	for i := range s.servers {
		life.must(s.serving(life.ctx, i))
	}
	s.count = func(by *scope) (commands, trips float64) {
		leader, err := s.leader(by.ctx)
		by.must(err)
		status, err := ask(by.ctx, leader)
		by.must(err)
		return float64(status.GetLastIndex()), float64(s.traffic.turns.Load())
	}
	held := func(by *scope) map[string]bool {
		names := map[string]bool{}
		for info, err := range operator.List(by.ctx, "") {
			by.must(err)
			names[info.Name] = info.Held
		}
		return names
	}
	s.erase = func(by *scope, name string) { // an operator releases the lock by force
		if err := operator.ForceRelease(by.ctx, backend.ForceRequest{Name: name, Reason: "bench"}); !errors.Is(err, backend.ErrNotHeld) {
			by.must(err) // otherwise its session has ended meanwhile
		}
	}
	s.reset = func(by *scope) {
		for name := range held(by) {
			s.erase(by, name)
		}
	}
	s.missing = func(by *scope, keys []string) (gone int) {
		names := held(by)
		for _, key := range keys {
			if !names[key] {
				gone++
			}
		}
		return gone
	}
	return s
}

// fencelockPeer returns our driver on a part of the service.
func fencelockPeer(name string, s *system) peer {
	p := ourPeer(func(_ *client, o clientOptions) backend.Driver { return dialFencelock(s, o) }, same)
	p.name, p.at = name, s
	// Grants with TTLs that differ by a millisecond have separate sessions.
	p.sessions = func(c *client, o clientOptions, n int) renewal {
		d, grants := dialFencelock(s, o), make([]backend.Grant, n)
		c.later(func() { bounded(d.Close) })
		c.must(each(n, func(i int) (err error) {
			grants[i], err = d.Acquire(c.ctx, backend.Request{
				Name: "session/" + backend.NewRequestID(), Owner: "bench", RequestID: backend.NewRequestID(),
				Fresh: true, TTL: o.ttl + time.Duration(i)*time.Millisecond,
			})
			return err
		}))
		return func(ctx context.Context, i int) error { return d.Renew(ctx, grants[i:i+1])[0].Err }
	}
	p.watch = func(ctx context.Context, w watched) error {
		watcher, _ := backend.As[backend.Watcher](w.by.native.(ourNative).driver)
		for _, err := range watcher.Watch(ctx, w.name, 0) {
			if err != nil {
				return err
			}
			w.seen()
		}
		return ctx.Err()
	}
	return p
}

// dialFencelock returns a driver with counted round trips.
func dialFencelock(s *system, o clientOptions) *builtin.Driver {
	counts := cmp.Or(s.traffic, &traffic{})
	return builtin.New(strings.Split(o.addr, ","), &builtin.Options{
		Dial: func(ctx context.Context, address string) (net.Conn, error) {
			if o.proxied {
				address = o.addr // not the addresses that the servers report
			}
			return counts.over(o.dial)(ctx, "tcp", address)
		},
	})
}

// restart measures the cost of held locks to the bundled server: memory, snapshots, and the time for a restart. The
// figures of the state alone are from the server's state machine in this process; the others are from a server of one
// member that is started for them.
func restart(r *round) {
	for _, n := range []int{1000, 10_000, 100_000} {
		as := roleVariant
		if n == 100_000 {
			as = roleOurs // the row of the targets
		}
		r.row(fmt.Sprintf("%s, %d held", ours, n), as)
		r.measureState(n)
		r.measureRestart(n, as == roleOurs && !r.quick)
	}
}

// measureState holds n locks in a state machine, in one session, like one client.
func (r *round) measureState(n int) {
	kept := r.keeping()
	m, id, now := machine.New(1), machine.SessionID{1}, time.Now().UnixNano()
	m.Apply(now, &machine.Command{Op: machine.OpOpenSession, Session: id, TTL: time.Minute})
	for i := range n {
		seq := uint64(i + 1)
		result, _ := m.Apply(now, &machine.Command{
			Op: machine.OpAcquire, Session: id, Seq: seq, Acked: seq - 1, Requests: []machine.Request{{
				Name: fmt.Sprint("bench/restart/", i), ID: backend.NewRequestID(),
				Owner: "host.example/12345/0123456789abcdef",
			}},
		})
		if result.Code != machine.CodeGranted {
			r.must(fmt.Errorf("the state machine answers %d to acquire %d", result.Code, i))
		}
	}
	kept(n)

	var frozen *machine.Frozen
	pauses := make([]float64, 5)
	for i := range pauses {
		pauses[i] = took(func() { frozen = m.Freeze() })
	}
	r.s["pause-ms"] = median.of(pauses)
	var snapshot bytes.Buffer
	r.s["write-ms"] = took(func() {
		_, err := frozen.WriteTo(&snapshot)
		r.must(err)
	})
	r.s["mb"] = float64(snapshot.Len()) / (1 << 20)
	r.s["read-ms"] = took(func() { r.must(machine.New(1).Restore(&snapshot)) })
}

// took returns the duration of do, in milliseconds.
func took(do func()) float64 {
	began := time.Now()
	do()
	return ms(time.Since(began))
}

// measureRestart holds n locks on a server, kills it and restarts it. With snapshot set it waits for a snapshot
// first, which the server makes at most once in half a minute.
func (r *round) measureRestart(n int, snapshot bool) {
	one := &round{scope: scope{ctx: r.ctx}, lab: r.lab, s: r.s}
	defer func() {
		one.end()
		r.err = one.err
	}()
	one.at = fencelockMembers(&one.scope, r.system.binary, 1, false)
	one.peer = fencelockPeer(ours, one.at)
	server, c := one.at.servers[0], one.client(time.Minute)
	resident := func() float64 { // the resident memory of the process, in KB
		proc, err := procfs.NewProc(server.child.Pid())
		one.must(err)
		stat, err := proc.Stat()
		one.must(err)
		return float64(stat.ResidentMemory()) / 1024
	}
	before, names := resident(), make([]string, n)
	one.must(each(n, func(i int) (err error) {
		names[i] = fmt.Sprint("bench/restart/", i)
		_, err = c.lock(r.ctx, names[i])
		return err
	}))
	key := "replay-s"
	r.s["server-kb"] = (resident() - before) / float64(n)
	if snapshot {
		key = "restart-s"
		one.awaitSnapshot(c, filepath.Join(server.dir, "data", "snapshots"))
	}
	server.kill()
	began := time.Now()
	one.must(server.start())
	fresh, err := one.peer.client(r.ctx, clientOptions{addr: one.at.addr(), ttl: time.Minute})
	one.must(err)
	one.later(fresh.end)
	r.s[key] = one.grantOne(fresh).Sub(began).Seconds()
	delete(r.s, "tries")
	r.s["gone"] = float64(one.at.missing(&one.scope, names))
}

// awaitSnapshot acquires and releases, which fills the log, until the server has made a snapshot, and notes the
// longest call during the snapshot.
func (r *round) awaitSnapshot(c *client, dir string) {
	ctx, cancel := context.WithTimeout(r.ctx, 2*time.Minute) // the server checks every 30 to 60 s if one is due
	defer cancel()
	type call struct{ began, ended time.Time }
	var calls []call
	filling, stop := context.WithCancel(ctx)
	var filler errgroup.Group
	filler.Go(func() error {
		for name := r.fresh("snapshot"); filling.Err() == nil; {
			began := time.Now()
			if err := c.cycle(ctx, name); err != nil {
				return err
			}
			calls = append(calls, call{began, time.Now()})
		}
		return nil
	})
	began, ended, err := watchSnapshots(ctx, dir)
	stop()
	r.must(errors.Join(err, filler.Wait()))
	var longest time.Duration
	for _, c := range calls {
		if c.ended.After(began) && c.began.Before(ended) {
			longest = max(longest, c.ended.Sub(c.began))
		}
	}
	r.s["call-ms"] = ms(longest)
}

// watchSnapshots returns the times at which the next snapshot appeared in dir and was complete. The server freezes the
// state just before the file appears, so 100 ms are subtracted from the first.
func watchSnapshots(ctx context.Context, dir string) (began, ended time.Time, err error) {
	old, err := filepath.Glob(dir + "/*")
	for ; err == nil; sleep(ctx, 5*time.Millisecond) {
		var now []string
		now, err = filepath.Glob(dir + "/*")
		for _, path := range now {
			if slices.Contains(old, path) {
				continue
			}
			if began.IsZero() {
				began = time.Now().Add(-100 * time.Millisecond)
			}
			if !strings.HasSuffix(path, ".tmp") {
				return began, time.Now(), nil
			}
		}
		err = errors.Join(err, ctx.Err())
	}
	return began, ended, fmt.Errorf("there is no snapshot in %s: %w", dir, err)
}
