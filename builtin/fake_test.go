package builtin

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// fakes are scripted servers, by address. They run in a bubble of synctest: time is simulated.
type fakes struct{ members map[string]*fake }

// fake is one server. Without a script it grants every request.
type fake struct {
	mu       sync.Mutex // protects the following fields
	welcome  *lockpb.Welcome
	refuses  bool // connections
	script   script
	requests []*lockpb.Request
	peers    []*peer
	holds    map[string]*lockpb.SessionEntry // by name
	waits    map[string]*lockpb.SessionEntry
	token    uint64
}

// script answers a request if it returns true; a nil reply sends no answer.
type script func(*peer, *lockpb.Request) (*lockpb.Reply, bool)

// change changes the behavior of a server from now on.
func (f *fake) change(how func(f *fake)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	how(f)
}

// plays makes the server follow a script; nil ends it.
func (f *fake) plays(s script) { f.change(func(f *fake) { f.script = s }) }

// peer is the server's end of a connection.
type peer struct {
	toServer chan *lockpb.ClientMessage
	toClient chan *lockpb.ServerMessage
	ctx      context.Context
	cancel   context.CancelFunc
}

const ttl = 3 * time.Second

// run runs a test with one fake that leads, at the address "a", and a driver on it.
func run(t *testing.T, test func(t *testing.T, f *fake, d *Driver)) {
	t.Helper()
	runAll(t, []string{"a"}, func(t *testing.T, all *fakes, d *Driver) { test(t, all.members["a"], d) })
}

// runAll is run for several fakes, the first of which leads.
func runAll(t *testing.T, addrs []string, test func(t *testing.T, all *fakes, d *Driver)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		all := &fakes{map[string]*fake{}}
		for i, addr := range addrs {
			all.members[addr] = &fake{
				holds: map[string]*lockpb.SessionEntry{}, waits: map[string]*lockpb.SessionEntry{},
				welcome: &lockpb.Welcome{
					Protocol: protocol, NodeId: addr, ClusterId: "cluster", Durable: true, Leader: i == 0, LeaderAddress: addrs[0],
					MinTtlNanos: int64(time.Second), MaxTtlNanos: int64(time.Hour),
				},
			}
		}
		d := newDriver(addrs, all.dial, &Options{Clock: backend.GoClock()})
		defer func() {
			_ = d.Close(context.Background()) // the server may be unavailable; TestCloseEndsTheSessions checks the result
		}()
		test(t, all, d)
	})
}

func (all *fakes) dial(ctx context.Context, address string) (Stream, error) {
	f := all.members[address]
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.refuses {
		return nil, errors.New("connection refused")
	}
	ctx, cancel := context.WithCancel(ctx)
	p := &peer{
		toServer: make(chan *lockpb.ClientMessage, 64), toClient: make(chan *lockpb.ServerMessage, 64), ctx: ctx, cancel: cancel,
	}
	f.peers = append(f.peers, p)
	go f.serve(p)
	return p, nil
}

// Send implements Stream.
func (p *peer) Send(m *lockpb.ClientMessage) error {
	select {
	case p.toServer <- m:
		return nil
	case <-p.ctx.Done():
		return io.EOF
	}
}

// Recv implements Stream.
func (p *peer) Recv() (*lockpb.ServerMessage, error) {
	select {
	case m := <-p.toClient:
		return m, nil
	case <-p.ctx.Done():
		return nil, io.ErrUnexpectedEOF
	}
}

// CloseSend implements Stream.
func (p *peer) CloseSend() error { return nil }

// push sends a reply.
func (p *peer) push(r *lockpb.Reply) {
	select {
	case p.toClient <- &lockpb.ServerMessage{Replies: []*lockpb.Reply{r}}:
	case <-p.ctx.Done():
	}
}

func (f *fake) serve(p *peer) {
	for {
		select {
		case m := <-p.toServer:
			for _, q := range m.Requests {
				f.mu.Lock()
				f.requests = append(f.requests, q)
				script := f.script
				f.mu.Unlock()
				reply, answered := (*lockpb.Reply)(nil), false
				if script != nil {
					reply, answered = script(p, q)
				}
				if !answered {
					reply = f.answer(q)
				}
				if reply != nil {
					reply.Number = q.Number
					p.push(reply)
				}
			}
		case <-p.ctx.Done():
			return
		}
	}
}

