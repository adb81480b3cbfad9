package etcd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
)

// lasting returns a request with another TTL.
func lasting(name string, wait bool, ttl time.Duration) backend.Request {
	r := request(name, wait)
	r.TTL = ttl
	return r
}

// session returns a session with a TTL of a minute.
func session(t *testing.T, s *service) engine.Session {
	t.Helper()
	own, err := s.Open(t.Context(), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	return own
}

func enter(t *testing.T, s *service, r engine.Entering) engine.Position {
	t.Helper()
	p, err := s.Enter(t.Context(), r)
	if err != nil {
		t.Fatalf("Enter = %v", err)
	}
	return p
}

// A server may allow fewer operations in a transaction than the first Enter of a request has: then it takes a read and
// a transaction, and no repetition.
func TestEnterWhereTheServerAllowsFewOperations(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t, containers.Args("--max-txn-ops", "9"))
	s := New(dial(t, server.Addr()), nil).service
	if err := s.Probe(t.Context()); err != nil {
		t.Fatal(err)
	}
	own := session(t, s)
	for _, kind := range []backend.Kind{backend.KindExclusive, backend.KindShared, backend.KindPermits} {
		for _, wait := range []bool{false, true} {
			r := lasting("few/"+kind.String(), wait, time.Minute)
			r.Kind = kind
			if kind == backend.KindPermits {
				r.Permits, r.Limit = 2, 3
			}
			entering := engine.Entering{Request: r, Session: own, Attempt: backend.NewRequestID()}
			p := enter(t, s, entering)
			if !p.Held {
				t.Errorf("%v, wait %v: %+v, want a hold", kind, wait, p)
			}
			g := r.Grant()
			g.Incarnation = p.Incarnation
			if left, err := s.Leave(t.Context(), engine.Leaving{Grant: g, Session: own, Known: true}); err != nil || !left.Was {
				t.Errorf("%v, wait %v: Leave = %+v, %v", kind, wait, left, err)
			}
		}
	}
}

// late holds back the first transaction that writes an existing key, once it is armed.
type late struct {
	mu      sync.Mutex // protects the following fields
	armed   bool
	deliver func() error
}

func (l *late) intercept(
	ctx context.Context, method string, request, reply any, conn *grpc.ClientConn,
	call grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	txn, ok := request.(*pb.TxnRequest)
	l.mu.Lock()
	held := ok && l.armed && movesKey(txn)
	if held {
		l.armed = false
		l.deliver = func() error {
			return call(context.WithoutCancel(ctx), method, request, &pb.TxnResponse{}, conn, opts...)
		}
	}
	l.mu.Unlock()
	if held {
		return status.Error(codes.Unavailable, "the answer got lost")
	}
	return call(ctx, method, request, reply, conn, opts...)
}

func (l *late) arm() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.armed = true
}

// movesKey reports whether a transaction puts a key and keeps its value.
func movesKey(txn *pb.TxnRequest) bool {
	return slices.ContainsFunc(slices.Concat(txn.Success, txn.Failure), func(op *pb.RequestOp) bool {
		put, inner := op.GetRequestPut(), op.GetRequestTxn()
		return put != nil && put.IgnoreValue || inner != nil && movesKey(inner)
	})
}

// A transaction that moves a key to a session is executed after the key has moved to the next session: it changes
// nothing.
func TestLateMoveTakesNothingBack(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	for what, wait := range map[string]bool{"of a hold": false, "of a waiter": true} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			var l late
			client, err := clientv3.New(clientv3.Config{
				Endpoints: []string{server.Addr()}, Logger: zap.NewNop(), DialTimeout: 20 * time.Second,
				DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(l.intercept)},
			})
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			s := New(client, nil).service
			if err := s.Probe(t.Context()); err != nil {
				t.Fatal(err)
			}
			first, second, third := session(t, s), session(t, s), session(t, s)
			name := "late/" + what
			if wait {
				enter(t, s, engine.Entering{Request: lasting(name, false, time.Minute), Session: first, Attempt: "holder"})
			}
			r := lasting(name, wait, time.Minute)
			entering := engine.Entering{Request: r, Session: first, Attempt: "moves"}
			p := enter(t, s, entering)
			if p.Held == wait {
				t.Fatalf("%+v", p)
			}
			move := func(to engine.Session) error {
				if wait {
					entering.Session, entering.Place = to, p.Place
					_, err := s.Enter(t.Context(), entering)
					return err
				}
				g := r.Grant()
				g.Incarnation = p.Incarnation
				out, err := s.Extend(t.Context(), to, []engine.Holding{{Grant: g}})
				if err == nil {
					err = out[0].Err
				}
				return err
			}
			l.arm()
			if err := move(second); err == nil {
				t.Fatal("no transaction was held back")
			}
			if err := move(third); err != nil {
				t.Fatal(err)
			}
			if err := l.deliver(); err != nil {
				t.Fatal(err)
			}
			if err := s.End(t.Context(), second); err != nil { // with all of its keys
				t.Fatal(err)
			}
			state, err := s.Look(t.Context(), name)
			if err != nil || len(state.Holders)+state.Waiters != 1+map[bool]int{true: 1}[wait] {
				t.Errorf("%+v, %v: the late transaction has moved the key", state, err)
			}
		})
	}
}

// moving is a Service whose sessions can be outgrown, as after an election.
type moving struct {
	*service
	mu       sync.Mutex // protects the following fields
	current  engine.Session
	outgrown map[engine.Session]bool
}

func (m *moving) Open(ctx context.Context, ttl time.Duration) (engine.Session, error) {
	s, err := m.service.Open(ctx, ttl)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.current = s
	return s, err
}

func (m *moving) Prove(ctx context.Context, s engine.Session) error {
	err := m.service.Prove(ctx, s)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.outgrown[s] {
		return engine.ErrOutgrown
	}
	return err
}

