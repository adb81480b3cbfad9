package etcd

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
)

// mute is a server that answers reads unless silent is set.
type mute struct {
	pb.UnimplementedKVServer
	addr     string
	silent   atomic.Bool
	asked    atomic.Int64
	answered atomic.Int64
}

func (m *mute) Range(ctx context.Context, _ *pb.RangeRequest) (*pb.RangeResponse, error) {
	m.asked.Add(1)
	if m.silent.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	m.answered.Add(1)
	return &pb.RangeResponse{Header: &pb.ResponseHeader{}}, nil
}

func newMute(t *testing.T) *mute {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &mute{addr: l.Addr().String()}
	s := grpc.NewServer()
	pb.RegisterKVServer(s, m)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	return m
}

// patient is a client of servers, with connections that bear with them for so long.
func patient(t *testing.T, bears time.Duration, servers ...*mute) (*clientv3.Client, *connections) {
	t.Helper()
	conns := newConnections("")
	conns.bears.Store(int64(bears))
	config := clientv3.Config{Logger: quiet, DialOptions: conns.options()}
	for _, m := range servers {
		config.Endpoints = append(config.Endpoints, m.addr)
	}
	client, err := clientv3.New(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client, conns
}

// A server that takes long for one request, and answers others meanwhile, is not left for it.
func TestServerThatIsSlowOnceIsKept(t *testing.T) {
	t.Parallel()
	const sent, later = 1, 2
	conns := newConnections("")
	slow, quick := conns.memberLocked("slow"), conns.memberLocked("quick")
	q := &question{sent: sent}
	q.on.Store(&connection{addr: "slow", all: conns})
	conns.begun = conns.begun.Add(-time.Hour)
	if quick.answered = sent; conns.leave(q) {
		t.Error("it was left for one that has answered nothing later")
	}
	if quick.answered, slow.answered = later, later; conns.leave(q) {
		t.Error("it was left although it answers as well")
	}
	if slow.answered = 0; !conns.leave(q) || !conns.leftAlone("slow") || conns.leftAlone("quick") {
		t.Error("one that owes all answers was not left")
	}
}

// leftAlone reports whether a connection to m is not to be made.
func (m *mute) leftAlone(conns *connections) bool { return conns.leftAlone(m.addr) }

func TestServerThatOwesAnAnswerIsLeftForOneThatAnswers(t *testing.T) {
	t.Parallel()
	good, bad := newMute(t), newMute(t)
	client, conns := patient(t, time.Second, good, bad)
	get := func() { // what hangs is repeated by the client library
		t.Helper()
		if _, err := client.Get(t.Context(), "x"); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "both answer", func() bool {
		get()
		return good.answered.Load() > 0 && bad.answered.Load() > 0
	})

	bad.silent.Store(true)
	hanging := make(chan struct{})
	go func() { // one of these hangs at the silent server, and others are answered later
		defer close(hanging)
		for before := bad.asked.Load(); bad.asked.Load() == before && t.Context().Err() == nil; {
			get()
		}
	}()
	eventually(t, "the silent server is left", func() bool {
		get()
		return bad.leftAlone(conns)
	})
	<-hanging
	if good.leftAlone(conns) {
		t.Error("the one that answers is left too")
	}

	bad.silent.Store(false)
	eventually(t, "it is asked again, and trusted once it answers", func() bool {
		before := bad.answered.Load()
		get()
		conns.mu.Lock()
		defer conns.mu.Unlock()
		return bad.answered.Load() > before && conns.members[bad.addr].out == 0
	})
}

func TestNobodyIsLeftWhileNobodyAnswers(t *testing.T) {
	t.Parallel()
	servers := []*mute{newMute(t), newMute(t)}
	client, conns := patient(t, 80*time.Millisecond, servers...)
	for _, m := range servers {
		m.silent.Store(true)
	}
	for _, m := range servers {
		for m.asked.Load() == 0 { // and every question is older than what would be borne
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			_, err := client.Get(ctx, "x")
			cancel()
			if err == nil {
				t.Fatal("a silent server has answered")
			}
		}
	}
	for _, m := range servers {
		if m.leftAlone(conns) {
			t.Errorf("%s is left, and the other one does not answer either", m.addr)
		}
	}
}
