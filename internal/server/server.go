package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/builtin/lockpb"
)

// Server is one member of a cluster of lock servers, possibly the only one. All methods are safe for concurrent use.
type Server struct {
	config      Config
	log         *slog.Logger
	node        *node
	peers       *peerNet // nil without other members
	front       *front   // nil without a socket for clients
	peerAddress string   // by which the others know this member
	advertise   string   // by which clients know it

	leadership atomic.Pointer[leadership] // nil while this member does not serve
	news       notifier                   // rings when something was applied

	unread atomic.Int64 // bytes of replies that clients have not taken

	stop      context.CancelFunc // of what watches
	failed    chan error         // has room for one: why the server cannot go on
	watching  sync.WaitGroup     // what stop stops
	streams   sync.WaitGroup     // what reads and writes connections
	attaching sync.WaitGroup     // connections within the process
	closing   sync.Once
	closed    error         // of Close, once done is closed
	done      chan struct{} // closed at the end of Close

	mu      sync.Mutex // protects the following fields
	conns   map[*conn]struct{}
	clients map[string]int // how many of conns each has
	ended   bool           // no connection is taken any more
	failure error
}

var errClosing = errors.New("the server is closed")

// transferTime bounds how long Close waits for another member to take over, and for what is on its way to be answered.
const transferTime = 2 * time.Second

// Start starts a server and returns as soon as it takes connections, which may be before there is a leader: see
// WaitLeader. ctx bounds the start only.
func Start(ctx context.Context, c Config) (*Server, error) {
	c, err := c.resolve()
	if err != nil {
		return nil, err
	}
	background, stop := context.WithCancel(context.Background())
	s := &Server{
		config: c, log: c.Log, stop: stop, conns: map[*conn]struct{}{}, clients: map[string]int{}, failed: make(chan error, 1), done: make(chan struct{}),
	}
	if err := s.build(ctx); err != nil {
		stop()
		return nil, fmt.Errorf("server.Start: %w", err)
	}
	s.watching.Go(func() { s.closeOnFailure(background) })
	s.watching.Go(func() { s.watchLeadership(background) })
	s.watching.Go(func() {
		s.node.compact(background, raftConfig(s.node.id, &s.config).TrailingLogs, s.log)
	})
	s.watching.Go(func() {
		if err := s.settle(background); err != nil && background.Err() == nil {
			s.fail(fmt.Errorf("no cluster could be made: %w", err))
		}
	})
	if s.front != nil {
		s.front.serve()
	}
	return s, nil
}

// build opens all that the server is made of, or nothing.
func (s *Server) build(ctx context.Context) (err error) {
	f := newFSM(newMachine(), s.news.notify, s.fail)
	f.comparison.version, f.comparison.log = s.config.Version, s.log
	t, err := s.openTransport(ctx, f)
	if err != nil {
		return err
	}
	stores, err := openStores(s.config.Store, s.config.DataDir, newRaftLog(s.log), s.config.beforeLog, s.config.rig(), s.fail)
	if err != nil {
		return errors.Join(err, t.Close())
	}
	f.now, f.clock = s.config.now, clock{from: s.config.now()}
	f.keep, f.kept, f.watch = stores.cluster.write, stores.cluster.name, stores.watch
	if s.config.hangAfter != 0 {
		f.watch.hangAfter = s.config.hangAfter
	}
	if s.node, err = openNode(stores, t, f, raftConfig(stores.nodeID, &s.config)); err != nil {
		return err
	}
	if s.config.Listen != "" {
		if s.front, err = s.openFront(ctx); err != nil {
			return errors.Join(err, s.node.close())
		}
	}
	if s.peers != nil {
		s.peers.serve(s.node.id, s.reply)
	}
	return nil
}

// openTransport opens the network to the other members, or one without others.
func (s *Server) openTransport(ctx context.Context, f *fsm) (transport, error) {
	if s.config.PeerListen == "" {
		s.peerAddress = "local"
		address, t := raft.NewInmemTransport(raft.ServerAddress(s.peerAddress))
		t.Connect(address, t)
		return t, nil
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", s.config.PeerListen)
	if err != nil {
		return nil, fmt.Errorf("for members: %w", err)
	}
	if s.peerAddress = s.config.PeerAdvertise; s.peerAddress == "" {
		s.peerAddress = listener.Addr().String()
	}
	_, members := connectionsAllowed(cmp.Or(s.config.files, fileLimit()))
	listener = newGate(listener, members, members, "members", s.log)
	s.peers = newPeerNet(listener, s.peerAddress, f.home, s.memberAddresses, &s.config)
	return addressed{raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
		Stream: s.peers, MaxPool: 3, MaxRPCsInFlight: 1, Timeout: peerTimeout, Logger: newRaftLog(s.log),
	})}, nil
}

// memberAddresses are those of all members, by which they know each other.
func (s *Server) memberAddresses() (all []string) {
	for _, server := range s.node.servers() {
		all = append(all, string(server.Address))
	}
	return all
}

// Close stops the server: it takes no new connections, hands the leadership to another member if there is one, answers
// what is on its way and ends the connections. Sessions and locks stay as they are. ctx bounds the polite part; Close
// always closes.
func (s *Server) Close(ctx context.Context) error {
	s.closing.Do(func() {
		ctx, cancel := context.WithTimeout(ctx, transferTime)
		defer cancel()
		s.closed = s.close(ctx)
		close(s.done)
	})
	<-s.done
	return s.closed
}

