package builtin_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/conformance/nemesis"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/server"
	"github.com/fencelock/fencelock/internal/testtier"
)

// serverRole is the role of a server in a separate process. Its argument is a member in JSON.
const serverRole = "server"

func TestMain(m *testing.M) {
	fault.RunRole(map[string]fault.Role{serverRole: serve, nemesis.Role: nemesis.Client(openSoak)})
	testtier.Wide(8)
	goleak.VerifyTestMain(m)
}

// member has the settings of one server.
type member struct {
	DataDir, Listen, PeerListen string
	Join                        []string
	BootstrapExpect             int
	// Routes maps the addresses that the others advertise to the addresses that the member dials instead.
	Routes map[string]string

	// Settings of its rig: see serverfault.Rig. Zero values mean the defaults.
	SegmentBytes                     int
	SnapshotEntries, TrailingEntries uint64
	SnapshotInterval                 time.Duration

	prepare func(dir string) // is called with the data directory before the first start, if it is not nil
}

// serve runs a server, and reports to its parent each term in which the server leads. It ends on SIGTERM, or after a
// failure.
func serve(in <-chan string, args []string) int {
	var m member
	if err := json.Unmarshal([]byte(args[0]), &m); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	s, err := server.Start(context.Background(), server.Config{
		DataDir: m.DataDir, Listen: m.Listen, PeerListen: m.PeerListen, Join: m.Join, BootstrapExpect: m.BootstrapExpect,
		JoinKey: []byte("what all members share"), Rig: machine(&m, in),
		MinTTL: 100 * time.Millisecond, Log: slog.New(telling{slog.NewTextHandler(os.Stderr, nil)}),
		PeerDial: func(ctx context.Context, address string) (net.Conn, error) {
			if route := m.Routes[address]; route != "" {
				address = route
			}
			return (&net.Dialer{}).DialContext(ctx, "tcp", address)
		},
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("serving")
	asked, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	select {
	case <-asked.Done():
		if err := s.Close(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	case <-s.Done():
		fmt.Fprintln(os.Stderr, s.Err())
		return 1
	}
}

// processes are the members of a cluster, each in a separate process. A test can cut each path between them.
type processes struct {
	t       testing.TB // the whole test
	members []member
	paths   [][]*fault.Proxy // from, to; nil on the diagonal

	mu       sync.Mutex // protects the following fields
	children []*fault.Child
	term     uint64 // the highest term in which a member has led
	leader   int
	news     chan struct{} // closed when term changes
	felt     []felt
}

// startProcesses starts a cluster of n members. An optional member in like has further settings for all of them.
func startProcesses(t testing.TB, n int, like ...member) *processes {
	t.Helper()
	p := &processes{
		t: t, members: make([]member, n), children: make([]*fault.Child, n), news: make(chan struct{}), felt: make([]felt, n),
	}
	addrs := freeport.Addresses(t, 2*n)
	clients, peers := addrs[:n], addrs[n:]
	for from := range n {
		for _, m := range like {
			p.members[from] = m
		}
		p.members[from].DataDir, p.members[from].Listen = t.TempDir(), clients[from]
		if prepare := p.members[from].prepare; prepare != nil {
			prepare(p.members[from].DataDir)
		}
		if n == 1 {
			break
		}
		m := &p.members[from]
		m.PeerListen, m.Join, m.BootstrapExpect = peers[from], peers, n
		m.Routes = map[string]string{}
		p.paths = append(p.paths, make([]*fault.Proxy, n))
		for to, peer := range peers {
			if to != from {
				p.paths[from][to] = newProxy(t, peer)
				m.Routes[peer] = p.paths[from][to].Addr()
			}
		}
	}
	for i := range n {
		within(t, func(ctx context.Context) error { return p.start(ctx, i) })
	}
	within(t, func(ctx context.Context) error {
		_, _, err := p.lead(ctx, 0)
		return err
	})
	return p
}

func newProxy(t testing.TB, upstream string) *fault.Proxy {
	t.Helper()
	x, err := fault.NewProxy(upstream)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = x.Close() })
	return x
}

// addrs returns the addresses for clients.
func (p *processes) addrs() []string {
	var all []string
	for _, m := range p.members {
		all = append(all, m.Listen)
	}
	return all
}

func (p *processes) child(i int) *fault.Child {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.children[i]
}

// start starts a member, unless it runs, and returns when it accepts connections.
func (p *processes) start(ctx context.Context, i int) error {
	if c := p.child(i); c != nil && c.Running() {
		return nil
	}
	text, err := json.Marshal(p.members[i])
	if err != nil {
		return err
	}
	c := fault.StartRole(p.t, serverRole, string(text))
	for line := ""; line != "serving"; { // a restarted member may report something else first
		if line, err = c.Line(ctx); err != nil {
			return err
		}
		p.note(i, line)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.children[i] = c
	go p.listen(i, c)
	return nil
}

// listen records a child's reports until the child has ended.
func (p *processes) listen(i int, c *fault.Child) {
	for {
		line, err := c.Line(context.Background())
		if err != nil {
			return
		}
		p.note(i, line)
	}
}

// leads notes that a member leads in a term. The caller holds p.mu.
func (p *processes) leads(i int, term uint64) {
	if term > p.term {
		p.term, p.leader = term, i
		close(p.news)
		p.news = make(chan struct{})
	}
}

func (p *processes) kill(_ context.Context, i int) error  { return p.child(i).Kill() }
func (p *processes) pause(_ context.Context, i int) error { return p.child(i).Pause() }

// resume resumes a paused member, if it has not ended.
func (p *processes) resume(_ context.Context, i int) error {
	if c := p.child(i); c.Running() {
		return c.Resume()
	}
	return nil
}

// lead waits for a leader of a later term than the given one, which serves: most members have an entry of its term.
func (p *processes) lead(ctx context.Context, after uint64) (int, uint64, error) {
	for {
		p.mu.Lock()
		node, term, news := p.leader, p.term, p.news
		p.mu.Unlock()
		if term > after {
			if w, err := p.hello(ctx, node); err == nil && w.GetLeader() {
				return node, term, nil
			}
		}
		select {
		case <-news:
		case <-time.After(50 * time.Millisecond): // it may have lost the leadership, which no process reports
		case <-ctx.Done():
			return 0, 0, fmt.Errorf("no leader after term %d: %w", after, ctx.Err())
		}
	}
}

func (p *processes) hasLeader(ctx context.Context, i int) (bool, error) {
	w, err := p.hello(ctx, i)
	return err == nil && (w.Leader || w.LeaderAddress != ""), err
}

// hello sends a hello to member i and returns its answer.
func (p *processes) hello(ctx context.Context, i int) (*lockpb.Welcome, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	cc, err := grpc.NewClient(p.members[i].Listen, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer cc.Close()
	stream, err := lockpb.NewLockServiceClient(cc).Connect(ctx)
	if err != nil {
		return nil, err
	}
	hello := &lockpb.Request{Number: 1, Call: &lockpb.Request_Hello{Hello: &lockpb.Hello{Client: "test"}}}
	if err := stream.Send(&lockpb.ClientMessage{Requests: []*lockpb.Request{hello}}); err != nil {
		return nil, err
	}
	m, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	return m.Replies[0].GetWelcome(), nil
}

// cut holds back the messages of one member to another, on connections that either of them opened.
func (p *processes) cut(from, to int) {
	p.paths[from][to].Hold(fault.Requests)
	p.paths[to][from].Hold(fault.Replies)
}

func (p *processes) heal() {
	for _, row := range p.paths {
		for _, path := range row {
			if path != nil {
				path.Pass()
			}
		}
	}
}

func (p *processes) said(from, to int) int64 {
	return p.paths[from][to].Seen(fault.Requests) + p.paths[to][from].Seen(fault.Replies)
}

// stopAll ends all members without warning; startAll starts them and waits for a leader.
func (p *processes) stopAll(t testing.TB) {
	t.Helper()
	for i := range p.members {
		if err := p.kill(t.Context(), i); err != nil {
			t.Fatal(err)
		}
		_ = p.child(i).Wait() // the error is that it was killed
	}
}

func (p *processes) startAll(t testing.TB) {
	t.Helper()
	p.mu.Lock()
	before := p.term
	p.mu.Unlock()
	within(t, func(ctx context.Context) error {
		for i := range p.members {
			if err := p.start(ctx, i); err != nil {
				return err
			}
		}
		_, _, err := p.lead(ctx, before)
		return err
	})
}

func (p *processes) each(t testing.TB, act func(context.Context, int) error) {
	t.Helper()
	for i := range p.members {
		if err := act(t.Context(), i); err != nil {
			t.Fatal(err)
		}
	}
}
