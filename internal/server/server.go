package server

// The server as a whole: its assembly, and the order in which its parts end.
//
// Beside the connections run lead.Watch, which leads whenever this member is elected, the replica, and
// closeOnFailure. A part that cannot go on calls fail, and the server closes: a member without its log would
// acknowledge changes that it may not have.
//
// Connections reach the leadership only by Server.leadership. It is nil while this member does not serve, so a
// connection that loads it always gets one term.

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
	"github.com/fencelock/fencelock/internal/listeners"
	"github.com/fencelock/fencelock/internal/server/lead"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// Server is one member of a cluster of lock servers, possibly the only one. All methods are safe for concurrent use.
type Server struct {
	config    Config
	log       *slog.Logger
	replica   *replica.Replica
	gate      *listeners.Gate // bounds the connections of clients
	front     *clientSocket   // nil without a socket for clients
	operators *operatorSocket
	peers     string // the address by which the other members know this one; empty without others
	advertise string // by which clients know it

	leadership atomic.Pointer[lead.Leadership] // nil while this member does not serve
	restored   atomic.Pointer[lead.Closed]     // nil unless this member leads and does not serve yet
	news       notifier                        // rings when an entry was applied

	unread   atomic.Int64 // bytes of replies that clients have not taken
	backedUp atomic.Int64 // when the last backup was complete, in Unix seconds; 0: never

	stop      context.CancelFunc // stops the goroutines of watching
	failed    chan error         // has room for one: the error with which the server cannot go on
	watching  sync.WaitGroup     // the goroutines that stop ends
	streams   sync.WaitGroup     // the goroutines that read and write connections
	attaching sync.WaitGroup     // connections within the process
	closing   sync.Once
	closed    error         // the result of Close, once done is closed
	done      chan struct{} // closed at the end of Close

	mu      sync.Mutex // protects the following fields
	conns   map[*conn]struct{}
	clients map[string]int // the number of conns of each
	ended   bool           // no connection is accepted any more
	failure error
}

var errClosing = errors.New("the server is closed")

// transferTime is the maximum time for which Close waits until another member takes over and requests under way are
// answered.
const transferTime = 2 * time.Second

// Start starts a server and returns as soon as it accepts connections, which may be before there is a leader: see
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
	s.gate = listeners.NewGate(s.connections(), s.streamsOfOne(), c.Log)
	if err := s.build(ctx); err != nil {
		stop()
		return nil, fmt.Errorf("server.Start: %w", err)
	}
	s.watching.Go(func() { s.closeOnFailure(background) })
	s.watching.Go(func() {
		lead.Watch(background, lead.Config{
			Replica: s.replica, Limits: c.Limits, Rules: c.Rules, Now: c.now, Open: s.open, Shut: s.shut, Dismiss: s.dismiss,
			Closed: s.restored.Store, CompareEvery: c.compareEvery, Log: c.Log, Meter: c.Meter,
			Audit: c.Audit, Identified: c.identified(),
		})
	})
	s.watching.Go(func() {
		if err := s.replica.Run(background); err != nil {
			s.fail(err)
		}
	})
	if s.operators != nil {
		s.operators.serve(s.fail)
	}
	if s.front != nil {
		s.front.serve()
	}
	return s, nil
}

// build opens all parts of the server, or no part.
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
			DataDir: c.DataDir, Moved: c.Moved, Store: c.Store, Listener: listener, Advertise: s.peers, Client: s.advertise,
			Dial: c.PeerDial, TLS: c.PeerTLS, Join: c.Join, JoinKey: c.JoinKey, BootstrapExpect: c.BootstrapExpect,
			MaxTTL: c.MaxTTL, Appended: c.Appended,
			Timing: c.Timing, Now: c.now, Changed: s.news.notify, Fatal: s.fail, Version: c.Version,
			Log: c.Log, Rig: c.rig(), HangAfter: c.hangAfter, RivalsEvery: c.rivalsEvery, AskTime: c.askTime,
			HealthEvery: c.healthEvery, Admitted: s.auditJoin,
		})
	}
	if err == nil { // the lock of the data directory protects the socket in it
		if err = s.openOperators(ctx); err != nil {
			err = errors.Join(err, s.replica.Close())
		}
	}
	if err != nil && s.front != nil {
		s.front.listener.Close()
	}
	return err
}

