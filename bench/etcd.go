package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	fenceetcd "github.com/fencelock/fencelock/etcd"
)

func startEtcd(life *scope) *system {
	s, _ := etcdMembers(life, 1)
	return s
}

func startEtcdCluster(life *scope) *system {
	s, _ := etcdMembers(life, clusterSize)
	s.name = "etcd-cluster"
	return s
}

// etcdMembers starts a cluster of etcds from PATH, with fsync and etcd's own settings but for args. Clients use the
// leader, which is fastest. Its trips are the messages that it received: a unary call is one, and so is each message
// of a stream (watches, keepalives). Its commands are raft entries.
func etcdMembers(life *scope, members int, args ...string) (*system, *clientv3.Client) {
	s := &system{name: "etcd", addresses: life.addrs(members)}
	peers, cluster := life.addrs(members), ""
	for i, peer := range peers {
		cluster += fmt.Sprintf(",bench%d=http://%s", i, peer)
	}
	for i := range peers {
		client, peer := "http://"+s.addresses[i], "http://"+peers[i]
		s.servers = append(s.servers, life.process("etcd", func(dir string) []string {
			return append([]string{"--data-dir", dir + "/data", "--log-level", "error",
				"--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
				"--initial-advertise-peer-urls", peer, "--initial-cluster", cluster[1:],
				"--name", fmt.Sprint("bench", i)}, args...)
		}))
	}
	admin := dialEtcd(life, clientOptions{addr: s.endpoints()})
	s.leads = func(ctx context.Context, member int) (bool, error) {
		status, err := admin.Status(ctx, s.addresses[member])
		return err == nil && status.Leader == status.Header.MemberId, err
	}
	s.serves = func(ctx context.Context, member int) (string, error) {
		status, err := admin.Status(ctx, s.addresses[member])
		if err != nil {
			return "", err
		}
		if status.Leader == 0 {
			return "", errors.New("it has no leader")
		}
		_, err = admin.Get(ctx, "any") // only the leader can answer
		return "etcd " + status.Version, err
	}
	for i := range s.servers {
		life.must(s.serving(life.ctx, i))
	}
	s.count = func(by *scope) (commands, trips float64) {
		for _, address := range s.addresses {
			for name, v := range etcdMetrics(by, address) {
				switch {
				case strings.HasPrefix(name, etcdReceived) && !strings.Contains(name, "Maintenance"):
					trips += v
				case name == "etcd_server_proposals_committed_total":
					commands = max(commands, v) // every member counts every entry
				}
			}
		}
		return commands, trips
	}
	remove := func(by *scope, key string, below clientv3.OpOption) {
		_, err := admin.Delete(by.ctx, key, below)
		by.must(err)
	}
	s.reset = func(by *scope) { remove(by, "\x00", clientv3.WithFromKey()) }
	// A key is the prefix under which a library keeps the keys of a name.
	s.erase = func(by *scope, key string) { remove(by, key, clientv3.WithPrefix()) }
	s.missing = func(by *scope, keys []string) (gone int) {
		for _, key := range keys {
			resp, err := admin.Get(by.ctx, key, clientv3.WithPrefix(), clientv3.WithCountOnly())
			by.must(err)
			if resp.Count == 0 {
				gone++
			}
		}
		return gone
	}
	return s, admin
}

// dialEtcd returns a client with the library's defaults.
func dialEtcd(c *scope, o clientOptions) *clientv3.Client {
	config := clientv3.Config{
		Endpoints: strings.Split(o.addr, ","), DialTimeout: 5 * time.Second, Logger: zap.NewNop(),
		Username: o.user, Password: o.user,
	}
	if o.dial != nil {
		config.DialOptions = append(config.DialOptions, grpc.WithContextDialer(
			func(ctx context.Context, addr string) (net.Conn, error) { return o.dial(ctx, "tcp", addr) }))
	}
	etcd, err := clientv3.New(config)
	c.must(err)
	c.closing(etcd)
	return etcd
}

// etcdReceived begins the metric of messages received, by the method.
const etcdReceived = "grpc_server_msg_received_total"

