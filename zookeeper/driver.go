// This file has the driver's API: its options, Describe, the entry of calls, and Close.
//
// The other files, from the top down: acquire.go, queue.go, refuse.go, spent.go, release.go and renew.go are the
// verbs; inspect.go reads locks and forces releases; hold.go, loss.go and watch.go keep the holds and report losses;
// session.go, keepalive.go and proof.go keep sessions; history.go and ensemble.go examine the servers; call.go makes
// requests, and wire.go is the connection under the client library; node.go, kind.go and dirs.go are the stored form.
//
// Mutexes are taken in this order: Driver.mu, wire.mu, session.mu, then the mutex of kit.Sessions. No request is made
// and no callback of the core is called with any of them held.

package zookeeper

import (
	"cmp"
	"context"
	"crypto/tls"
	"hash/maphash"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

const driverName = "zookeeper"

// Options configure a Driver. Nil and the zero value mean the defaults.
type Options struct {
	// KeyPrefix is the path of the node below which the driver keeps everything; all clients of one set of locks use the
	// same path. The driver makes it if it is missing, parents included. Default "/fencelock". It cannot be "/". One
	// prefix may lie below another: neither reaches the other's locks. No part of it may start with "lock:".
	KeyPrefix string

	// Chroot is put before KeyPrefix, like the path at the end of a ZooKeeper connect string. Default: no chroot. The
	// rules for the parts of KeyPrefix apply to it, too.
	Chroot string

	// Tick is the servers' tickTime: the margin by which a hold ends before its session may, and the unit of the
	// bounds of a TTL, which ZooKeeper grants between 2 and 20 ticks. Default 2 s, as in the sample configuration of
	// the server. A value above the servers' makes leases end earlier than necessary; a value below is
	// ErrMisconfigured. The servers show only minSessionTimeout, which is two ticks unless it is set. If it is set to
	// less, the driver cannot detect a longer tick; if it is set to more, Tick has to be half of it, since the two
	// cases look the same.
	Tick time.Duration

	// User and Password authenticate with the digest scheme. All nodes are then open to this user only.
	User, Password string

	// ACL of the nodes that the driver makes. Default: all rights for the user, or for everyone without a user.
	ACL []zk.ACL

	// TLS, if not nil, is used on every connection.
	TLS *tls.Config

	// Dial replaces the dialer of TCP connections. TLS is put on top of it.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	// Clock measures validity. Default backend.SystemClock.
	Clock backend.Clock

	// Logger receives the messages of the client library, at level debug, and a warning when the driver makes a new token
	// space because the node of KeyPrefix is missing. Default slog.Default.
	Logger *slog.Logger
}

// Driver is a backend.FencingDriver on a ZooKeeper ensemble. Make it with New or Open. All methods are safe for
// concurrent use.
//
// Its background work is bounded by the number of sessions and names, not of holds: for each session a keepalive and
// a goroutine that closes it, besides the library's own; and, only when needed, one goroutine each that watches
// holds, removes unused names, and checks the ensemble's history. All of them end before Close returns.
type Driver struct {
	// Set by New, and never changed.
	addrs []string
	o     Options // with defaults
	root  string  // chroot included
	clock backend.Clock
	bad   error // the fault of the options, or nil
	seed  maphash.Seed

	// Each of these has its own mutex, or needs none.
	gate     *kit.Gate       // calls in flight and background work
	ctx      context.Context // ends with Close
	sessions *kit.Sessions[slot, *session]

	// Written for every message read, without a mutex.
	zxid       atomic.Int64 // the highest that any answer had
	suspecting atomic.Bool  // recall runs
	quorum     atomic.Bool  // several servers vote; see readConfig

	// mu protects the fields below it. It is taken before any other mutex of the driver and held for a few map operations
	// at a time, since the goroutines that read connections wait for it (changed, suspect).
	mu        sync.Mutex                 // protects the following fields
	space     string                     // see tokenSpace
	forgotten error                      // see forgot
	dirs      map[string]backend.Instant // nodes of names used lately; 0, or the instant of the last entry's end
	tidying   bool                       // a goroutine removes unused names, see takeUnused
	ending    sync.WaitGroup             // sessions that are not closed yet
	severed   context.Context            // ends when Close stops waiting for the servers
	sever     context.CancelFunc
	holds     map[string]*hold         // by path: held and waiting nodes
	unwatched []unwatched              // in the order in which they were made
	watching  bool                     // a goroutine watches them, see takeUnwatched
	gone      map[victims][]*hold      // with holders about to be notified
	leftovers map[string]*leftover     // by name and request id
	leavings  map[string]chan struct{} // by path: nodes of ended attempts that are being removed; closed by left
	failures  map[slot]failure         // of sessions that could not be made recently
}

var (
	_ backend.FencingDriver = (*Driver)(nil)
	_ backend.Pinger        = (*Driver)(nil)
	_ backend.Inspector     = (*Driver)(nil)
	_ backend.Lister        = (*Driver)(nil)
	_ backend.ForceReleaser = (*Driver)(nil)
)

// New returns a driver on the servers at addrs, host:port each. It does no I/O and dials when it is first used;
// problems of the options or the servers show in Ping or in the first call, as an error that wraps
// backend.ErrInvalidOption or ErrMisconfigured. A nil o means the defaults. Close closes the connections.
//
// It takes addresses and not a *zk.Conn: a connection carries one session and a session has one timeout, so that a
// driver needs a connection for every TTL, and a connection of that library continues with another session when one
// has ended.
func New(addrs []string, o *Options) *Driver {
	if o == nil {
		o = &Options{}
	}
	d := &Driver{
		gate: kit.NewGate(), dirs: map[string]backend.Instant{},
		addrs: append([]string(nil), addrs...), o: *o,
		holds: map[string]*hold{}, leftovers: map[string]*leftover{}, leavings: map[string]chan struct{}{},
		gone: map[victims][]*hold{}, failures: map[slot]failure{},
	}
	d.o.KeyPrefix = cmp.Or(d.o.KeyPrefix, "/fencelock")
	d.o.Tick = cmp.Or(d.o.Tick, 2*time.Second)
	d.o.Clock = cmp.Or(d.o.Clock, backend.SystemClock())
	d.o.Logger = cmp.Or(d.o.Logger, slog.Default())
	if d.o.ACL == nil {
		d.o.ACL = zk.WorldACL(zk.PermAll)
		if d.o.User != "" {
			d.o.ACL = zk.AuthACL(zk.PermAll)
		}
	}
	d.clock, d.seed = d.o.Clock, maphash.MakeSeed()
	d.sessions = kit.NewSessions[slot, *session](d.clock)
	d.root = strings.TrimSuffix(d.o.Chroot, "/") + d.o.KeyPrefix
	d.bad = d.checkOptions()
	d.ctx = d.gate.Closing()
	d.severed, d.sever = context.WithCancel(context.Background())
	return d
}

// checkOptions returns the fault of the options, or nil. New cannot return an error, so every call returns this one.
func (d *Driver) checkOptions() error {
	bad := func(what, value, why string) error { return kit.InvalidOption(what, strconv.Quote(value), why) }
	if len(d.addrs) == 0 {
		return bad("addresses", "", "at least one is required")
	}
	for _, addr := range d.addrs {
		if _, _, err := net.SplitHostPort(addr); err != nil {
			return bad("address", addr, "it is not host:port")
		}
	}
	if why := notPath(d.o.KeyPrefix); why != "" {
		return bad("prefix", d.o.KeyPrefix, why)
	}
	if d.o.Chroot != "" && d.o.Chroot != "/" {
		if why := notPath(d.o.Chroot); why != "" {
			return bad("chroot", d.o.Chroot, why)
		}
	}
	if strings.HasPrefix(d.root+"/", "/zookeeper/") {
		return bad("prefix", d.root, "/zookeeper belongs to the servers")
	}
	if strings.Contains(d.o.User, ":") || d.o.User == "" && d.o.Password != "" {
		return bad("user", d.o.User, "a user of the digest scheme has a name without a colon")
	}
	if d.o.Tick < time.Millisecond || d.o.Tick > time.Minute || d.o.Tick%time.Millisecond != 0 {
		return bad("tick", d.o.Tick.String(), "it is not between 1 ms and 1 min, in whole milliseconds")
	}
	return nil
}

// notPath returns the reason why a prefix or a chroot is not a valid path of a node for locks, or "". It is called
// with a nonempty path.
func notPath(path string) string {
	for part := range strings.SplitSeq(strings.TrimPrefix(path, "/"), "/") {
		switch {
		case path[0] != '/' || part == "" || part == "." || part == ".." || backend.ValidateName(part) != nil:
			return "it is not the path of a node"
		case strings.HasPrefix(part, nameMark):
			return "a part that starts with " + nameMark + " is the node of a lock"
		}
	}
	return ""
}

// IssuesFencingTokens makes the promise of backend.FencingDriver, under the conditions in the package comment.
func (d *Driver) IssuesFencingTokens() backend.Driver { return d }

// Describe returns the capabilities of the driver, without I/O and without waiting. TokenSpace is empty and Exclusion
// is that of one durable server until the first session is open. MinTTL and MaxTTL are 2 and 20 ticks, in steps of a
// millisecond; Margin is one tick, by which a hold ends before its session may (proof.go).
func (d *Driver) Describe() backend.Description {
	return backend.Description{
		Name:  driverName,
		Clock: d.clock, Exclusion: d.exclusion(), KeepsHolds: true,
		Capabilities: backend.CapFencing | backend.CapFair | backend.CapMetadata | backend.CapPushLoss |
			backend.CapInspect | backend.CapList | backend.CapForceRelease | backend.CapShared | backend.CapPermits,
		MinTTL: d.minTTL(), MaxTTL: 20 * d.o.Tick, TTLGranularity: time.Millisecond,
		Margin:     d.o.Tick,
		TokenSpace: d.tokenSpace(),
		Shows: backend.Shows{
			Look: backend.StateFields{Since: true, Limit: true, Waiters: true, Queue: true, QueueSince: true},
			List: backend.StateFields{Since: true, Limit: true, Waiters: true},
		},
	}
}

// minTTL is the servers' minimum, or, for very short ticks, enough to leave a little time to hold the lock: a
// hold of two ticks less the margin of one tick lasts no longer than a tick.
func (d *Driver) minTTL() time.Duration { return max(2*d.o.Tick, d.o.Tick+200*time.Millisecond) }

// begin starts every call: it counts the call in, refuses wrong options and ended contexts, and returns a context that
// ends with Close, too. The caller calls end when the call is over, unless begin fails.
func (d *Driver) begin(ctx context.Context) (bounded context.Context, end func(), err error) {
	if err := d.gate.Enter(); err != nil {
		return nil, nil, err
	}
	if err := cmp.Or(d.bad, ctx.Err()); err != nil {
		d.gate.Leave()
		return nil, nil, err
	}
	bounded, free := d.gate.Bind(ctx)
	return bounded, func() {
		free()
		d.gate.Leave()
	}, nil
}

// Ping checks that the leader of the ensemble answers with a majority, and that the user may read and make the root.
// Without a session it makes one, which then lives for its TTL of 10 s, or the nearest TTL that the servers grant, or
// as long as it is used. If the connection is lost meanwhile, Ping retries, three attempts in all, unless ctx ends.
// Errors wrap backend.ErrUnavailable, ErrMisconfigured (the user, the tick), ErrInvalidOption, ErrHistoryLost or
// ErrClosed.
func (d *Driver) Ping(ctx context.Context) error {
	return d.callError("ping", "", d.onSession(ctx, func(context.Context, *session) error { return nil }))
}

// Close ends waiters with backend.ErrClosed, waits for calls in progress and for the driver's background work, and
// closes its sessions, which removes all remaining nodes: held locks are free immediately. Their holders get no
// notification of a loss.
//
// If ctx ends first, it breaks the connections, which ends all background work, and returns ctx's error: sessions
// that were not closed by then end with their TTLs. Close may be called repeatedly, even concurrently, and each call
// waits.
func (d *Driver) Close(ctx context.Context) error {
	first := d.gate.Close()
	idle := make(chan struct{})
	go func() { // ends when the last session is closed, which sever hastens
		_ = d.gate.Wait(ctx)
		if first {
			d.mu.Lock()
			clear(d.holds) // without a notification
			d.mu.Unlock()
			for _, s := range d.sessions.Live() {
				s.end(backend.ReasonClosed)
			}
		}
		d.ending.Wait()
		close(idle)
	}()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
	}
	d.sever()
	last := time.NewTimer(severTime)
	defer last.Stop()
	select {
	case <-idle:
	case <-last.C:
	}
	return d.callError("close", "", ctx.Err())
}

// severTime bounds the wait of Close after it has broken the connections.
const severTime = 40 * time.Millisecond
