package builtin

// The driver: how it is made, what it consists of, and how it ends. Read Driver's fields first: they are the state that
// all other files work on.
//
// One mutex, Driver.mu, protects all of it: sessions, calls, attempts, holds and the queue of the connection. An answer
// concerns most of them at once, and a lock for each would need an order among five. It is never held while anything is
// sent or waited for, nor while a caller's function runs: holders are told of losses after it is unlocked, by
// unlockAndTell.

import (
	"cmp"
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/bell"
)

const driverName = "builtin"

// The bounds of a TTL until the server has told its own.
const (
	minTTL = 100 * time.Millisecond
	maxTTL = 365 * 24 * time.Hour
)

// Options configure a Driver. Nil and the zero value mean the defaults.
type Options struct {
	// TLS for connections to the servers. Nil: in the clear. If ServerName is empty, the name that is dialled is
	// expected.
	TLS *tls.Config

	// Dial opens connections, to the addresses given to New and to those that servers name. Default TCP.
	Dial func(ctx context.Context, address string) (net.Conn, error)

	// Clock measures validity. Default backend.SystemClock.
	Clock backend.Clock

	// Logger receives warnings about servers that are not fit. Default slog.Default.
	Logger *slog.Logger
}

// Driver is a backend.FencingDriver on the bundled server. Make it with New, Open or Attach. All methods are safe for
// concurrent use.
type Driver struct {
	dialer    dialer
	addresses []string
	clock     backend.Clock
	log       *slog.Logger
	// unfit is why every call is refused, because the constructor was called with what makes no sense; nil if it was
	// not. Constructors return no error, so the first call does.
	unfit error
	// forming reports that nobody can lead yet, so that calls wait; nil: never. It is called without mu.
	forming func() bool

	// described is what Describe tells. It is atomic and not under mu, because the core may call Describe while it
	// holds locks of its own. learn replaces it, and never writes to what is there.
	described atomic.Pointer[backend.Description]

	// gate counts calls in flight, and goroutines that end with ctx.
	gate *kit.Gate
	// ctx ends when Close begins: calls, waiters and the sessions' goroutines end with it.
	ctx context.Context
	// sessions are those that calls join, by TTL. Its mutex may be taken under mu, and mu never under it.
	sessions *kit.Sessions[time.Duration, *session]

	// lineCtx ends when Close has said goodbye: connections outlive ctx, because sessions are ended on them.
	lineCtx context.Context
	hangUp  context.CancelFunc
	// lines counts the goroutines that end with lineCtx: maintain, and greetings.
	lines sync.WaitGroup
	// wake rings when a connection is wanted.
	wake bell.Bell

	mu      sync.Mutex // protects the following fields, and those of sessions, calls and attempts
	running bool       // maintain runs
	// conn is the connection to the leader; nil if there is none.
	conn    *conn
	leader  string   // where to look for the leader first; empty if not known
	members []string // addresses that servers told
	// calls are those that wait for an answer, by number, with or without a connection.
	calls map[uint64]*call
	last  uint64 // number of a call
	// byID are the sessions that may be open in the service, those that are being opened included.
	byID map[string]*session
	// holds are what counts as granted. An entry is a promise to tell its holder of a loss.
	holds   map[key]*hold
	watches map[*watch]struct{}
	// followed are watches by the number of the call that began them on the present connection.
	followed map[uint64]*watch
	// tell are the holders to be told of a loss, in order: see unlockAndTell.
	tell []func()
	past past
}

// key is what one request has of one name.
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
// I/O: what is wrong shows in Ping or in the first call. A server that is not durable grants without tokens, which
// fencelock.ForCorrectness cannot know yet: the first acquire then fails with ErrTier. Open tells at once.
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
// stream that it returns ends with ctx. Options.TLS and Dial do nothing. Close the driver before the server. Package
// embedded does both.
//
//	d := builtin.Attach(func(ctx context.Context) builtin.Stream { return server.Attach(ctx) }, nil)
//
// attach is called each time the driver needs a connection, from any goroutine. nil says that there is none for now.
func Attach(attach func(ctx context.Context) Stream, o *Options) *Driver {
	d := newDriver([]string{"in-process"}, inProcess(attach), o)
	if attach == nil {
		d.unfit = kit.InvalidOption("attach", "nil", "want what connects to a server in this process")
	}
	return d
}