// etcdMetrics reads a member's counters, with the labels in the names.
func etcdMetrics(by *scope, address string) map[string]float64 {
	req, err := http.NewRequestWithContext(by.ctx, http.MethodGet, "http://"+address+"/metrics", nil)
	by.must(err)
	resp, err := http.DefaultClient.Do(req)
	by.must(err)
	defer resp.Body.Close()
	all, lines := map[string]float64{}, bufio.NewScanner(resp.Body)
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), " ")
		if v, err := strconv.ParseFloat(value, 64); err == nil {
			all[name] = v
		}
	}
	by.must(lines.Err())
	return all
}

func etcdPeers(*system) []peer {
	return []peer{
		{name: "raw", role: roleFloor, open: openRawEtcd, sessions: openEtcdLeases, watch: watchRawEtcd},
		{name: "raw queue", role: roleFloor, waits: true, open: openQueueEtcd},
		ourPeer(func(c *client, o clientOptions) backend.Driver { return fenceetcd.New(dialEtcd(&c.scope, o), nil) },
			func(name string) string { return "fencelock/+locks/" + url.PathEscape(name) + "/" }),
		{name: "concurrency.Mutex", role: rolePeer, waits: true, open: openMutexEtcd,
			renewEvery: func(ttl time.Duration) time.Duration { return ttl / 3 },
			key:        func(name string) string { return name + "/" }},
	}
}

// etcdClusterPeers returns the peers of etcd, with our driver as a URL opens it: it closes connections to unresponsive
// members.
func etcdClusterPeers(s *system) []peer {
	all := etcdPeers(s)
	for i := range all {
		if all[i].role == roleOurs {
			all[i].open = func(c *client, o clientOptions) lock {
				d, err := fenceetcd.Open(c.ctx, "etcd://"+o.addr)
				c.must(err)
				return c.ours(d, o.ttl)
			}
		}
	}
	return all
}

// etcdSession is the basis of the peers: a client and a lease that the client's library keeps alive.
type etcdSession struct {
	*clientv3.Client
	s     *concurrency.Session
	count atomic.Uint64
}

func openEtcdSession(c *client, o clientOptions) *etcdSession {
	etcd := dialEtcd(&c.scope, o)
	c.native = etcd
	s, err := concurrency.NewSession(etcd, concurrency.WithTTL(int(max(o.ttl, time.Second)/time.Second)))
	c.must(err)
	c.later(s.Orphan)
	c.later(func() { bounded(revoking(etcd, s.Lease())) })
	return &etcdSession{Client: etcd, s: s}
}

// revoking ends leases.
func revoking(etcd *clientv3.Client, leases ...clientv3.LeaseID) func(context.Context) error {
	return func(ctx context.Context) error {
		return each(len(leases), func(i int) error { _, err := etcd.Revoke(ctx, leases[i]); return err })
	}
}

// openRawEtcd is the floor without contention: a transaction that creates a key, and one that deletes it.
func openRawEtcd(c *client, o clientOptions) lock {
	e := openEtcdSession(c, o)
	return func(ctx context.Context, name string) (hold, error) {
		resp, err := e.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(name), "=", 0)).
			Then(clientv3.OpPut(name, "one-of-some-length-like-a-uuid", clientv3.WithLease(e.s.Lease()))).Commit()
		switch {
		case err != nil:
			return nil, err
		case !resp.Succeeded:
			return nil, backend.ErrHeld
		}
		return e.key(name, resp.Header.Revision), nil
	}
}

// watchRawEtcd watches the lock's key.
func watchRawEtcd(ctx context.Context, w watched) error {
	for resp := range w.by.native.(*clientv3.Client).Watch(ctx, w.name) {
		if err := resp.Err(); err != nil {
			return err
		}
		for range resp.Events {
			w.seen()
		}
	}
	return ctx.Err()
}

// key returns a hold in the form of one key, which its release deletes only if the key still has that revision.
func (e *etcdSession) key(key string, revision int64) hold {
	return theirs{free: func(ctx context.Context) error {
		_, err := e.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(key), "=", revision)).
			Then(clientv3.OpDelete(key)).Commit()
		return err
	}}
}