// answer is the normal reply of a server.
func (f *fake) answer(q *lockpb.Request) *lockpb.Reply {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch c := q.Call.(type) {
	case *lockpb.Request_Hello:
		welcome := proto.CloneOf(f.welcome)
		return &lockpb.Reply{Answer: &lockpb.Reply_Welcome{Welcome: welcome}}
	case *lockpb.Request_OpenSession:
		return stateReply(&lockpb.SessionState{TtlNanos: c.OpenSession.TtlNanos, Revision: f.token})
	case *lockpb.Request_Attach:
		s := &lockpb.SessionState{Revision: f.token}
		for _, e := range f.holds {
			s.Holds = append(s.Holds, e)
		}
		for _, e := range f.waits {
			s.Waits = append(s.Waits, e)
		}
		return stateReply(s)
	case *lockpb.Request_Acquire:
		return f.grant(c.Acquire)
	case *lockpb.Request_AcquireAll:
		return f.grant(c.AcquireAll.Requests...)
	case *lockpb.Request_Release:
		if f.holds[c.Release.Name] == nil {
			return errorReply(lockpb.Code_CODE_NOT_HELD)
		}
		delete(f.holds, c.Release.Name)
	case *lockpb.Request_GetHolder:
		return &lockpb.Reply{Answer: &lockpb.Reply_Name{Name: &lockpb.NameState{Name: c.GetHolder.Name}}}
	}
	return doneReply()
}

// grant makes holds. The caller holds f.mu.
func (f *fake) grant(all ...*lockpb.Acquire) *lockpb.Reply {
	got := &lockpb.Acquired{}
	for _, r := range all {
		e := f.holds[r.Name]
		if e == nil || e.RequestId != r.RequestId {
			f.token++
			e = &lockpb.SessionEntry{Name: r.Name, RequestId: r.RequestId, Token: f.token}
			f.holds[r.Name] = e
		}
		got.Grants = append(got.Grants, &lockpb.Grant{Name: r.Name, RequestId: r.RequestId, Token: e.Token})
	}
	return &lockpb.Reply{Renewed: true, Answer: &lockpb.Reply_Acquired{Acquired: got}}
}

func stateReply(s *lockpb.SessionState) *lockpb.Reply {
	return &lockpb.Reply{Renewed: true, Answer: &lockpb.Reply_Session{Session: s}}
}

func doneReply() *lockpb.Reply {
	return &lockpb.Reply{Renewed: true, Answer: &lockpb.Reply_Done{Done: &lockpb.Done{}}}
}

func errorReply(code lockpb.Code) *lockpb.Reply {
	return &lockpb.Reply{Answer: &lockpb.Reply_Error{Error: &lockpb.Error{Code: code, Message: "so says the test"}}}
}

func queuedReply() *lockpb.Reply {
	return &lockpb.Reply{Renewed: true, Answer: &lockpb.Reply_Acquired{Acquired: &lockpb.Acquired{Queued: true}}}
}

// asked returns the requests of one kind so far.
func asked[T any](f *fake) (all []*lockpb.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range f.requests {
		if _, ok := q.Call.(T); ok {
			all = append(all, q)
		}
	}
	return all
}

// disconnect breaks all connections.
func (f *fake) disconnect() {
	f.mu.Lock()
	all := slices.Clone(f.peers)
	f.peers = nil
	f.mu.Unlock()
	for _, p := range all {
		p.cancel()
	}
}

// last is the present connection.
func (f *fake) last() *peer {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.peers[len(f.peers)-1]
}

func request(name string) backend.Request {
	return backend.Request{Name: name, Owner: "test", RequestID: backend.NewRequestID(), TTL: ttl}
}

func waiting(name string) backend.Request {
	r := request(name)
	r.Wait = true
	return r
}

// take acquires a lock that must be free.
func take(t *testing.T, d *Driver, r backend.Request) backend.Grant {
	t.Helper()
	g, err := d.Acquire(t.Context(), r)
	if err != nil {
		t.Fatalf("Acquire: %v", err)
	}
	return g
}

// outcome is the result of an acquire in another goroutine.
type outcome struct {
	done  chan struct{}
	grant backend.Grant
	err   error
}

func acquire(ctx context.Context, d *Driver, r backend.Request) *outcome {
	o := &outcome{done: make(chan struct{})}
	go func() {
		defer close(o.done)
		o.grant, o.err = d.Acquire(ctx, r)
	}()
	return o
}

// leads makes the server the leader, with a hold that the previous leader granted.
func (f *fake) leads(g backend.Grant) {
	f.change(func(f *fake) {
		f.welcome.Leader = true
		f.holds[g.Name] = &lockpb.SessionEntry{Name: g.Name, RequestId: g.RequestID, Token: uint64(g.Token)}
	})
}
