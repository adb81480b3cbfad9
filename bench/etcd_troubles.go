package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock"
)

// trouble is an etcd in a setting, or after an event, in which locks are easily lost.
type trouble struct {
	name, about string
	args        []string                                       // of the server
	user        string                                         // and password, if it wants them
	proxied     bool                                           // clients go through etcd grpc-proxy
	happen      func(ctx context.Context, s *etcdSystem) error // nil: nothing
	targets     []target
}

// etcdTroubles are scenarios with servers of their own. Restart makes one member elect itself anew.
func etcdTroubles() []scenario {
	restart := func(ctx context.Context, s *etcdSystem) error { return s.restart(ctx, false) }
	none := atMost("lost", 0, "locks lost")
	all := []trouble{
		{name: "auth", about: "with user and password", user: "root",
			targets: []target{none, atMost("auths", 2, "Authenticates per minute")}},
		{name: "proxy", about: "behind etcd grpc-proxy", proxied: true,
			targets: []target{atLeast("refused", 1, "the proxy is refused, since its answers prove nothing")}},
		{name: "nospace", about: "the quota is used up (NOSPACE), then an election", args: []string{"--quota-backend-bytes", "16777216"},
			happen:  func(ctx context.Context, s *etcdSystem) error { return errors.Join(s.fill(ctx), s.restart(ctx, false)) },
			targets: []target{none}},
		{name: "txnops", about: "--max-txn-ops 64, then an election", args: []string{"--max-txn-ops", "64"}, happen: restart,
			targets: []target{none}},
		{name: "wiped", about: "the server is wiped and started again with the same flags",
			happen:  func(ctx context.Context, s *etcdSystem) error { return s.restart(ctx, true) },
			targets: []target{atLeast("history", 1, "locks whose loss is told as lost history, of all")}},
	}
	var scenarios []scenario
	for _, t := range all {
		scenarios = append(scenarios, scenario{
			name:  "trouble-" + t.name,
			about: fmt.Sprintf("one client holds 200 locks, TTL 6 s; %s", t.about),
			columns: columns("refused<; lost>; history=told as lost history<; auths=Authenticates/min>; " +
				"keepalives=keepalives/s; trips/s; server-cpu=server CPU %"),
			targets: map[string][]target{"etcd": t.targets},
			rounds:  1, quickRounds: 1,
			suits: func(_ system, p peer) bool { return p.contends() },
			all:   interleaved(t.run),
		})
	}
	return scenarios
}

func (t trouble) run(ctx context.Context, l *lab, p peer) (_ sample, err error) {
	s := &etcdSystem{args: t.args}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := s.startMembers(ctx, 1); err != nil {
		return nil, err
	}
	ttl := l.length(6*time.Second, 3*time.Second)
	o := clientOptions{addr: s.addresses[0], ttl: ttl, user: t.user}
	if t.user != "" {
		if err := s.demand(ctx, t.user); err != nil {
			return nil, err
		}
	}
	if t.proxied {
		proxy, addr, err := s.startProxy(ctx)
		if err != nil {
			return nil, err
		}
		defer proxy.close()
		o.addr = addr
	}
	clients, closeAll, err := l.open(ctx, p, 1, o)
	if t.proxied && errors.Is(err, fencelock.ErrMisconfigured) {
		return sample{"refused": 1}, nil
	}
	if err != nil {
		return nil, err
	}
	defer closeAll()
	holds := make([]hold, 200)
	err = each(len(holds), func(i int) (err error) {
		holds[i], err = clients[0].lock(ctx, l.fresh("trouble"))
		return err
	})
	if err != nil {
		return nil, err
	}
	if t.happen != nil {
		if err := t.happen(ctx, s); err != nil {
			return nil, err
		}
	}
	before, calls, err := s.asked(ctx)
	window := 2 * ttl
	if t.user != "" { // what comes a few times a minute
		window = l.length(40*time.Second, window)
	}
	sleep(ctx, window)
	after, callsAfter, err2 := s.asked(ctx)
	if err := errors.Join(err, err2); err != nil {
		return nil, err
	}
	lost, history := 0, 0
	for _, h := range holds {
		if !over(h) {
			continue
		}
		lost++
		var why *fencelock.LostError
		if o, ok := h.(ourHold); ok && errors.As(o.l.Err(), &why) && why.Reason == fencelock.ReasonHistoryLost {
			history++
		}
	}
	d := after.since(before)
	out := sample{
		"lost": float64(lost), "history": float64(history) / float64(len(holds)),
		"auths":      (callsAfter["Authenticate"] - calls["Authenticate"]) / d.wall.Minutes(),
		"keepalives": (callsAfter["LeaseKeepAlive"] - calls["LeaseKeepAlive"]) / d.wall.Seconds(),
	}
	d.perSecond(out)
	return out, nil
}

