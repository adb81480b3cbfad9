package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
)

// system is a lock service under test: its servers, and all clients that can be compared on it. One file per service.
// A nil function is one that no scenario of the service asks for.
type system struct {
	name    string
	version string
	peers   []peer // in the order of the table

	addresses []string   // of the servers, for clients
	servers   []*process // in the order of the addresses, then those beside them
	parts     []*system  // what the peers run on, where that is not one service
	binary    string     // of the bundled server
	traffic   *traffic   // of its clients

	count   func(ctx context.Context) (commands, trips float64, err error)  // nil: not counted
	reset   func(ctx context.Context) error                                 // deletes everything that is stored
	prepare func(ctx context.Context, name string) error                    // for a floor that wants it
	erase   func(ctx context.Context, key string) error                     // behind the library that wrote the key
	missing func(ctx context.Context, keys []string) (int, error)           // how many of the keys do not exist
	leads   func(ctx context.Context, member int) (bool, error)             // nil: no member leads
	serves  func(ctx context.Context, member int) (version string, e error) // it follows or leads, and answers
}

// addr is where clients connect: the leader, or else all servers, separated by commas. Empty: there is no network.
func (s *system) addr() string {
	if s.leads != nil && len(s.addresses) > 1 {
		if leader, err := s.leader(context.Background()); err == nil {
			return s.addresses[leader]
		}
	}
	return s.endpoints() // clients find out why
}

func (s *system) endpoints() string { return strings.Join(s.addresses, ",") }

// breakable reports whether clients use one address, so that scenarios that break the network apply.
func (s *system) breakable() bool {
	return len(s.parts) > 0 || len(s.addresses) == 1 || len(s.addresses) > 1 && s.leads != nil
}

// leader waits until a member leads, and returns which.
func (s *system) leader(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	for {
		errs, yes := make([]error, len(s.addresses)), make([]bool, len(s.addresses))
		var all sync.WaitGroup
		for i := range s.addresses {
			all.Go(func() {
				attempt, end := context.WithTimeout(ctx, time.Second)
				defer end()
				yes[i], errs[i] = s.leads(attempt, i)
			})
		}
		all.Wait()
		if leader := slices.Index(yes, true); leader >= 0 {
			return leader, nil
		}
		if ctx.Err() != nil {
			return 0, fmt.Errorf("none of %d members leads: %w", len(yes), errors.Join(append(errs, ctx.Err())...))
		}
		sleep(ctx, 5*time.Millisecond)
	}
}

// serving waits until a member that was started serves.
func (s *system) serving(ctx context.Context, member int) error {
	err := s.servers[member].answers(ctx, func(ctx context.Context) (err error) {
		s.version, err = s.serves(ctx, member)
		return err
	})
	if err != nil {
		return fmt.Errorf("%s at %s: %w", s.name, s.addresses[member], err)
	}
	return nil
}

// pause stops the servers as they are, with their sockets open; resume lets them go on.
func (s *system) pause() error {
	var errs []error
	for _, p := range s.servers {
		errs = append(errs, p.pause())
	}
	for _, part := range s.parts {
		errs = append(errs, part.pause())
	}
	return errors.Join(errs...)
}

func (s *system) resume() {
	for _, p := range s.servers {
		_ = p.child.Resume() // one that has ended has nothing to go on with
	}
	for _, part := range s.parts {
		part.resume()
	}
}

// role of a peer in the comparison.
type role string

const (
	roleFloor   role = "floor" // the service's own commands, nothing added
	roleOurs    role = "ours"
	rolePeer    role = "peer"    // what a user would pick instead
	roleVariant role = "variant" // ours in another setting: it has no targets
)

// peer is one way of taking a lock.
type peer struct {
	name  string
	role  role
	at    *system // that the peer runs on; nil: the one under test
	waits bool    // lock waits while somebody else holds; raw floors do not

	renewEvery func(ttl time.Duration) time.Duration              // how often a hold is renewed; nil: never
	key        func(name string) string                           // what is stored for a name; nil: not to be looked at
	seed       func(ctx context.Context, name string) error       // prepares a name; nil: nothing to do
	open       func(c *client, o clientOptions) lock              // with connections of its own, as one process has
	sessions   func(c *client, o clientOptions, n int) renewal    // of one client, renewed one by one; nil: none
	watch      func(ctx context.Context, w watched) (ended error) // until ctx ends or an error; nil: no watches
}

// lock waits until it holds the lock or ctx ends, with the defaults of the library. A floor that does not wait makes
// one attempt.
type lock func(ctx context.Context, name string) (hold, error)

// renewal returns once the service has prolonged a session. It is safe for concurrent use, for different sessions.
type renewal func(ctx context.Context, session int) error

