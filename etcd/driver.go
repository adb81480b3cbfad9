package etcd

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// This file has the Driver, its construction and Close, and the index of its holds. A call goes through these steps,
// and the files are named for them:
//
//   - begin counts it in at the gate, and the first call probes the cluster (probe.go, space.go, history.go).
//   - An acquire gets a place, which is a key of the name (place.go, entry.go), and a session, which is an etcd lease
//     with a keepalive loop (session.go, proof.go, stream.go). It writes the key in one transaction (acquire.go,
//     use.go), which may travel with the steps of other callers (flight.go), and waits for its turn if it has
//     to (queue.go).
//   - Renew proves the session and looks for the keys on it (renew.go). Release deletes the key (release.go).
//     removeOne (queue.go) and sweep (sweep.go) remove the leftover keys of requests that nobody waits for any more.
//   - A client that Open made has connections that notice a server which does not answer (open.go, silent.go,
//     unheard.go, token.go), and uses the members that join (members.go).
//
// Goroutines. One for each session, which ends with the session or with Close; one for each transaction under way and
// one for each stream while it opens, both bounded in time; one for each place that is being removed, until the
// key is gone or the driver closes; one for the versions of the servers, once; one for each request for the list of
// members, within a second. All are counted at the gate, and Close waits for them. Only the request for a password's
// token is not (token.go): it ends within 30 s. A waiter costs no goroutine of this package beside its
// caller's.
//
// Mutexes. Driver.mu may be held when kit.Sessions takes its own, never the other way round. All others are taken
// alone: session.mu, history.mu, departures.mu, token.mu, connections.mu, members.mu. No mutex is held while a
// request is under way or while a function of the core is called.

// driverName begins every error of this driver, and is Description.Name.
const driverName = "etcd"

// The bounds of a TTL. etcd counts leases in whole seconds, and raises a TTL to one and a half election timeouts (2 s
// by default); Grant.TTL has the result. The upper bound is far below what etcd allows and only catches mistakes of
// unit, such as nanoseconds taken for seconds.
const (
	minTTL = time.Second
	maxTTL = 30 * 24 * time.Hour
)

// Options configure a Driver. Nil and the zero value mean the defaults.
type Options struct {
	// KeyPrefix starts every key. All clients of one set of locks use the same prefix; clients with different
	// prefixes never meet, even if one prefix is the beginning of the other. Default "fencelock/". It ends with "/",
	// no part between its slashes begins with "+", and it has at most 512 bytes of UTF-8 without control characters.
	// With another one every call answers an error that wraps backend.ErrInvalidOption.
	KeyPrefix string

	// Clock measures validity. Default backend.SystemClock.
	Clock backend.Clock

	// Logger receives warnings about servers with known lease defects. Default slog.Default.
	Logger *slog.Logger
}

// Driver is a backend.FencingDriver on an etcd cluster. Make it with New or Open; the zero value is not usable. All
// methods are safe for concurrent use, return within 50 ms of the end of their context, and wrap backend.ErrClosed
// after Close.
type Driver struct {
	// The first group is set by New or Open and never changes.
	client *clientv3.Client
	// The error in the arguments of New; every call returns it.
	unfit error
	// The connections of a client that Open made, which Close closes; else nil.
	conns *connections
	// The endpoints of such a client; else nil.
	members *members
	prefix  string
	clock   backend.Clock
	log     *slog.Logger

	// The cluster as its answers show it. All fields may be read and written by any goroutine.
	history history
	single  atomic.Bool // the cluster has one member
	checked sync.Once   // its servers were asked for their versions
	// An Instant. Until then requests ask for a leader, see request.
	troubled atomic.Int64

	// Steps on their way to the server: see flight.go.
	departures departures

	// Calls and background work, and the sessions.
	gate *kit.Gate       // calls in flight and background work
	ctx  context.Context // ends with Close
	// By the requested TTL. Outgrown sessions have been replaced, and live until they are unused.
	sessions *kit.Sessions[time.Duration, *session]

	mu sync.Mutex // protects the following fields
	// The keys that requests of this driver have or may come to have, and the latest key of each such request.
	// tidyLocked drops both together.
	places   map[string]*place
	requests map[string]string
	// The number that new places begin with: see freeKeyLocked.
	station int64
}

// hold is a granted key of this driver, behind a grant of the core. It is made by addHold and belongs to the place
// until the hold is released, found missing, or its session ends. Meanwhile it is one user of its session, which
// therefore is not retired.
//
// Only until changes, and it is atomic: renewals read it beside each other. A hold that moves to another session
// becomes another *hold (moveHold), so that a caller with the earlier pointer notices that its knowledge is old.
// The session of a hold never changes in place: a release that overtakes a renewal could not tell whether the
// session's user that it removes has been moved.
type hold struct {
	session  *session
	revision int64 // create revision: the token
	lost     func(backend.Loss)
	// An Instant. No promise goes beyond it: see stays.
	until atomic.Int64
	// Made by a renewal that moves a grant unknown to this driver, and not moved yet: see adopt.
	adopted bool
}