// asked returns what was used so far, and how often each method was called.
func (s *etcdSystem) asked(ctx context.Context) (usage, map[string]float64, error) {
	calls := map[string]float64{}
	err := etcdMetrics(ctx, s.addresses[0], func(name string, v float64) {
		if _, method, ok := strings.Cut(name, `grpc_method="`); ok && strings.HasPrefix(name, etcdReceived) {
			method, _, _ = strings.Cut(method, `"`)
			calls[method] += v
		}
	})
	u, err2 := takeUsage(ctx, s)
	return u, calls, errors.Join(err, err2)
}

// restart kills the only member and starts it again, with what it has kept or without.
func (s *etcdSystem) restart(ctx context.Context, wiped bool) error {
	s.servers[0].kill()
	if wiped {
		if err := os.RemoveAll(filepath.Join(s.servers[0].dir, "data")); err != nil {
			return err
		}
	}
	if err := s.servers[0].start(); err != nil {
		return err
	}
	return s.serving(ctx, 0)
}

// fill writes until the quota is used up.
func (s *etcdSystem) fill(ctx context.Context) error {
	for n := range 100 {
		if _, err := s.admin.Put(ctx, fmt.Sprint("fill/", n), strings.Repeat("x", 1<<20)); err != nil {
			if strings.Contains(err.Error(), "database space exceeded") {
				return nil
			}
			return err
		}
	}
	return errors.New("100 MB were written, and the quota is not used up")
}

// demand lets the server ask everybody for a user and a password, which are the same.
func (s *etcdSystem) demand(ctx context.Context, user string) error {
	_, err := s.admin.UserAdd(ctx, user, user)
	_, err2 := s.admin.RoleAdd(ctx, "root")
	_, err3 := s.admin.UserGrantRole(ctx, user, "root")
	_, err4 := s.admin.AuthEnable(ctx)
	if err := errors.Join(err, err2, err3, err4); err != nil {
		return err
	}
	s.admin.Close()
	s.admin, err = dialEtcd(clientOptions{addr: s.addresses[0], user: user})
	return err
}

// startProxy starts etcd's proxy before the server.
func (s *etcdSystem) startProxy(ctx context.Context) (*process, string, error) {
	addrs, err := freeAddrs(1)
	if err != nil {
		return nil, "", err
	}
	proxy, err := startProcess("etcd", func(dir string) []string {
		return []string{"grpc-proxy", "start", "--endpoints", s.addresses[0], "--listen-addr", addrs[0],
			"--advertise-client-url", addrs[0], "--data-dir", dir}
	})
	if err != nil {
		return nil, "", err
	}
	c, err := dialEtcd(clientOptions{addr: addrs[0]})
	if err == nil {
		err = proxy.answers(ctx, func(ctx context.Context) error {
			_, err := c.Get(ctx, "any", clientv3.WithCountOnly())
			return err
		})
		c.Close()
	}
	if err != nil {
		return nil, "", errors.Join(err, proxy.close())
	}
	return proxy, addrs[0], nil
}