// openQueueEtcd is the floor with contention: a FIFO of keys, in which each waiter watches the key before its own from
// the current revision on, and reads once more when the watch has begun. It does not prove its own key.
func openQueueEtcd(c *client, o clientOptions) lock {
	e := openEtcdSession(c, o)
	return func(ctx context.Context, name string) (hold, error) {
		key := fmt.Sprintf("%s/%x-%d", name, e.s.Lease(), e.count.Add(1))
		resp, err := e.Put(ctx, key, "", clientv3.WithLease(e.s.Lease()))
		if err != nil {
			return nil, err
		}
		own, revision := e.key(key, resp.Header.Revision), resp.Header.Revision
		for {
			earlier := append(clientv3.WithLastCreate(), clientv3.WithMaxCreateRev(revision-1))
			before, err := e.Get(ctx, name+"/", earlier...)
			if err == nil && len(before.Kvs) == 0 {
				return own, nil
			}
			if err == nil {
				err = e.gone(ctx, string(before.Kvs[0].Key), before.Kvs[0].CreateRevision)
			}
			if err != nil {
				return nil, errors.Join(err, own.Release(context.WithoutCancel(ctx)))
			}
		}
	}
}

// gone waits until a key is deleted.
func (e *etcdSession) gone(ctx context.Context, key string, revision int64) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for resp := range e.Watch(ctx, key, clientv3.WithFilterPut(), clientv3.WithCreatedNotify()) {
		if err := resp.Err(); err != nil || len(resp.Events) > 0 {
			return err
		}
		now, err := e.Get(ctx, key)
		if err != nil || len(now.Kvs) == 0 || now.Kvs[0].CreateRevision != revision {
			return err
		}
	}
	return ctx.Err()
}

// openMutexEtcd is the recipe of etcd's client, with one session for all locks of the client, as an expert uses it.
func openMutexEtcd(c *client, o clientOptions) lock {
	e := openEtcdSession(c, o)
	return func(ctx context.Context, name string) (hold, error) {
		m := concurrency.NewMutex(e.s, name)
		err := m.Lock(ctx)
		return theirs{free: m.Unlock, lost: e.s.Ctx()}, err
	}
}

