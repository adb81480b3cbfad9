package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
)

// system is a lock service under test: its servers, and all clients that can be compared on it. Each service has a
// file. A function may be nil if no scenario of the service uses it. Functions that get a scope fail as scope.must
// does.
type system struct {
	name    string
	version string
	peers   []peer // in the order of the table

	addresses []string   // of the servers, for clients
	servers   []*process // in the order of the addresses, then further ones
	parts     []*system  // the systems of the peers, if these differ
	binary    string     // of the bundled server
	door      string     // the URL of the gateway before it; empty without a gateway
	traffic   *traffic   // of its clients

	count   func(s *scope) (commands, trips float64)                        // nil: not counted
	reset   func(s *scope)                                                  // deletes all data
	prepare func(ctx context.Context, name string) error                    // for a floor that needs it
	erase   func(s *scope, key string)                                      // without the library that wrote the key
	missing func(s *scope, keys []string) int                               // the number of the keys that do not exist
	leads   func(ctx context.Context, member int) (bool, error)             // nil: no member leads
	serves  func(ctx context.Context, member int) (version string, e error) // it follows or leads, and answers
}

// addr returns the address for clients: the leader, or else all servers, separated by commas. Empty: there is no
// network.
func (s *system) addr() string {
	if s.leads != nil && len(s.addresses) > 1 {
		if leader, err := s.leader(context.Background()); err == nil {
			return s.addresses[leader]
		}
	}
	return s.endpoints() // clients report the reason
}

func (s *system) endpoints() string { return strings.Join(s.addresses, ",") }

// breakable reports whether clients use one address, so that scenarios that break the network apply.
func (s *system) breakable() bool { return len(s.addresses) == 1 || s.leads != nil }

// leader waits until a member leads, and returns its index. It asks all members concurrently, because some may be
// stopped.
func (s *system) leader(ctx context.Context) (leader int, err error) {
	errs, leads := make([]error, len(s.addresses)), make([]bool, len(s.addresses))
	err = untilNil(ctx, time.Second, func(ctx context.Context) error {
		_ = each(len(leads), func(i int) error { // an error of one must not end the questions to the others
			leads[i], errs[i] = s.leads(ctx, i)
			return nil
		})
		if leader = slices.Index(leads, true); leader >= 0 {
			return nil
		}
		return fmt.Errorf("none of %d members leads: %w", len(leads), errors.Join(append(errs, ctx.Err())...))
	})
	return leader, err
}

// serving waits until a restarted member serves.
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

// empty resets the service.
func (s *system) empty(ctx context.Context) error {
	work := &scope{ctx: ctx}
	return work.try(func() { s.reset(work) })
}

// wipe erases a key that must exist, and returns the time just before.
func (s *system) wipe(by *scope, key string) time.Time {
	if s.missing(by, []string{key}) > 0 {
		by.must(fmt.Errorf("nothing is stored for the key %q", key))
	}
	began := time.Now()
	s.erase(by, key)
	return began
}

// role is the role of a peer in the comparison.
type role string

const (
	roleFloor   role = "floor" // the service's own commands, without additions
	roleOurs    role = "ours"
	rolePeer    role = "peer"    // an alternative for a user
	roleVariant role = "variant" // ours in another setting: it has no targets
)

// peer is one way of taking a lock.
type peer struct {
	name  string
	role  role
	at    *system // the system on which the peer runs; nil: the one under test
	waits bool    // lock waits while another client holds; raw floors do not

	renewEvery func(ttl time.Duration) time.Duration              // the interval of renewals of a hold; nil: never
	key        func(name string) string                           // the stored key of a name; nil: unknown
	seed       func(ctx context.Context, name string) error       // prepares a name; nil: not needed
	open       func(c *client, o clientOptions) lock              // with its own connections, as one process has
	sessions   func(c *client, o clientOptions, n int) renewal    // of one client, renewed one by one; nil: no sessions
	watch      func(ctx context.Context, w watched) (ended error) // until ctx ends or an error; nil: no watches
}

