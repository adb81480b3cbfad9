package builtin

// The driver: its construction, its state, and its end. Read Driver's fields first: all other files work on that
// state.
//
// One mutex, Driver.mu, protects all of it: sessions, calls, attempts, holds and the queue of the connection. An
// answer concerns most of them together, and with a mutex for each, five mutexes would need an order. Driver.mu is
// never held while a message is sent or awaited, nor while a caller's function runs: unlockAndTell notifies holders of
// losses after it has unlocked the mutex.

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/notify"
)

const driverName = "builtin"

// The bounds of a TTL until the server has reported its own.
const (
	minTTL = 100 * time.Millisecond
	maxTTL = 365 * 24 * time.Hour
)

// Options configure a Driver. Nil and the zero value mean the defaults.
type Options struct {
	// TLS for connections to the servers. Nil: no encryption. If ServerName is empty, the dialled name is expected.
	TLS *tls.Config

	// TokenFile is a file with a token, which identifies the client, even if it has a certificate. It is read for each
	// connection, so a new file takes effect from the next connection on; the server ends a connection at most 30 s after
	// its token has expired. It needs TLS. Empty: the server identifies the client by its certificate, if there is one.
	TokenFile string

	// Dial opens connections, to the addresses given to New and to those that servers name. Default TCP.
	Dial func(ctx context.Context, address string) (net.Conn, error)

	// Clock measures validity. Default backend.SystemClock.
	Clock backend.Clock

	// Logger receives warnings about unfit servers. Default slog.Default.
	Logger *slog.Logger

	// Under names holds that other processes keep while this process works, by HoldRef, the innermost first: the server
	// refuses an acquire that would wait for one of them, as if it were made under them (see Deadlocks in the package
	// comment). At most backend.MaxUnder. An acquire first names the holds of this process, and then as many of these as
	// fit into that maximum.
	Under []string
}

// HoldRef returns the name of a request's hold for Options.Under: a hash of its id, 22 characters, which grants no
// right. Lease.Grant has the id.
func HoldRef(requestID string) string {
	sum := sha256.Sum256([]byte("fencelock: request\x00" + requestID))
	return base64.RawURLEncoding.EncodeToString(sum[:16])
}

// checkUnder returns the error in Options.Under, or nil.
func checkUnder(under []string) error {
	if len(under) > backend.MaxUnder {
		return kit.InvalidOption("under", fmt.Sprintf("of %d holds", len(under)), fmt.Sprintf("want at most %d", backend.MaxUnder))
	}
	for _, ref := range under {
		if sum, err := base64.RawURLEncoding.DecodeString(ref); err != nil || len(sum) != 16 {
			return kit.InvalidOption("under", strconv.Quote(ref), "want what HoldRef returns")
		}
	}
	return nil
}

// Driver is a backend.FencingDriver on the bundled server. Make it with New, Open or Attach. All methods are safe for
// concurrent use.
type Driver struct {
	dialer    dialer
	addresses []string
	clock     backend.Clock
	log       *slog.Logger
	// unfit is the error in the constructor's arguments, or nil. Constructors return no error, so every call returns
	// it.
	unfit error
	under []string // Options.Under
	// forming reports that no member can lead yet, so that calls wait; nil: never. It is called without mu.
	forming func() bool

	// described is the result of Describe. It is atomic and not under mu, because the core may call Describe while it
	// holds its own locks. learn replaces it, and never modifies it in place.
	described atomic.Pointer[backend.Description]

	// gate counts calls in flight, and goroutines that end with ctx.
	gate *kit.Gate
	// ctx ends when Close begins: calls, waiters and the sessions' goroutines end with it.
	ctx context.Context
	// sessions are the sessions that calls join, by TTL. Its mutex may be taken under mu, and mu never under it.
	sessions *kit.Sessions[time.Duration, *session]

	// lineCtx ends when Close has ended the sessions: connections outlive ctx, because Close ends the sessions on them.
	lineCtx context.Context
	hangUp  context.CancelFunc
	// lines counts the goroutines that end with lineCtx: maintain, and greet for each member.
	lines sync.WaitGroup
	// wake rings when a connection is wanted.
	wake notify.Signal

	mu      sync.Mutex // protects the following fields, and the fields of sessions, calls and attempts
	running bool       // maintain runs
	// conn is the connection to the leader, or nil.
	conn    *conn
	leader  string   // the address to ask first for the leader; empty if unknown
	members []string // addresses that servers reported
	// calls are the unanswered calls, by number, with or without a connection.
	calls map[uint64]*call
	last  uint64 // the number of the last call
	// byID are the sessions that may be open in the service, including those that are being opened.
	byID map[string]*session
	// holds are the granted holds, whose holders must be notified of a loss.
	holds   map[key]*hold
	watches map[*watch]struct{}
	// followed has the watches by the number of the call that began them last.
	followed map[uint64]*watch
	// tell has the notifications of losses, in order: see unlockAndTell.
	tell []func()
	past past
}