// watched is a name of which a client wants to hear every change.
type watched struct {
	by   *client
	name string
	seen func()
}

// contends reports whether the peer takes part where libraries are compared, and not floors or settings.
func (p peer) contends() bool { return p.waits && (p.role == roleOurs || p.role == rolePeer) }

// clientOptions are what scenarios choose for a client.
type clientOptions struct {
	addr    string        // of the server, or of a proxy in front of it
	ttl     time.Duration // of every lock
	user    string        // and password, where etcd wants them
	proxied bool          // addr is a proxy: nothing else is dialled, whatever servers tell about each other
	dial    func(ctx context.Context, network, addr string) (net.Conn, error)
}

// client is one client of a peer's library. Its end closes it.
type client struct {
	scope
	lock   lock // safe for concurrent use
	native any  // the library's client, for watch
}

func (p peer) client(ctx context.Context, o clientOptions) (*client, error) {
	c := &client{scope: scope{ctx: ctx}}
	err := c.try(func() { c.lock = p.open(c, o) })
	if err != nil {
		c.end()
		return nil, err
	}
	return c, nil
}

// cycle acquires and releases.
func (c *client) cycle(ctx context.Context, name string) error {
	h, err := c.lock(ctx, name)
	if err != nil {
		return err
	}
	return h.unlock(ctx)
}

// hold is one lock that is held: a lease of ours, or what gives it back and who tells of its loss.
type hold struct {
	lease *fencelock.Lease
	free  func(ctx context.Context) error
	lost  func() <-chan struct{} // closed when the user is told; nil: the library never tells
	until func() time.Time       // how long a user may believe who is never told; nil: nobody says
}

func (h hold) unlock(ctx context.Context) error {
	if h.lease != nil {
		return h.lease.Release(ctx)
	}
	return h.free(ctx)
}

// told is closed when the library tells its user that the lock is lost. Nil: it never does.
func (h hold) told() <-chan struct{} {
	switch {
	case h.lease != nil:
		return h.lease.Context().Done()
	case h.lost != nil:
		return h.lost()
	}
	return nil
}

// over reports whether the library has told that the lock is lost.
func (h hold) over() bool {
	select {
	case <-h.told(): // nil blocks
		return true
	default:
		return false
	}
}

// ours is the name of the row that the targets are for.
const ours = "fencelock"

// ourRenewal is a third of the validity.
func ourRenewal(ttl time.Duration) time.Duration { return backend.Description{}.Validity(ttl) / 3 }

// ours makes c a fencelock client on any driver: what is measured is what users call.
func (c *client) ours(d backend.Driver, ttl time.Duration) lock {
	locks, err := fencelock.ForEfficiency(d, &fencelock.Options{TTL: ttl})
	c.must(err)
	c.native = ourNative{locks, d}
	c.later(func() { bounded(locks.Close) }) // a cut link makes it fail, on purpose
	return func(ctx context.Context, name string) (hold, error) {
		l, err := locks.Acquire(ctx, name)
		return hold{lease: l}, err
	}
}

type ourNative struct {
	locks  *fencelock.Client
	driver backend.Driver
}

// bounded closes what may not answer.
func bounded(closing func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_ = closing(ctx) // what is left ends with its TTL
}

// scope is work that ends at its first failure, as a test does, and what it has to undo then.
type scope struct {
	ctx  context.Context
	err  error
	undo []func()
}

// must ends the goroutine of try after an error.
func (s *scope) must(err error) {
	if err != nil {
		s.err = err
		runtime.Goexit()
	}
}

// later has end call undo. It belongs to the goroutine of try.
func (s *scope) later(undo func()) { s.undo = append(s.undo, undo) }

// closing has end close c.
func (s *scope) closing(c io.Closer) { s.later(func() { c.Close() }) }

// try runs do in a goroutine of its own, and returns what must was given. A library that ignores its context must not
// stop the run.
func (s *scope) try(do func()) error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		do()
	}()
	select {
	case <-done:
		return s.err
	case <-s.ctx.Done():
	}
	select {
	case <-done:
		return s.err
	case <-time.After(5 * time.Second):
		return fmt.Errorf("it did not end: %w", s.ctx.Err())
	}
}

// end undoes everything, the last first. It may be called again.
func (s *scope) end() {
	for _, undo := range slices.Backward(s.undo) {
		undo()
	}
	s.undo = nil
}

// sleep waits for d, or for the end of ctx.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// each runs f for 0 to n-1 in 64 goroutines and returns the first error.
func each(n int, f func(i int) error) error {
	all, failed := errgroup.WithContext(context.Background())
	all.SetLimit(64)
	for i := 0; i < n && failed.Err() == nil; i++ {
		all.Go(func() error { return f(i) })
	}
	return all.Wait()
}

// never is a time that did not come.
var never = math.Inf(1)