// Member is a server in this process that is one of the members of a cluster.
type Member struct {
	// Connect connects to it, as the function given to Attach does.
	Connect func(ctx context.Context) Stream
	// Address is what it tells clients of itself.
	Address string
	// Forming reports whether it has known no leader yet since it was started. Meanwhile calls wait until their
	// contexts end: with the other members, the cluster is only being started. Nil: never.
	Forming func() bool
}

// AttachMember returns a driver for a cluster of which a member is in this process: it reaches that member without a
// socket, and the others as New does, with Options.TLS and Dial. Package embedded does both. Close the driver before
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

// newDriver is what all constructors share. It does no I/O and starts no goroutine: maintain runs from the first call
// on, so a driver that is made and not used need not be closed.
func newDriver(addrs []string, dial dialer, o *Options) *Driver {
	o = cmp.Or(o, &Options{})
	d := &Driver{
		gate: kit.NewGate(), dialer: dial, addresses: addrs,
		clock: cmp.Or(o.Clock, backend.SystemClock()), log: cmp.Or(o.Logger, slog.Default()),
		wake:  bell.New(),
		calls: map[uint64]*call{}, byID: map[string]*session{},
		holds: map[key]*hold{}, watches: map[*watch]struct{}{}, followed: map[uint64]*watch{},
	}
	d.sessions = kit.NewSessions[time.Duration, *session](d.clock)
	d.described.Store(&backend.Description{
		Name: driverName, Capabilities: capabilities | backend.CapFencing,
		Clock: d.clock, Exclusion: backend.ExclusionDurableServer, KeepsHolds: true,
		MinTTL: minTTL, MaxTTL: maxTTL, TTLGranularity: time.Nanosecond,
	})
	d.ctx = d.gate.Closing()
	d.lineCtx, d.hangUp = context.WithCancel(context.Background())
	return d
}

// capabilities that every server gives.
const capabilities = backend.CapFair | backend.CapShared | backend.CapPermits | backend.CapMultiAcquire |
	backend.CapHierarchy | backend.CapDeadlock | backend.CapMinHold | backend.CapMetadata | backend.CapPushLoss |
	backend.CapInspect | backend.CapList | backend.CapWatch | backend.CapWatchReplay | backend.CapForceRelease

// IssuesFencingTokens promises what backend.FencingDriver says, for a server that is durable. Describe leaves out
// CapFencing once the driver has learnt that its server is not.
func (d *Driver) IssuesFencingTokens() backend.Driver { return d }

// Describe tells what the driver can do with the present service, without asking it. Before the first connection it
// tells wide bounds of the TTL, no token space, and that one durable server serves. What the server is, it tells
// itself: a majority of several members (backend.ExclusionQuorum), one durable server, or one that keeps nothing
// (backend.ExclusionVolatileServer). It may be called at any time, also after Close, and takes no lock. What it tells
// may change with the next connection; the token space does not, because a driver refuses another one.
func (d *Driver) Describe() backend.Description { return *d.described.Load() }

// fences reports whether the server's tokens fence, as far as is known: one that is not durable starts them anew.
func (d *Driver) fences() bool { return d.Describe().Capabilities.Has(backend.CapFencing) }

// begin is what every call does first: it counts the call in. After Close it is backend.ErrClosed; a driver that is
// unfit, or whose cluster has forgotten something, refuses everything but Close. An ended ctx is refused before
// anything is sent, so its error is ctx's alone. After nil the caller has to call gate.Leave.
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

// background runs f, which ends with d.ctx. Close waits for it. After Close has waited, it is not run.
func (d *Driver) background(f func()) { d.gate.Go(func(context.Context) { f() }) }

// incarnation is the server's token in a grant, also where the driver does not fence; zero for Request.Grant.
func incarnation(g *backend.Grant) uint64 {
	token, err := strconv.ParseUint(g.Incarnation, 10, 64)
	if err != nil {
		return 0
	}
	return token
}

// closeTime bounds how long Close tries to end the sessions of a service that does not answer: they end by themselves.
const closeTime = 2 * time.Second

// Close ends waiters with backend.ErrClosed and ends the driver's sessions in the service, and with them whatever is
// left. It takes no longer than two seconds if the service does not answer; the sessions then end with their TTL, and
// the error says so. Close may be called again.
//
// Holders are not told of a loss: the caller of Close has asked for the end. Calls that are under way end with
// backend.ErrClosed, and so do all that come later. When Close returns the driver runs nothing any more. A second call
// returns nil at once, and does not wait for the first.
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
