package server

// The server as a whole: how its parts are put together, and in which order they end.
//
// Beside the connections run lead.Watch, which leads whenever this member is elected, the replica, and closeOnFailure.
// A part that cannot go on calls fail, and the server closes: a member that went on without its log would acknowledge
// what it may not have.
//
// Connections reach the leadership by Server.leadership alone. It is nil while this member does not serve, so what a
// connection has loaded from there is always of one term.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/server/lead"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// Server is one member of a cluster of lock servers, possibly the only one. All methods are safe for concurrent use.
type Server struct {
	config    Config
	log       *slog.Logger
	replica   *replica.Replica
	front     *front // nil without a socket for clients
	peers     string // the address by which the other members know this one; empty without others
	advertise string // by which clients know it

	leadership atomic.Pointer[lead.Leadership] // nil while this member does not serve
	news       notifier                        // rings when something was applied

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
		return nil, fmt.Errorf("server.Start: %w", err)
	}
	background, stop := context.WithCancel(context.Background())
	s := &Server{
		config: c, log: c.Log, stop: stop, conns: map[*conn]struct{}{}, clients: map[string]int{},
		failed: make(chan error, 1), done: make(chan struct{}),
	}
	if err := s.build(ctx); err != nil {
		stop()
		return nil, fmt.Errorf("server.Start: %w", err)
	}
	s.watching.Go(func() { s.closeOnFailure(background) })
	s.watching.Go(func() {
		lead.Watch(background, lead.Config{
			Replica: s.replica, Limits: c.Limits, Now: c.now, Open: s.open, Shut: s.shut, Dismiss: s.dismiss,
			CompareEvery: c.compareEvery, Log: c.Log,
		})
	})
	s.watching.Go(func() {
		if err := s.replica.Run(background); err != nil {
			s.fail(err)
		}
	})
	if s.front != nil {
		s.front.serve()
	}
	return s, nil
}

// build opens all that the server is made of, or nothing.
func (s *Server) build(ctx context.Context) (err error) {
	c := &s.config
	if c.Listen != "" {
		if s.front, err = s.openFront(ctx); err != nil {
			return err
		}
	}
	listener, err := s.listenToMembers(ctx)
	if err == nil {
		s.replica, err = replica.Open(replica.Config{
			DataDir: c.DataDir, Store: c.Store, Listener: listener, Advertise: s.peers, Client: s.advertise,
			Dial: c.PeerDial, TLS: c.PeerTLS, Join: c.Join, JoinKey: c.JoinKey, BootstrapExpect: c.BootstrapExpect,
			Timing: c.Timing, Now: c.now, Changed: s.news.notify, Fatal: s.fail, Version: c.Version,
			Log: c.Log, Rig: c.rig(), HangAfter: c.hangAfter,
		})
	}
	if err != nil && s.front != nil {
		s.front.listener.Close()
	}
	return err
}

// listenToMembers opens the socket for the other members; nil if there are none.
func (s *Server) listenToMembers(ctx context.Context) (net.Listener, error) {
	if s.config.PeerListen == "" {
		return nil, nil
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", s.config.PeerListen)
	if err != nil {
		return nil, fmt.Errorf("for members: %w", err)
	}
	s.peers = cmp.Or(s.config.PeerAdvertise, listener.Addr().String())
	_, members := connectionsAllowed(cmp.Or(s.config.files, fileLimit()))
	return newGate(listener, members, members, "members", s.log), nil
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

// close ends the parts in this order: first nothing new comes in; then the leadership goes to another member, while
// raft still runs and what is on its way is answered; then raft; and the streams last, which carry the answers and the
// goodbye. Where most members do not acknowledge, the leadership waits for its entries until raft ends and gives them
// up. So once ctx has ended, raft is closed before that wait is over.
func (s *Server) close(ctx context.Context) error {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	if s.front != nil {
		s.front.drain()
	}
	if err := s.replica.StepDown(ctx); err != nil {
		s.log.Info("no other member takes over", "error", err)
	}
	s.stop()
	watched := make(chan struct{})
	go func() { defer close(watched); s.watching.Wait() }()
	select {
	case <-watched:
	case <-ctx.Done():
	}
	s.dismiss()
	err := s.replica.Close()
	<-watched
	if s.front != nil {
		s.front.close()
	}
	s.attaching.Wait()
	s.streams.Wait()
	return err
}

// fail has the server closed because it cannot go on. It does not block.
func (s *Server) fail(err error) {
	select {
	case s.failed <- err:
	default: // the first reason is enough
	}
}

// closeOnFailure closes the server once a part of it has failed. It does so in another goroutine, because Close waits
// for this one.
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
func (s *Server) PeerAddr() string { return s.peers }

// Leads reports whether this member serves clients.
func (s *Server) Leads() bool { return s.leadership.Load() != nil }

// leaderEvery is how often WaitLeader looks.
const leaderEvery = 10 * time.Millisecond

// WaitLeader returns once this member serves, or knows who does. The error is ctx's, or why the server ended.
func (s *Server) WaitLeader(ctx context.Context) error {
	tick := time.NewTicker(leaderEvery)
	defer tick.Stop()
	for !s.Leads() {
		if id, _ := s.replica.Leader(); id != "" && id != s.replica.ID() {
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

// enter counts a connection, unless the server is closing. ended is read under the same lock, so that dismiss misses no
// connection that got in.
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

// open lets connections use r.
func (s *Server) open(r *lead.Leadership) {
	s.leadership.Store(r)
	if s.front != nil {
		s.front.leads(true)
	}
}

// shut ends what open began.
func (s *Server) shut() {
	s.leadership.Store(nil)
	if s.front != nil {
		s.front.leads(false)
	}
}

// dismiss says goodbye to all connections: this member does not serve them any more.
func (s *Server) dismiss() {
	s.mu.Lock()
	all := make([]*conn, 0, len(s.conns))
	for c := range s.conns {
		all = append(all, c)
	}
	why := &lockpb.Goodbye{Code: lockpb.Code_CODE_NOT_LEADER, Message: replica.ErrNotLeader.Error()}
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
	id, _ := s.replica.Leader()
	if id == "" || id == s.replica.ID() && s.leadership.Load() == nil {
		return ""
	}
	return s.replica.State.Client(id)
}

// welcome describes the server.
func (s *Server) welcome() *lockpb.Welcome {
	state := s.replica.State
	w := &lockpb.Welcome{
		ServerVersion: s.config.Version, Protocol: protocolVersion, NodeId: s.replica.ID(), ClusterId: state.Cluster(),
		Durable: s.config.Store != replica.StoreMemory, Leader: s.Leads(), LeaderAddress: s.leaderAddress(),
		MinTtlNanos: int64(s.config.MinTTL), MaxTtlNanos: int64(s.config.MaxTTL), MaxMessageBytes: maxMessage,
		History: state.History(), Voters: uint32(s.replica.Voters()),
	}
	for _, m := range s.replica.Members() {
		if m.Client != "" {
			w.MemberAddresses = append(w.MemberAddresses, m.Client)
		}
	}
	slices.Sort(w.MemberAddresses)
	return w
}

// protocolVersion of package lockpb.
const protocolVersion = 2
