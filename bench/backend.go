package main

import (
	"context"
	"net"
	"time"
)

// system is a lock service under test: a server of its own, its counters, and all clients that can be compared on it.
// One file per service.
type system interface {
	// name and version for the report.
	name() string
	version() string

	// peers returns what is compared, in the order of the table.
	peers() []peer

	// counters reads what the service has done so far.
	counters(ctx context.Context) (counters, error)

	// reset deletes everything that is stored.
	reset(ctx context.Context) error

	// erase deletes a key behind the library that wrote it.
	erase(ctx context.Context, key string) error

	// missing returns how many of the keys do not exist.
	missing(ctx context.Context, keys []string) (int, error)

	// addr is where clients connect, host:port. Empty: there is no network, and scenarios that break it do not apply.
	addr() string

	// pause stops the server as it is, with its sockets open, and resume lets it go on. False: the server is not ours.
	pause() bool
	resume()

	close() error
}

// counters of a service since its start. NaN: the service does not count that.
type counters struct {
	commands float64       // executed, those inside scripts included
	trips    float64       // read events on sockets: requests, as long as nobody pipelines
	cpu      time.Duration // user and system
}

// role of a peer in the comparison.
type role string

const (
	roleFloor role = "floor" // the service's own commands, nothing added
	roleOurs  role = "ours"
	rolePeer  role = "peer" // what a user would pick instead

	roleVariant role = "variant" // ours in another setting: it has no targets
)

// peer is one way of taking a lock.
type peer struct {
	name string
	role role

	// at is the service that the peer runs on. Nil: the system under test is one service, and all its peers run on it.
	at system

	// waits: lock waits while somebody else holds. Raw floors do not.
	waits bool

	// renewEvery is how often a hold is renewed in the background, for a TTL. Nil: never.
	renewEvery func(ttl time.Duration) time.Duration

	// key is what the peer stores for a name. Nil: scenarios that look behind the library do not apply.
	key func(name string) string

	// seed prepares a name. Nil: nothing to do.
	seed func(ctx context.Context, name string) error

	// open makes a client with its own connections, as one process would have.
	open func(o clientOptions) (client, error)

	// sessions makes n sessions of one client that are renewed one by one. Nil: the peer has nothing of that kind.
	sessions func(ctx context.Context, o clientOptions, n int) (sessions, error)

	// watch calls seen for every change of name, through a client of this peer, until ctx ends or an error. Nil: the
	// peer has no watches.
	watch func(ctx context.Context, c client, name string, seen func()) error
}

// sessions are what the service counts a client alive by. renew is safe for concurrent use, for different sessions.
type sessions interface {
	// renew returns once the service has prolonged the session.
	renew(ctx context.Context, session int) error
	close()
}

// contends reports whether the peer takes part where libraries are compared, and not floors or settings.
func (p peer) contends() bool { return p.waits && (p.role == roleOurs || p.role == rolePeer) }

// clientOptions are what scenarios choose for a client.
type clientOptions struct {
	addr string        // of the server, or of a proxy in front of it
	ttl  time.Duration // of every lock
	user string        // and password, where etcd wants them

	proxied bool // addr is a proxy: nothing else is dialled, whatever servers tell about each other

	dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

// client is one client of a peer's library. Its methods are safe for concurrent use.
type client interface {
	// lock waits until it holds the lock or ctx ends, with the defaults of the library. A floor that does not wait makes
	// one attempt.
	lock(ctx context.Context, name string) (hold, error)
	close()
}

// library is a client that is made of functions.
type library struct {
	take func(ctx context.Context, name string) (hold, error)
	end  func()
}

func (l library) lock(ctx context.Context, name string) (hold, error) { return l.take(ctx, name) }
func (l library) close()                                              { l.end() }

// hold is one lock that is held.
type hold interface {
	unlock(ctx context.Context) error
	// lost is closed when the library tells its user that the lock is lost. Nil: the library never tells.
	lost() <-chan struct{}
}

// untold is a hold whose user is never told of its loss: what gives it back.
type untold func(ctx context.Context) error

func (u untold) unlock(ctx context.Context) error { return u(ctx) }
func (u untold) lost() <-chan struct{}            { return nil }

// told is a hold with what is closed when its user is told of its loss.
type told struct {
	untold
	over <-chan struct{}
}

func (t told) lost() <-chan struct{} { return t.over }
