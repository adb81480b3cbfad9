package redis

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/testtier"
)

// startReplica starts a replica of master.
func startReplica(t *testing.T, master *testServer, args ...string) *testServer {
	t.Helper()
	replica := startServer(t, append([]string{"--replicaof", strings.Replace(master.addr, ":", " ", 1)}, args...)...)
	awaitReplica(t, replica)
	return replica
}

func awaitReplica(t *testing.T, replica *testServer) {
	t.Helper()
	c := replica.admin(t)
	eventually(t, "the replica is connected", func() bool {
		text, err := c.Info(context.Background(), "replication").Result()
		return err == nil && strings.Contains(text, "master_link_status:up")
	})
}

// A grant and a renewal wait until the replica has them. While the replica does not answer, no lock is granted, no key
// remains, and existing holds are not lost.
func TestReplicas(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	replica := startReplica(t, s)
	with := func(timeout string) *Driver {
		d, err := opened(t, "redis://"+s.addr+"?replicas=1&replica-timeout="+timeout)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	d, impatient := with("10s"), with("300ms") // the replica answers in time for d only
	plain := s.open(t)
	kinds := map[string]func(backend.Request) backend.Request{
		"exclusive": func(r backend.Request) backend.Request { return r },
		"shared":    reading,
		"permits":   func(r backend.Request) backend.Request { return taking(r, 1, 2) },
	}
	has := func(name string) bool {
		return replica.admin(t).Exists(context.Background(), redisscript.KeysOf("fencelock:", name).Lock).Val() == 1
	}
	var held []backend.Grant
	for kind, as := range kinds {
		held = append(held, mustAcquire(t, d, as(request(kind, time.Minute, true))))
		if !has(kind) {
			t.Errorf("%s: granted, and the replica does not have it", kind)
		}
	}
	all, err := d.AcquireAll(within(t, 10*slack), set("x", "y"))
	if err != nil || !has("x") || !has("y") {
		t.Fatalf("several names: %v", err)
	}
	held = append(held, all...)
	first := mustAcquire(t, plain, request("waited-for", time.Minute, true))
	waited := inLine(t, plain, d, request("waited-for", time.Minute, true), 1)
	mustRelease(t, plain, first)
	held = append(held, <-waited)

	replica.pause()
	short := func(what string, err error) {
		t.Helper()
		var r *ReplicasError
		if !errors.As(err, &r) || r.Want != 1 || r.Got != 0 || !errors.Is(err, backend.ErrUnavailable) {
			t.Errorf("%s without the replica: %v", what, err)
		}
	}
	ctx := within(t, 30*time.Second)
	for kind, as := range kinds {
		for _, wait := range []bool{false, true} {
			_, err := impatient.Acquire(ctx, as(request("new-"+kind, time.Minute, wait)))
			short(fmt.Sprint(kind, " wait ", wait), err)
		}
		mustRelease(t, plain, mustAcquire(t, plain, request("new-"+kind, time.Minute, false)))
	}
	_, err = impatient.AcquireAll(ctx, set("p", "q"))
	short("several names", err)
	mustRelease(t, plain, mustAcquire(t, plain, request("p", time.Minute, false)))
	for i, answer := range impatient.Renew(ctx, held) {
		short("renewing "+held[i].Name, answer.Err)
	}
	// A waiter whose grant is not confirmed passes it on.
	first = mustAcquire(t, plain, request("passed-on", time.Minute, true))
	refused := make(chan error, 1)
	go func() {
		_, err := impatient.Acquire(ctx, request("passed-on", time.Minute, true))
		refused <- err
	}()
	awaitWaiters(t, plain, "passed-on", 1)
	next := inLine(t, plain, plain, request("passed-on", time.Minute, true), 2)
	mustRelease(t, plain, first)
	short("a waiter", <-refused)
	mustRelease(t, plain, <-next)

	replica.resume()
	awaitReplica(t, replica)
	eventually(t, "what is held is renewed", func() bool {
		for _, answer := range d.Renew(ctx, held) {
			if answer.Err != nil {
				return false
			}
		}
		return true
	})
	for _, g := range held {
		mustRelease(t, d, g)
	}
	nothingLeft(t, s)
}

// On a cluster the replicas of the name's own master count.
func TestReplicasOfACluster(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	nodes := startCluster(t)
	ctx := within(t, 30*time.Second)
	_, bus, _ := net.SplitHostPort(freeport.Addresses(t, 1)[0])
	replica := startServer(t, "--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--cluster-port", bus)
	host, at, _ := net.SplitHostPort(replica.addr)
	if err := nodes[0].admin(t).Do(ctx, "cluster", "meet", host, at, bus).Err(); err != nil {
		t.Fatal(err)
	}
	id, err := nodes[0].admin(t).Do(ctx, "cluster", "myid").Text()
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is a replica of the first", func() bool {
		return replica.admin(t).Do(ctx, "cluster", "replicate", id).Err() == nil
	})
	awaitReplica(t, replica)
	with := func(timeout string) *Driver {
		d, err := opened(t, "redis+cluster://"+nodes[0].addr+"?replicas=1&replica-timeout="+timeout)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	patient, impatient := with("10s"), with("300ms")
	granted := [3]int{}
	for i := range 12 {
		name := fmt.Sprint("n", i)
		slot := int(nodes[0].admin(t).ClusterKeySlot(ctx, redisscript.KeysOf("fencelock:", name).Lock).Val())
		on := 0
		for (on+1)*16384/3 <= slot {
			on++
		}
		d := patient
		if on > 0 {
			d = impatient
		}
		g, err := d.Acquire(ctx, request(name, time.Minute, i%2 == 0))
		var short *ReplicasError
		switch {
		case on == 0 && err != nil:
			t.Errorf("%s on the master with a replica: %v", name, err)
		case on > 0 && !errors.As(err, &short):
			t.Errorf("%s on a master without a replica: %v", name, err)
		}
		granted[on]++
		if err == nil {
			mustRelease(t, d, g)
		}
	}
	if granted[0] == 0 || granted[0] == 12 {
		t.Errorf("names on the nodes: %v", granted)
	}
	for i, s := range nodes {
		if left := keys(t, s.admin(t)); len(left) > 0 {
			t.Errorf("left on node %d: %v", i, left)
		}
	}
}