// key identifies the hold or wait of one request for one name.
type key struct{ name, requestID string }

var (
	_ backend.FencingDriver = (*Driver)(nil)
	_ backend.Pinger        = (*Driver)(nil)
	_ backend.Inspector     = (*Driver)(nil)
	_ backend.Lister        = (*Driver)(nil)
	_ backend.Watcher       = (*Driver)(nil)
	_ backend.ForceReleaser = (*Driver)(nil)
	_ backend.MultiAcquirer = (*Driver)(nil)
	_ backend.Expirer       = (*Driver)(nil)
)

// New returns a driver for the cluster of which addrs, as host:port, are members; some of them are enough. It does no
// I/O: Ping or the first call returns any error. A server that is not durable grants without tokens, which
// fencelock.ForCorrectness cannot know yet: the first acquire then fails with ErrTier. Open fails immediately.
func New(addrs []string, o *Options) *Driver {
	d := newDriver(slices.Clone(addrs), networkDialer(o), o)
	switch {
	case len(addrs) == 0:
		d.unfit = kit.InvalidOption("list of addresses", "of none", "want host:port of at least one member")
	case slices.Contains(addrs, ""):
		d.unfit = kit.InvalidOption("address", `""`, "want host:port")
	}
	return d
}

// Attach returns a driver for a server in this process, without a socket between them: attach connects to it, and the
// stream that it returns ends with ctx. Options.TLS and Dial have no effect. Close the driver before the server.
// Package embedded does both.
//
//	d := builtin.Attach(func(ctx context.Context) builtin.Stream { return server.Attach(ctx) }, nil)
//
// attach is called each time the driver needs a connection, from any goroutine. nil means that there is no connection
// for now.
func Attach(attach func(ctx context.Context) Stream, o *Options) *Driver {
	d := newDriver([]string{"in-process"}, inProcess(attach), o)
	if attach == nil {
		d.unfit = kit.InvalidOption("attach", "nil", "want what connects to a server in this process")
	}
	return d
}

// Member is a server in this process that is a member of a cluster.
type Member struct {
	// Connect connects to it, as the function given to Attach does.
	Connect func(ctx context.Context) Stream
	// Address is the member's address for clients.
	Address string
	// Forming reports whether it has known no leader since its start. Until then the cluster is starting, and calls wait
	// until their contexts end. Nil: never.
	Forming func() bool
}

// AttachMember returns a driver for a cluster with a member in this process: it reaches that member without a socket,
// and the others as New does, with Options.TLS and Dial. Package embedded does both. Close the driver before
// the member.
func AttachMember(m Member, o *Options) *Driver {
	member, network := inProcess(m.Connect), networkDialer(o)
	d := newDriver([]string{m.Address}, func(ctx context.Context, address string) (Stream, error) {
		if address == m.Address {
			return member(ctx, address)
		}
		return network(ctx, address)
	}, o)
	d.forming = m.Forming
	switch {
	case m.Connect == nil:
		d.unfit = kit.InvalidOption("Connect", "nil", "want what connects to a server in this process")
	case m.Address == "":
		d.unfit = kit.InvalidOption("Address", `""`, "want that of the server in this process")
	}
	return d
}