// lock waits until it holds the lock or ctx ends, with the defaults of the library. A floor that does not wait makes
// one attempt.
type lock func(ctx context.Context, name string) (hold, error)

// renewal returns once the service has prolonged a session. It is safe for concurrent use, for different sessions.
type renewal func(ctx context.Context, session int) error

// watched is a name whose changes a client watches.
type watched struct {
	by   *client
	name string
	seen func()
}

// contends reports whether the peer takes part in comparisons of libraries, without floors and variants.
func (p peer) contends() bool { return p.waits && (p.role == roleOurs || p.role == rolePeer) }

// clientOptions are what scenarios choose for a client.
type clientOptions struct {
	addr    string        // of the server, or of a proxy in front of it
	ttl     time.Duration // of every lock
	user    string        // and password, where etcd requires them
	proxied bool          // addr is a proxy: dial only addr, and no address that servers report
	dial    dialer
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
	return h.Release(ctx)
}

// hold is one held lock: a lease of ours, or a hold of another library.
type hold interface {
	Release(ctx context.Context) error
	Context() context.Context // it ends when the user is notified of the loss
}

// theirs is a hold of another library.
type theirs struct {
	free  func(ctx context.Context) error
	lost  context.Context  // nil: the library never reports a loss
	until func() time.Time // the end of the validity without a report of losses; nil: not known
}

func (h theirs) Release(ctx context.Context) error { return h.free(ctx) }
func (h theirs) Context() context.Context          { return cmp.Or(h.lost, context.Background()) }

// ours is the name of the row that the targets are for.
const ours = "fencelock"

// ourRenewal is a third of the validity.
func ourRenewal(ttl time.Duration) time.Duration { return backend.Description{}.Validity(ttl) / 3 }

// ourPeer is our driver as new makes it, with its key for a name.
func ourPeer(new func(c *client, o clientOptions) backend.Driver, key func(name string) string) peer {
	return peer{name: ours, role: roleOurs, waits: true, renewEvery: ourRenewal, key: key,
		open: func(c *client, o clientOptions) lock { return c.ours(new(c, o), o.ttl) }}
}

// ours makes c a fencelock client on any driver: the measured calls are the calls of users.
func (c *client) ours(d backend.Driver, ttl time.Duration) lock {
	locks, err := fencelock.ForEfficiency(d, &fencelock.Options{TTL: ttl})
	c.must(err)
	c.native = ourNative{locks, d}
	c.later(func() { bounded(locks.Close) }) // a cut link makes it fail, as intended
	return func(ctx context.Context, name string) (hold, error) {
		return locks.Acquire(ctx, name)
	}
}

type ourNative struct {
	locks  *fencelock.Client
	driver backend.Driver
}

// bounded calls closing, which may not get an answer, or may not even return.
func bounded(closing func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	patiently(ctx, 8*time.Second, func() { _ = closing(ctx) }) // leftovers end with their TTL
}

// scope is work that ends at its first failure, as a test does, and its pending undo functions.
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

// try runs do in a separate goroutine, and returns must's error.
func (s *scope) try(do func()) error {
	if !patiently(s.ctx, 5*time.Second, do) {
		return fmt.Errorf("it did not end: %w", s.ctx.Err())
	}
	return s.err
}

// end undoes everything, the last first. It may be called repeatedly.
func (s *scope) end() {
	for _, undo := range slices.Backward(s.undo) {
		undo()
	}
	s.undo = nil
}

// patiently runs do in a separate goroutine, and returns when do has returned, or a grace period after the end of ctx:
// a library that ignores its context must not stop the run. It reports whether do has returned.
func patiently(ctx context.Context, grace time.Duration, do func()) bool {
	done := make(chan struct{})
	go func() {
		defer close(done)
		do()
	}()
	select {
	case <-done:
		return true
	case <-ctx.Done():
	}
	select {
	case <-done:
		return true
	case <-time.After(grace):
		return false
	}
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

// never is the time of an event that did not happen.
var never = math.Inf(1)