// openEtcdLeases opens leases and keeps them alive over one stream, as etcd's client does, but whenever callers ask.
func openEtcdLeases(c *client, o clientOptions, n int) renewal {
	etcd := dialEtcd(&c.scope, o)
	ids, alive := make([]clientv3.LeaseID, n), map[int64]chan struct{}{}
	c.must(each(n, func(i int) error {
		lease, err := etcd.Grant(c.ctx, int64(o.ttl.Seconds()))
		if err == nil {
			ids[i] = lease.ID
		}
		return err
	}))
	c.later(func() { bounded(revoking(etcd, ids...)) })
	for _, id := range ids {
		alive[int64(id)] = make(chan struct{}, 1)
	}
	streaming, cancel := context.WithCancelCause(context.WithoutCancel(c.ctx))
	c.later(func() { cancel(nil) })
	stream, err := pb.NewLeaseClient(etcd.ActiveConnection()).LeaseKeepAlive(streaming)
	c.must(err)
	go func() {
		for {
			answer, err := stream.Recv()
			if err == nil && answer.TTL <= 0 {
				err = fmt.Errorf("the lease %x has ended", answer.ID)
			}
			if err != nil {
				cancel(err)
				return
			}
			alive[answer.ID] <- struct{}{}
		}
	}()
	var sending sync.Mutex
	return func(ctx context.Context, i int) error {
		id := int64(ids[i])
		sending.Lock()
		err := stream.Send(&pb.LeaseKeepAliveRequest{ID: id})
		sending.Unlock()
		if err != nil {
			return err
		}
		select {
		case <-alive[id]:
			return nil
		case <-streaming.Done():
			return context.Cause(streaming)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// troubled measures a separate etcd in a setting, or after an event, in which locks are easily lost: one client holds
// 200.
func troubled(r *round, trouble string) {
	args := map[string][]string{"nospace": {"--quota-backend-bytes", "16777216"}, "txnops": {"--max-txn-ops", "64"}}
	s, admin := etcdMembers(&r.scope, 1, args[trouble]...)
	ttl := r.length(6*time.Second, 3*time.Second)
	o, window := clientOptions{addr: s.addr(), ttl: ttl}, 2*ttl
	switch trouble {
	case "auth":
		o.user, window = "root", r.length(40*time.Second, window) // for events a few times a minute
		r.demandPassword(admin, o.user)
	case "proxy":
		o.addr = r.etcdProxy(s.addr())
		c, err := r.peer.client(r.ctx, o)
		if err == nil {
			defer c.end()
			err = c.cycle(r.ctx, r.fresh("trouble"))
		}
		if errors.Is(err, fencelock.ErrMisconfigured) {
			r.s["refused"] = 1
			return
		}
	}
	c, holds := r.open(1, o)[0], make([]hold, 200)
	r.must(each(len(holds), func(i int) (err error) {
		holds[i], err = c.lock(r.ctx, r.fresh("trouble"))
		return err
	}))
	if trouble == "nospace" {
		r.fill(admin)
	}
	if trouble != "auth" && trouble != "proxy" { // restart the only member, which elects itself again
		s.servers[0].kill()
		if trouble == "wiped" {
			r.must(os.RemoveAll(filepath.Join(s.servers[0].dir, "data")))
		}
		r.must(s.servers[0].start())
		r.must(s.serving(r.ctx, 0))
	}
	r.at = s // the costs are this server's
	r.s["auths"], r.s["keepalives"], r.s["lost"], r.s["history"] = 0, 0, 0, 0
	const received = etcdReceived + `{grpc_method="`
	before := etcdMetrics(&r.scope, s.addresses[0])
	d := r.spend(func() { sleep(r.ctx, window) })
	for name, v := range etcdMetrics(&r.scope, s.addresses[0]) {
		switch since := v - before[name]; {
		case strings.HasPrefix(name, received+`Authenticate"`):
			r.s["auths"] += since / d.wall.Minutes()
		case strings.HasPrefix(name, received+`LeaseKeepAlive"`):
			r.s["keepalives"] += since / d.wall.Seconds()
		}
	}
	for _, h := range holds {
		if h.Context().Err() == nil {
			continue
		}
		r.s["lost"]++
		var why *fencelock.LostError
		lease, _ := h.(*fencelock.Lease)
		if lease != nil && errors.As(lease.Err(), &why) && why.Reason == fencelock.ReasonHistoryLost {
			r.s["history"] += 1 / float64(len(holds))
		}
	}
	d.perSecond(r.s)
}

// fill writes until the quota is used up.
func (r *round) fill(admin *clientv3.Client) {
	for n := range 100 {
		_, err := admin.Put(r.ctx, fmt.Sprint("fill/", n), strings.Repeat("x", 1<<20))
		if err != nil && strings.Contains(err.Error(), "database space exceeded") {
			return
		}
		r.must(err)
	}
	r.must(errors.New("100 MB were written, and the quota is not used up"))
}

// demandPassword lets the server require a user and a password, which are the same.
func (r *round) demandPassword(admin *clientv3.Client, user string) {
	_, err := admin.UserAdd(r.ctx, user, user)
	_, err2 := admin.RoleAdd(r.ctx, "root")
	_, err3 := admin.UserGrantRole(r.ctx, user, "root")
	_, err4 := admin.AuthEnable(r.ctx)
	r.must(errors.Join(err, err2, err3, err4))
}

// etcdProxy starts etcd's proxy before a server, and returns its address.
func (r *round) etcdProxy(server string) string {
	addr := r.addrs(1)[0]
	proxy := r.process("etcd", func(dir string) []string {
		return []string{"grpc-proxy", "start", "--endpoints", server, "--listen-addr", addr,
			"--advertise-client-url", addr, "--data-dir", dir}
	})
	c := dialEtcd(&r.scope, clientOptions{addr: addr})
	r.must(proxy.answers(r.ctx, func(ctx context.Context) error {
		_, err := c.Get(ctx, "any", clientv3.WithCountOnly())
		return err
	}))
	return addr
}