// newDriver is the part that all constructors share. It does no I/O and starts no goroutine: maintain runs from the
// first call on, so an unused driver need not be closed.
func newDriver(addrs []string, dial dialer, o *Options) *Driver {
	o = cmp.Or(o, &Options{})
	d := &Driver{
		gate: kit.NewGate(), dialer: dial, addresses: addrs,
		clock: cmp.Or(o.Clock, backend.SystemClock()), log: cmp.Or(o.Logger, slog.Default()),
		wake:  notify.New(),
		calls: map[uint64]*call{}, byID: map[string]*session{},
		holds: map[key]*hold{}, watches: map[*watch]struct{}{}, followed: map[uint64]*watch{},
		under: slices.Clone(o.Under), unfit: cmp.Or(checkUnder(o.Under), checkToken(o)),
	}
	d.sessions = kit.NewSessions[time.Duration, *session](d.clock)
	d.described.Store(&backend.Description{
		Name: driverName, Capabilities: capabilities | backend.CapFencing,
		Clock: d.clock, Exclusion: backend.ExclusionDurableServer, KeepsHolds: true,
		MinTTL: minTTL, MaxTTL: maxTTL, TTLGranularity: time.Nanosecond,
		Shows: backend.Shows{
			Look:       backend.StateFields{Since: true, ExpiresIn: true, Limit: true, Waiters: true, Queue: true, QueueSince: true},
			List:       backend.StateFields{Since: true, ExpiresIn: true, Limit: true, Waiters: true},
			RetryAfter: true, ChangeTime: true, ChangeAuthor: true,
		},
	})
	d.ctx = d.gate.Closing()
	d.lineCtx, d.hangUp = context.WithCancel(context.Background())
	return d
}

// capabilities that every server has.
const capabilities = backend.CapFair | backend.CapShared | backend.CapPermits | backend.CapMultiAcquire |
	backend.CapHierarchy | backend.CapDeadlock | backend.CapMinHold | backend.CapMetadata | backend.CapPushLoss |
	backend.CapInspect | backend.CapList | backend.CapWatch | backend.CapWatchReplay | backend.CapForceRelease

// IssuesFencingTokens promises fencing tokens, as backend.FencingDriver documents, for a durable server. Describe
// omits CapFencing once the server has reported that it is not durable.
func (d *Driver) IssuesFencingTokens() backend.Driver { return d }

// Describe returns the driver's description with the present service, without asking it. Before the first connection
// it has wide bounds of the TTL, no token space, and the exclusion of one durable server. The server itself reports
// its kind: a majority of several members (backend.ExclusionQuorum), one durable server, or a volatile server
// (backend.ExclusionVolatileServer). Describe may be called at any time, even after Close, and takes no lock. Its
// result may change with the next connection, but a known token space does not, because a driver refuses another one.
func (d *Driver) Describe() backend.Description { return *d.described.Load() }

// fences reports whether the server's tokens fence, as far as is known: a server that is not durable restarts them.
func (d *Driver) fences() bool { return d.Describe().Capabilities.Has(backend.CapFencing) }

// begin counts a call in; every call except Close starts with it. It returns backend.ErrClosed after Close, the error
// of an unfit driver or of a lost history, or ctx's own error, since nothing was sent. If it returns nil, the caller
// has to call gate.Leave.
func (d *Driver) begin(ctx context.Context) error {
	if err := d.gate.Enter(); err != nil {
		return err
	}
	d.mu.Lock()
	err := cmp.Or(d.unfit, d.past.lost, ctx.Err())
	d.mu.Unlock()
	if err != nil {
		d.gate.Leave()
	}
	return err
}

// background runs f, which ends with d.ctx. Close waits for it. Once Close has waited, background has no effect.
func (d *Driver) background(f func()) { d.gate.Go(func(context.Context) { f() }) }

// incarnation is the server's token in a grant, even if it does not fence; zero for Request.Grant.
func incarnation(g *backend.Grant) uint64 {
	token, err := strconv.ParseUint(g.Incarnation, 10, 64)
	if err != nil {
		return 0
	}
	return token
}

// closeTime is the maximum time for which Close tries to end the sessions of an unresponsive service.
const closeTime = 2 * time.Second

// Close ends waiters with backend.ErrClosed and ends the driver's sessions in the service, with their holds and waits.
// It takes at most two seconds if the service does not answer; the sessions then expire with their TTL, and the error
// reports that. Close may be called repeatedly.
//
// Holders are not notified of a loss: the caller of Close has asked for the end. Calls in progress, and all later
// calls, return backend.ErrClosed. When Close returns, the driver has no goroutines left. A second call returns nil
// immediately, and does not wait for the first.
func (d *Driver) Close(ctx context.Context) error {
	if !d.gate.Close() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, closeTime)
	defer cancel()
	err := d.closeSessions(ctx)
	d.hangUp()
	_ = d.gate.Wait(context.WithoutCancel(ctx))
	d.lines.Wait()
	return d.callError("close", "", err)
}