// Replicas that must have a grant on disk, from Redis 7.2 on. For an older server, a proxy asks for the replicas'
// memory instead.
func TestReplicasOnDisk(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	query := "?replicas=1&replica-disk=true&protocol=2"
	version := s.admin(t).InfoMap(within(t, 10*slack), "server").Item("Server", "redis_version")
	server, err := redisconn.ParseVersion(version)
	if err != nil {
		t.Fatal(err)
	}
	addr := s.addr
	if !server.AtLeast(7, 2) {
		if _, err := opened(t, "redis://"+addr+query); !errors.Is(err, backend.ErrMisconfigured) ||
			!strings.Contains(err.Error(), "WAITAOF") {
			t.Errorf("on %s: %v", version, err)
		}
		addr = between(t, addr, memoryForDisk)
		query += "&assume-version=7.2"
	}
	// Not earlier: a replica that is killed immediately leaves a child, which continues to write its file.
	replica := startReplica(t, s, "--appendonly", "yes")
	with := func(timeout string) *Driver {
		d, err := opened(t, "redis://"+addr+query+"&replica-timeout="+timeout)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	d, impatient := with("10s"), with("300ms") // the replica answers in time for d only
	mustRelease(t, d, mustAcquire(t, d, request("n", time.Minute, false)))
	replica.pause()
	defer replica.resume()
	var short *ReplicasError
	_, err = impatient.Acquire(within(t, 20*time.Second), request("n", time.Minute, false))
	if !errors.As(err, &short) || !short.Disk || short.Got != 0 || short.Want != 1 {
		t.Errorf("without the replica: %v", err)
	}
}

// memoryForDisk answers WAITAOF with the server's answer to WAIT.
func memoryForDisk(client, server net.Conn) {
	in, back := bufio.NewReader(client), bufio.NewReader(server)
	for {
		whole, words, err := readItem(in, nil, nil)
		if err != nil {
			return
		}
		disk := strings.EqualFold(words[0], "waitaof")
		if disk {
			whole = fmt.Appendf(nil, "*3\r\n$4\r\nwait\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n",
				len(words[2]), words[2], len(words[3]), words[3])
		}
		if _, err := server.Write(whole); err != nil {
			return
		}
		answer, _, err := readItem(back, nil, nil)
		if err != nil {
			return
		}
		if disk {
			answer = append([]byte("*2\r\n:0\r\n"), answer...) // on this server's disk, and on those of replicas
		}
		if _, err := client.Write(answer); err != nil {
			return
		}
	}
}

// Invalid settings are refused, and so is a user without the right to WAIT.
func TestReplicaSettings(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	for _, o := range []Options{
		{Replicas: -1}, {Replicas: 101}, {Replicas: 1, ReplicaTimeout: -1},
		{ReplicaTimeout: time.Second}, {ReplicaDisk: true},
	} {
		client := goredis.NewClient(&goredis.Options{Addr: s.addr})
		d := New(client, &o)
		if err := d.Ping(within(t, 10*slack)); !errors.Is(err, backend.ErrInvalidOption) {
			t.Errorf("%+v: %v", o, err)
		}
		if err := errors.Join(d.Close(context.Background()), client.Close()); err != nil {
			t.Error(err)
		}
	}
	for _, query := range []string{
		"replicas=0", "replicas=x", "replica-timeout=1s",
		"replicas=1&replica-timeout=0s", "replicas=1&replica-disk=yes",
	} {
		if _, err := opened(t, "redis://"+s.addr+"?"+query); !errors.Is(err, backend.ErrInvalidOption) {
			t.Errorf("%s: %v", query, err)
		}
	}
	if err := s.admin(t).ACLSetUser(
		within(t, 10*slack), "worker", "on", ">pw", "~*", "&*", "+@all", "-wait",
	).Err(); err != nil {
		t.Fatal(err)
	}
	d, err := opened(t, "redis://worker:pw@"+s.addr+"?replicas=1")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Acquire(
		within(t, 10*slack), request("n", time.Minute, true),
	); !errors.Is(err, backend.ErrMisconfigured) {
		t.Errorf("without +wait: %v", err)
	}
	nothingLeft(t, s)
}

// A repeated request that replicas do not confirm is refused, and the hold of the earlier attempt remains. The wait
// for replicas may exceed the time of another step.
func TestUnconfirmedRepetition(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	replica := startReplica(t, s)
	d, err := opened(t, "redis://"+s.addr+"?replicas=1&replica-timeout=3500ms")
	if err != nil {
		t.Fatal(err)
	}
	r := request("n", time.Minute, false)
	r.Fresh = false
	g := mustAcquire(t, d, r)
	replica.pause()
	var short *ReplicasError
	if _, err := d.Acquire(within(t, 30*time.Second), r); !errors.As(err, &short) || errors.Is(err, backend.ErrUnknown) {
		t.Errorf("the same request without the replica: %v", err)
	}
	if err := d.Renew(within(t, 30*time.Second), []backend.Grant{g})[0].Err; !errors.As(err, &short) {
		t.Errorf("a renewal without the replica: %v", err)
	}
	if _, err := d.Acquire(within(t, 30*time.Second), request("m", time.Minute, false)); !errors.As(err, &short) ||
		errors.Is(err, backend.ErrUnknown) {
		t.Errorf("a new request without the replica: %v", err)
	}
	replica.resume()
	awaitReplica(t, replica)
	mustRelease(t, d, g)
	nothingLeft(t, s)
}

// An assumption of a cluster applies from the first call on.
func TestAssumedClusterBeforeALook(t *testing.T) {
	t.Parallel()
	client := goredis.NewClient(fitOptions("127.0.0.1:1"))
	t.Cleanup(func() { client.Close() })
	d := New(client, &Options{Assume: &Server{Version: "7.0", Cluster: true}})
	defer d.Close(within(t, slack))
	if d.Describe().Capabilities.Has(backend.CapMultiAcquire) {
		t.Error("several names are acquired in one step")
	}
}
