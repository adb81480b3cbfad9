package server

import (
	"context"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/listeners"
	"github.com/fencelock/fencelock/internal/machine"
)

// Clients that mean harm, or are broken: each costs the server a bounded amount, and nobody else his locks.

// A client asks for many lists and reads none: the server keeps one answer for it, not all.
func TestUnreadListsAreNotKept(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{Listen: "127.0.0.1:0"})
	other := attach(t, s)
	session := other.open(time.Minute)
	text := strings.Repeat("x", 1000)
	for i := range 1000 { // a page of 1 MB
		other.call(like(session, fmt.Sprint(i), func(a *lockpb.Acquire) { a.Metadata = map[string]string{"k": text} }))
	}
	hostile := dialRaw(t, s.Addr().String())
	const lists = 3000
	for i := range lists {
		q := &lockpb.Request{Number: uint64(i + 1), Call: &lockpb.Request_List{List: &lockpb.List{}}}
		if err := hostile.Send(&lockpb.ClientMessage{Requests: []*lockpb.Request{q}}); err != nil {
			t.Fatal(err)
		}
	}
	// The others go on meanwhile, and what waits for the client is bounded all the time.
	var most int64
	for began := time.Now(); time.Since(began) < time.Second; {
		id, token := other.hold(session, "y")
		other.call(releaseOf(session, "y", id, token))
		most = max(most, s.unread.Load())
	}
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	t.Logf("%d lists asked for and not read: at most %d KB wait, the heap has %d MB",
		lists, most>>10, memory.HeapAlloc>>20)
	if bound := int64(4 << 20); most > bound {
		t.Errorf("%d bytes wait for a client that does not read, more than %d", most, bound)
	}
	hostile.cancel()
	eventually(t, "nothing waits for who is gone", func() bool { return s.unread.Load() == 0 })
}

// A client that leaves a message unread for long is sent away, and what waited for it is forgotten.
func TestWhoDoesNotReadIsSentAway(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{Listen: "127.0.0.1:0", unreadTime: 10 * time.Second}) // the other reads, on a busy machine late
	other := attach(t, s)
	session := other.open(time.Minute)
	hostile := dialRaw(t, s.Addr().String())
	watch := &lockpb.Request{Number: 1, Call: watchOf("", true, 0).Call}
	if err := hostile.Send(&lockpb.ClientMessage{Requests: []*lockpb.Request{watch}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the watch has begun", func() bool { return conns(s) == 2 })
	name := strings.Repeat("n", 500)
	eventually(t, "the watcher that does not read is sent away", func() bool {
		for range 100 {
			id, token := other.hold(session, name)
			other.call(releaseOf(session, name, id, token))
		}
		return conns(s) == 1
	})
	eventually(t, "nothing waits for it", func() bool { return s.unread.Load() == 0 })
}

func conns(s *Server) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

// All clients together leave no more unread than the server has room for: the one with the most is cut off.
func TestUnreadOfAllTogether(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{})
	s.unread.Store(maxUnread - 1000) // what others have
	o := newOutbox(&s.unread)
	reply := &lockpb.Reply{Answer: &lockpb.Reply_Error{Error: &lockpb.Error{Message: strings.Repeat("x", 1000)}}}
	n := 0
	for ; o.add(reply); n++ {
		if n > maxOutbox {
			t.Fatal("there is no bound")
		}
	}
	if got := n * sizeOf(reply); got > fairUnread || got < fairUnread/2 {
		t.Errorf("a client is cut off with %d bytes, want about %d", got, fairUnread)
	}
	o.abandon()
	if left := s.unread.Load(); left != maxUnread-1000 {
		t.Errorf("after its end %d bytes are counted", left)
	}
}