// The interfaces that the driver implements, checked by the compiler.
var (
	_ backend.FencingDriver = (*Driver)(nil)
	_ backend.Pinger        = (*Driver)(nil)
	_ backend.Inspector     = (*Driver)(nil)
	_ backend.Lister        = (*Driver)(nil)
	_ backend.Watcher       = (*Driver)(nil)
	_ backend.ForceReleaser = (*Driver)(nil)
	_ backend.MultiAcquirer = (*Driver)(nil)
)

// New returns a driver on client, with o or, if that is nil, the defaults. It does no I/O and never fails: Ping and
// every other call return the error of an unfit server, client or option. The driver uses client.KV,
// client.Lease and client.Watcher, so a client whose KV and Watcher are wrapped by etcd's namespace package works. It
// never closes client, and several drivers may share one.
//
// A client that is passed to New keeps its connections: the care that Open takes of servers that are silent, owe an
// answer, or check a password slowly does not apply to it. See the package comment for the settings.
func New(client *clientv3.Client, o *Options) *Driver {
	if o == nil {
		o = &Options{}
	}
	d := &Driver{
		gate: kit.NewGate(), client: client, prefix: cmp.Or(o.KeyPrefix, "fencelock/"),
		clock: cmp.Or(o.Clock, backend.SystemClock()), log: cmp.Or(o.Logger, slog.Default()),
		places: map[string]*place{}, requests: map[string]string{},
		station: randomStation(0), departures: departures{most: mostTogether},
	}
	d.sessions = kit.NewSessions[time.Duration, *session](d.clock)
	if client == nil || client.KV == nil || client.Lease == nil || client.Watcher == nil ||
		client.ActiveConnection() == nil {
		d.unfit = &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "etcd client", Value: "nil", Why: "make it with clientv3.New",
		}
	} else if why := badPrefix(d.prefix); why != "" {
		d.unfit = &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "KeyPrefix", Value: fmt.Sprintf("%.80q", d.prefix), Why: why,
		}
	}
	d.ctx = d.gate.Closing()
	return d
}

// badPrefix says why a prefix could reach into another one, or "" if it cannot. The driver's own keys begin with "+"
// after the prefix, and no part of a prefix does. So the keys of the prefix "a/" and the keys of "a/b/" never meet,
// although one prefix is the beginning of the other. Nested prefixes cannot be forbidden: a client does not know
// which prefixes exist.
func badPrefix(prefix string) string {
	switch {
	case len(prefix) > backend.MaxNameBytes:
		return fmt.Sprintf("it has %d bytes, more than %d", len(prefix), backend.MaxNameBytes)
	case !utf8.ValidString(prefix):
		return "it is not valid UTF-8"
	case strings.ContainsFunc(prefix, unicode.IsControl):
		return "it has a control character"
	case !strings.HasSuffix(prefix, "/"):
		return `it must end with "/"`
	case strings.HasPrefix(prefix, "+") || strings.Contains(prefix, "/+"):
		return `what follows a "/" must not begin with "+", as the driver's own keys do`
	}
	return ""
}

// IssuesFencingTokens promises fencing tokens, as backend.FencingDriver documents, under the conditions in the
// package comment: the cluster keeps its history, or a restore raises the revision. It returns d itself.
func (d *Driver) IssuesFencingTokens() backend.Driver { return d }

// Describe returns the driver's description, without I/O. Two fields are known only after the first call that reached
// the cluster: TokenSpace, empty before that, and Exclusion, which is ExclusionDurableServer for a cluster with one
// voting member and ExclusionQuorum otherwise.
func (d *Driver) Describe() backend.Description {
	exclusion := backend.ExclusionQuorum
	if d.single.Load() {
		exclusion = backend.ExclusionDurableServer
	}
	return backend.Description{
		Name:  driverName,
		Clock: d.clock, Exclusion: exclusion, KeepsHolds: true,
		Capabilities: backend.CapFencing | backend.CapFair | backend.CapMetadata | backend.CapInspect |
			backend.CapList | backend.CapWatch | backend.CapWatchReplay | backend.CapForceRelease |
			backend.CapShared | backend.CapPermits | backend.CapMultiAcquire,
		MinTTL: minTTL, MaxTTL: maxTTL, TTLGranularity: time.Second,
		TokenSpace: d.history.tokenSpace().name,
		Shows: backend.Shows{
			Look:         backend.StateFields{Since: true, ExpiresIn: true, Limit: true, Waiters: true, Queue: true, QueueSince: true},
			List:         backend.StateFields{Since: true, Limit: true, Waiters: true},
			ChangeAuthor: true,
		},
	}
}