func (m *moving) outgrow() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.outgrown[m.current] = true
}

// A waiter moves to the next session, and to the one after it, and gets its hold.
func TestWaiterMovesWithItsSession(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	admin := dial(t, server.Addr())
	holder, m := newDriver(t, server.Addr()),
		&moving{service: New(dial(t, server.Addr()), nil).service, outgrown: map[engine.Session]bool{}}
	waiter := engine.New(m)
	defer holder.Close(context.WithoutCancel(t.Context()))
	defer waiter.Close(context.WithoutCancel(t.Context()))
	first, err := holder.Acquire(t.Context(), lasting("x", false, time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	r := lasting("x", true, 10*time.Second)
	done := make(chan outcome, 1)
	go func() {
		g, err := waiter.Acquire(t.Context(), r)
		done <- outcome{g, err}
	}()
	seen := map[int64]bool{}
	for deadline := time.Now().Add(2 * time.Minute); len(seen) < 3; {
		resp, err := admin.Get(t.Context(), dirOf("x"), clientv3.WithPrefix(),
			clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend))
		if err != nil {
			t.Fatal(err)
		}
		if len(resp.Kvs) == 2 && !seen[resp.Kvs[1].Lease] {
			seen[resp.Kvs[1].Lease] = true
			if len(seen) < 3 {
				m.outgrow()
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("the waiter was on %d sessions, want 3", len(seen))
		}
		time.Sleep(20 * time.Millisecond)
	}
	if err := holder.Release(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	select {
	case o := <-done:
		if o.err != nil || o.grant.Token <= first.Token {
			t.Errorf("the waiter: %+v, %v, after token %v", o.grant, o.err, first.Token)
		}
	case <-time.After(2 * time.Minute):
		t.Error("the waiter did not get the hold")
	}
	if err := waiter.Release(t.Context(), r.Grant()); err != nil && !errors.Is(err, backend.ErrNotHeld) {
		t.Error(err)
	}
}

// A hundred TTLs of one client need few leases: each lasts as long as every hold on it.
func TestSimilarTTLsShareALease(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	admin, d := dial(t, server.Addr()), newDriver(t, server.Addr())
	var held []backend.Grant
	for i := range 100 {
		g, err := d.Acquire(t.Context(), lasting(fmt.Sprintf("name-%d", i), false, time.Duration(20+i)*time.Second))
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, g)
	}
	for i, renewal := range d.Renew(t.Context(), held) {
		if renewal.Err != nil || renewal.TTL != held[i].TTL {
			t.Errorf("a hold of %v was renewed for %v: %v", held[i].TTL, renewal.TTL, renewal.Err)
		}
	}
	leases, err := admin.Leases(t.Context())
	if err != nil || len(leases.Leases) > 20 {
		t.Errorf("%d leases for 100 TTLs: %v", len(leases.Leases), err)
	}
	found := 0
	for _, lease := range leases.Leases {
		ttl, err := admin.TimeToLive(t.Context(), lease.ID, clientv3.WithAttachedKeys())
		if err != nil {
			t.Fatal(err)
		}
		for _, key := range ttl.Keys {
			for i := range held {
				if !strings.Contains(string(key), fmt.Sprintf("/name-%d/", i)) {
					continue
				}
				found++
				if full := time.Duration(ttl.GrantedTTL) * time.Second; full < held[i].TTL || full > held[i].TTL*5/4 {
					t.Errorf("a hold of %v is on a lease of %v", held[i].TTL, full)
				}
			}
		}
	}
	if found != len(held) {
		t.Errorf("%d of %d holds have a key on a lease", found, len(held))
	}
}

// A driver that is closed removes its leases, with the keys of its sessions.
func TestCloseLeavesNothing(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	admin, d := dial(t, server.Addr()), newDriver(t, server.Addr())
	g, err := d.Acquire(t.Context(), lasting("x", false, time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Release(t.Context(), g); err != nil {
		t.Fatal(err)
	}
	if before, err := admin.Leases(t.Context()); err != nil || len(before.Leases) != 1 {
		t.Fatalf("while the driver is open: %v, %v; want a lease", before, err)
	}
	if err := d.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after, err := admin.Leases(t.Context()); err != nil || len(after.Leases) > 0 {
		t.Errorf("after Close there are the leases %v, %v", after, err)
	}
	keys, err := admin.Get(t.Context(), "fencelock/", clientv3.WithPrefix())
	if err != nil || len(keys.Kvs) != 1 || string(keys.Kvs[0].Key) != "fencelock/+space" {
		t.Errorf("after Close there are the keys %v, %v; want the token space alone", keys, err)
	}
}

// A late answer to a keepalive does not count as the answer to a later one.
func TestSlowKeepaliveTakesItsStreamWithIt(t *testing.T) {
	t.Parallel()
	addr, link := containers.Etcd(t).NewLink(t)
	e := newDriver(t, addr).service
	l := leaseOf(session(t, e))
	ask := func(within time.Duration) (any, error) {
		ctx, cancel := context.WithTimeout(t.Context(), within)
		defer cancel()
		return l.keepAlive(ctx, e)
	}
	if _, err := ask(20 * time.Second); err != nil {
		t.Fatal(err)
	}
	first := l.stream
	link.Hold(fault.Replies)
	if answer, err := ask(200 * time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a keepalive with an answer that is held back = %v, %v", answer, err)
	}
	link.Pass()
	if _, err := ask(20 * time.Second); err != nil {
		t.Fatal(err)
	}
	if l.stream == first {
		t.Error("the stream is the one on which an answer is still owed")
	}
	if _, err := first.Recv(); err == nil {
		t.Error("the late answer can be read")
	}
}