// Idle connections leave the server the files that it needs: a connected client continues, and new clients get in
// once idle connections end.
func TestIdleConnectionsLeaveFilesForTheLog(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0", files: 100})
	clients, _ := listeners.Connections(100)
	first := dial(t, s.Addr().String())
	session := first.open(time.Minute)
	var idle []net.Conn
	var open atomic.Int64
	var reading sync.WaitGroup
	for range 3 * clients {
		conn, err := net.Dial("tcp", s.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		idle = append(idle, conn)
		open.Add(1)
		reading.Go(func() {
			_, _ = io.Copy(io.Discard, conn)
			open.Add(-1)
		})
	}
	defer reading.Wait()
	eventually(t, "all that are too many are turned away", func() bool { return open.Load() <= int64(clients) })
	first.hold(session, "x")
	for _, conn := range idle {
		conn.Close()
	}
	eventually(t, "there is room again", func() bool {
		c, err := tryDial(t, s.Addr().String())
		return err == nil && c != nil
	})
}

// A crowd of waiters in a tree costs nothing to clients that take other locks of the tree. The test compares the
// fastest of many cycles, as a busy machine slows the others.
func TestCrowdInATree(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{})
	x := attach(t, s)
	session := x.open(time.Minute)
	cycle := func() time.Duration {
		least := time.Hour
		for range 50 {
			began := time.Now()
			r := x.call(like(session, "a/y", func(a *lockpb.Acquire) { a.Hierarchical = true }))
			g := r.GetAcquired().GetGrants()
			if len(g) != 1 {
				t.Fatalf("%v", r)
			}
			x.call(releaseOf(session, "a/y", g[0].RequestId, g[0].Token))
			least = min(least, time.Since(began))
		}
		return least
	}
	quiet := cycle()
	const crowd = 9990
	answers := make([]<-chan *lockpb.Reply, crowd)
	for i := range answers {
		answers[i] = x.send(like(session, "a/x", func(a *lockpb.Acquire) {
			a.Hierarchical, a.Wait = true, true
			if i != 1 {
				a.Kind = lockpb.Kind_KIND_SHARED
			}
		}))
	}
	for i, answer := range answers {
		if r := <-answer; r.GetAcquired().GetQueued() != (i > 0) {
			t.Fatalf("%d: %v", i, r)
		}
	}
	beside := cycle()
	t.Logf("a lock cycle takes %v alone, and %v beside %d waiters", quiet, beside, crowd)
	if bound := 10*quiet + 20*time.Millisecond; beside > bound {
		t.Errorf("a lock cycle takes %v beside %d waiters, %v without them", beside, crowd, quiet)
	}
}

// rawClient sends and reads only on demand.
type rawClient struct {
	lockpb.LockService_ConnectClient
	cancel func()
}

func dialRaw(t *testing.T, address string) rawClient {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	stream, err := lockpb.NewLockServiceClient(conn).Connect(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return rawClient{stream, cancel}
}

// The flood of one client is answered to that client: others get what they ask for.
func TestFloodOfOneClient(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("only Linux has more than one loopback address by default")
	}
	limits := machine.Limits{Sessions: 40, Holds: 40, Waits: 40, ClientShare: 25}
	s := alone(t, Config{Listen: "127.0.0.1:0", files: 200, Limits: limits})
	eventually(t, "the level is raised", func() bool {
		return s.replica.State.Machine.Limits().ClientShare == 25 && s.replica.State.Machine.Level() == machine.MaxLevel
	})
	address := s.Addr().String()
	flood := dialFrom(t, address, "127.0.0.2")
	other := dial(t, address)
	session := other.open(time.Minute)

	refusedAs := func(field string, r *lockpb.Reply) {
		t.Helper()
		if e := r.GetError(); e.GetCode() != lockpb.Code_CODE_EXHAUSTED || e.GetField() != field {
			t.Errorf("the flood is answered %v, want field %q", r, field)
		}
	}
	var sessions [][]byte
	for range 40 {
		id := sessionID()
		q := openOf(sessionID(), time.Minute)
		q.Session = id
		if r := flood.call(q); r.GetSession() != nil {
			sessions = append(sessions, id)
		} else {
			refusedAs("client-sessions", r)
		}
	}
	holds, waits := 0, 0
	for i := range 40 {
		if r := flood.call(acquireOf(
			sessions[i%len(sessions)], fmt.Sprint(i), backend.NewRequestID(), false,
		)); r.GetAcquired() != nil {
			holds++
		} else {
			refusedAs("client-holds", r)
		}
	}
	other.hold(session, "theirs")
	// As many more wait as may hold, while there are holds left to ask for.
	flood.call(&lockpb.Request{
		Session: sessions[0], Call: &lockpb.Request_CloseSession{CloseSession: &lockpb.CloseSession{}},
	})
	for range 40 {
		r := flood.call(acquireOf(sessions[1], "theirs", backend.NewRequestID(), true))
		if r.GetAcquired().GetQueued() {
			waits++
		} else {
			refusedAs("client-waits", r)
		}
	}
	streams := 0
	for range 2 * s.streamsOfOne() {
		c, err := tryDialFrom(t, address, "127.0.0.2")
		if err != nil {
			break // the gate closes connections of the address
		}
		streams++
		_ = c
	}
	t.Logf("one client got %d sessions, %d holds, %d waits and %d connections", len(sessions), holds, waits, streams+1)
	if len(sessions) != 10 || holds != 10 || waits != 10 || streams+1 > s.streamsOfOne() {
		t.Error("want 10 of each, and no more connections than its share")
	}
	more := dial(t, address)
	more.hold(more.open(time.Minute), "x")
}