// listenToMembers opens the socket for the other members; nil without other members.
func (s *Server) listenToMembers(ctx context.Context) (net.Listener, error) {
	if s.config.PeerListen == "" {
		return nil, nil
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", s.config.PeerListen)
	if err != nil {
		return nil, fmt.Errorf("for members: %w", err)
	}
	s.peers = cmp.Or(s.config.PeerAdvertise, addressOf(s.config.PeerListen, listener))
	_, members := listeners.Connections(cmp.Or(s.config.files, listeners.FileLimit()))
	return listeners.NewGate(members, members, s.log).Admit(listener, members, "members"), nil
}

// addressOf returns the address of a listener for others. It has the configured host, which certificates name, and
// not the address to which the system resolved the host.
func addressOf(configured string, l net.Listener) string {
	actual := l.Addr().String()
	host, _, err := net.SplitHostPort(configured)
	_, port, failed := net.SplitHostPort(actual)
	if err != nil || failed != nil || host == "" || net.ParseIP(host).IsUnspecified() {
		return actual
	}
	return net.JoinHostPort(host, port)
}

// Close stops the server: it refuses new connections, hands the leadership to another member if there is one, answers
// requests under way and ends the connections. Sessions and locks stay as they are. ctx bounds the hand-over and the
// answers; Close always closes.
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

// close ends the parts in this order: first it refuses new connections; then the leadership goes to another member,
// while raft still runs and requests under way are answered; then raft; and last the streams, which carry the answers
// and the goodbye. If most members do not acknowledge, the leadership waits for its entries until raft ends and fails
// them. So once ctx has ended, raft is closed before that wait is over.
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
	if s.operators != nil {
		s.operators.close()
	}
	if s.front != nil {
		s.front.close()
	}
	s.attaching.Wait()
	s.streams.Wait()
	return err
}

// fail closes the server because it cannot go on. It does not block.
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
		go s.Close(context.Background()) //nolint:errcheck // Err reports the failure, which came first
	case <-ctx.Done():
	}
}

// Done returns a channel that is closed when the server is closed, by Close or because it could not go on: see Err.
func (s *Server) Done() <-chan struct{} { return s.done }

// Err returns the reason why the server could not go on; nil while it can, and after Close.
func (s *Server) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failure
}

// Addr returns the address for clients; nil without a socket.
func (s *Server) Addr() net.Addr {
	if s.front == nil {
		return nil
	}
	return s.front.listener.Addr()
}

// Advertised returns the address by which clients know this member, over the network or in its answers.
func (s *Server) Advertised() string { return s.advertise }

// PeerAddr returns the address by which the other members know this one; empty without others.
func (s *Server) PeerAddr() string { return s.peers }

// Leads reports whether this member serves clients.
func (s *Server) Leads() bool { return s.leadership.Load() != nil }

// Ready returns nil if this member serves, or follows the serving leader; otherwise the reason.
func (s *Server) Ready() error {
	leader, _ := s.replica.Leader()
	s.mu.Lock()
	ended := s.ended
	s.mu.Unlock()
	closed := s.closedError()
	switch {
	case ended:
		return errClosing
	case closed != nil:
		return errors.New(closed.Message)
	case leader == "":
		return errors.New("this member knows no leader")
	case leader == s.replica.ID() && !s.Leads():
		return errors.New("this member was elected, but does not serve yet")
	}
	return nil
}

// leaderEvery is the interval at which WaitLeader checks.
const leaderEvery = 10 * time.Millisecond

// WaitLeader returns once this member serves, or knows the serving member. The error is ctx's, or the reason why the
// server ended.
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

// enter counts a connection, unless the server is closing. ended is read under the same lock, so that dismiss does
// not miss an admitted connection.
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

// shut ends the effect of open.
func (s *Server) shut() {
	s.leadership.Store(nil)
	if s.front != nil {
		s.front.leads(false)
	}
}

// dismiss ends all connections with a goodbye: this member does not serve them any more.
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

// leaderAddress returns the address of the leader for clients; empty if unknown, or if it is this member and does not
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
		MinTtlNanos: int64(s.config.MinTTL), MaxTtlNanos: int64(s.replica.MaxTTL()), MaxMessageBytes: maxMessage,
		KeepsAll: true, History: state.History(), Voters: uint32(s.replica.Voters()), ClosedNanos: int64(s.closedFor()),
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