// enter counts a call or background work in at the gate; every success is followed by one gate.Leave. It returns
// backend.ErrClosed after Close, and before that the error of New's arguments.
func (d *Driver) enter() error {
	if d.unfit != nil && d.ctx.Err() == nil {
		return d.unfit
	}
	return d.gate.Enter()
}

// begin starts a call: it is counted in, and the token space is known when it returns without an error. The caller
// leaves the gate. No call goes on without the token space, because every write compares it: the first call of a driver
// therefore pays for the probe, once.
func (d *Driver) begin(ctx context.Context) error {
	if err := d.enter(); err != nil {
		return err
	}
	if d.history.tokenSpace().name != "" {
		return nil
	}
	err := d.ask(ctx)
	if err != nil {
		d.gate.Leave()
	}
	return err
}

// beginBound is begin for a call that Close ends. The context ends with ctx and with Close; leave counts the call out.
// Release does not use it: Close waits for a release that is under way, since it makes room for others.
func (d *Driver) beginBound(ctx context.Context) (bound context.Context, leave func(), err error) {
	if err := d.begin(ctx); err != nil {
		return nil, nil, err
	}
	bound, free := d.gate.Bind(ctx)
	return bound, func() { free(); d.gate.Leave() }, nil
}

// addHold notes that the key of a request is granted, and takes over the one user of the session that the caller has
// added for it. If the same request held already, perhaps on an earlier session, the earlier hold is replaced and its
// user leaves. The end of the session removes the hold: see forget.
func (d *Driver) addHold(key, requestID string, h *hold) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.callLocked(key, requestID)
	// callLocked has made a missing place; the hold now keeps it instead of that call.
	p := d.places[key]
	p.calls--
	if p.hold != nil {
		p.hold.session.Leave(1)
	}
	p.hold = h
}

// moveHold notes that the hold of a key stands on s now. The caller has added a user to s for it. If old is no longer
// the hold of the key, it was released or its session ended during the renewal, and that user leaves. The key is
// deleted in either case: by the release, which does not ask for the lease, or by the core, which releases a hold
// that it was told is lost.
func (d *Driver) moveHold(key string, old *hold, s *session) {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.places[key]
	if old == nil || p == nil || p.hold != old {
		s.Leave(1)
		return
	}
	moved := &hold{session: s, revision: old.revision, lost: old.lost}
	moved.until.Store(old.until.Load())
	old.session.Leave(1)
	p.hold = moved
}

// hold returns the hold of key if g names it, or nil. A grant without an incarnation names any hold of
// its request.
func (d *Driver) hold(key string, g backend.Grant) *hold {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.places[key]
	if p == nil || p.hold == nil || p.requestID != g.RequestID {
		return nil
	}
	if revision := incarnation(g); revision != 0 && revision != p.hold.revision {
		return nil
	}
	return p.hold
}

// dropHold forgets h if it is still the hold of key, and removes its user from the session. It ignores nil, and a
// hold that was replaced or has moved. It does not touch the key in etcd: callers have seen that the key is gone, or
// leave it.
func (d *Driver) dropHold(key string, h *hold) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if p := d.places[key]; h != nil && p != nil && p.hold == h {
		p.hold = nil
		h.session.Leave(1)
		d.tidyLocked(key)
	}
}

// incarnation is the create revision in a grant, which names one life of a key. It is 0 for Request.Grant, which
// names no life.
func incarnation(g backend.Grant) int64 {
	text, _, _ := strings.Cut(g.Incarnation, "@")
	revision, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0
	}
	return revision
}

// Close ends waiters with backend.ErrClosed and waits for the calls under way and for their cleanup, until ctx ends.
// Then it revokes the driver's leases, which removes the remaining keys; it does not notify holders, since the core
// has released their holds. It closes the client only if Open made it.
//
// The error is ctx's, if that ended first, or the error that kept a lease from being revoked: then the lease expires
// within its TTL, and the rest of Close is done anyway. A second call waits like the first and does not revoke.
func (d *Driver) Close(ctx context.Context) error {
	// The order matters. The gate admits no further calls; waiters and keepalive loops end with its context; calls
	// under way end, releases included; and only then are the leases revoked, with the remaining keys.
	first := d.gate.Close()
	err := d.gate.Wait(ctx)
	if !first {
		return d.callError("close", "", err)
	}
	for _, s := range d.sessions.Live() {
		d.forget(s) // without notifying the holders
		if revokeErr := s.revoke(ctx); err == nil {
			err = revokeErr
		}
	}
	if d.conns != nil {
		if closeErr := d.client.Close(); err == nil {
			err = closeErr
		}
	}
	return d.callError("close", "", err)
}