func (s *Server) close(ctx context.Context) error {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	if s.front != nil {
		s.front.drain()
	}
	s.stepDown(ctx)
	s.stop()
	watched := make(chan struct{})
	go func() { defer close(watched); s.watching.Wait() }()
	select {
	case <-watched:
	case <-ctx.Done(): // it waits for entries that most members do not acknowledge: raft gives them up now
	}
	s.dismiss()
	err := s.node.close()
	<-watched
	if s.front != nil {
		s.front.close()
	}
	s.attaching.Wait()
	s.streams.Wait()
	if s.peers != nil {
		s.peers.serving.Wait()
	}
	return err
}

// stepDown hands the leadership over, if this member has it.
func (s *Server) stepDown(ctx context.Context) {
	s.maintain(true) // it does not come back
	if s.leadership.Load() == nil || voters(s.node.servers()) < 2 {
		return
	}
	if err := s.handOver(ctx); err != nil {
		s.log.Info("no other member takes over", "error", err)
	}
}

func voters(servers []raft.Server) (n int) {
	for _, server := range servers {
		if server.Suffrage == raft.Voter {
			n++
		}
	}
	return n
}

// fail has the server closed because it cannot go on. It does not block.
func (s *Server) fail(err error) {
	select {
	case s.failed <- err:
	default: // the first reason is enough
	}
}

func (s *Server) closeOnFailure(ctx context.Context) {
	select {
	case err := <-s.failed:
		s.log.Error("the server stops", "error", err)
		s.mu.Lock()
		s.failure = err
		s.mu.Unlock()
		go s.Close(context.Background()) //nolint:errcheck // Err tells the failure, which comes before that
	case <-ctx.Done():
	}
}

// Done is closed when the server is closed, by Close or because it could not go on: see Err.
func (s *Server) Done() <-chan struct{} { return s.done }

// Err is why the server could not go on; nil while it can, and after Close.
func (s *Server) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failure
}

// Addr is the address at which clients connect; nil without a socket.
func (s *Server) Addr() net.Addr {
	if s.front == nil {
		return nil
	}
	return s.front.listener.Addr()
}

// PeerAddr is the address by which the other members know this one; empty without others.
func (s *Server) PeerAddr() string {
	if s.peers == nil {
		return ""
	}
	return s.peerAddress
}

// Leads reports whether this member serves clients.
func (s *Server) Leads() bool { return s.leadership.Load() != nil }

// leaderEvery is how often WaitLeader looks.
const leaderEvery = 10 * time.Millisecond

// WaitLeader returns once this member serves, or knows who does. The error is that of ctx, or why the server ended.
func (s *Server) WaitLeader(ctx context.Context) error {
	tick := time.NewTicker(leaderEvery)
	defer tick.Stop()
	for !s.Leads() {
		if _, id := s.node.raft.LeaderWithID(); id != "" && id != s.node.id {
			return nil
		}
		select {
		case <-tick.C:
		case <-s.done:
			return errors.Join(errClosing, s.Err())
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// enter counts a connection, unless the server is closing.
func (s *Server) enter(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.conns[c] = struct{}{}
		s.clients[c.client]++
	}
	return !s.ended
}

func (s *Server) leave(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	if s.clients[c.client]--; s.clients[c.client] == 0 {
		delete(s.clients, c.client)
	}
}

// dismiss says goodbye to all connections: this member does not serve them any more.
func (s *Server) dismiss() {
	s.mu.Lock()
	all := make([]*conn, 0, len(s.conns))
	for c := range s.conns {
		all = append(all, c)
	}
	why := &lockpb.Goodbye{Code: lockpb.Code_CODE_NOT_LEADER, Message: errNotLeader.Error()}
	if s.ended {
		why = &lockpb.Goodbye{Code: lockpb.Code_CODE_UNAVAILABLE, Message: errClosing.Error()}
	}
	s.mu.Unlock()
	why.LeaderAddress = s.leaderAddress()
	for _, c := range all {
		c.end(why, false)
	}
}

// leaderAddress is where clients find the leader; empty if that is not known, or if it is this member and does not
// serve.
func (s *Server) leaderAddress() string {
	_, id := s.node.raft.LeaderWithID()
	if id == "" || id == s.node.id && s.leadership.Load() == nil {
		return ""
	}
	address, _ := s.node.fsm.client(id)
	return address
}

// welcome describes the server.
func (s *Server) welcome() *lockpb.Welcome {
	w := &lockpb.Welcome{
		ServerVersion: s.config.Version, Protocol: protocolVersion, NodeId: string(s.node.id), ClusterId: s.node.fsm.cluster(),
		Durable: s.config.Store != StoreMemory, Leader: s.Leads(), LeaderAddress: s.leaderAddress(),
		MinTtlNanos: int64(s.config.MinTTL), MaxTtlNanos: int64(s.config.MaxTTL), MaxMessageBytes: maxMessage, History: s.node.fsm.history(),
	}
	servers := s.node.servers()
	w.Voters = uint32(voters(servers))
	for _, server := range servers {
		if address, _ := s.node.fsm.client(server.ID); address != "" {
			w.MemberAddresses = append(w.MemberAddresses, address)
		}
	}
	slices.Sort(w.MemberAddresses)
	return w
}

// protocolVersion of package lockpb.
const protocolVersion = 2

// newClusterID names a cluster: tokens of two clusters do not compare.
func newClusterID() string {
	var raw [16]byte
	rand.Read(raw[:]) // never fails
	return hex.EncodeToString(raw[:])
}
