package etcd

import (
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

const driverName = "etcd"

// The bounds of a TTL. etcd counts leases in whole seconds, and raises a TTL to one and a half election timeouts (2 s
// by default); the grant tells what it gave. The upper bound catches mistakes of unit.
const (
	minTTL = time.Second
	maxTTL = 30 * 24 * time.Hour
)

// Options configure a Driver. Nil and the zero value mean the defaults.
type Options struct {
	// KeyPrefix starts every key. All clients of one set of locks use the same; those with different ones never meet,
	// also where one prefix is the beginning of the other. Default "fencelock/". It ends with "/", none of the parts
	// between its slashes begins with "+", and it has at most 512 bytes of UTF-8 without control characters. With
	// another one every call answers an error that wraps backend.ErrInvalidOption.
	KeyPrefix string

	// Clock measures validity. Default backend.SystemClock.
	Clock backend.Clock

	// Logger receives warnings about servers with known lease defects. Default slog.Default.
	Logger *slog.Logger
}

// Driver is a backend.FencingDriver on an etcd cluster. Make it with New or Open. All methods are safe for concurrent
// use.
type Driver struct {
	client *clientv3.Client
	unfit  error        // what New found wrong; every call answers it
	conns  *connections // of a client that Open made, which Close closes; nil with any other
	prefix string
	clock  backend.Clock
	log    *slog.Logger

	history  history
	single   atomic.Bool  // the cluster has one member
	checked  atomic.Bool  // its servers were asked for their versions
	troubled atomic.Int64 // an Instant: until then requests ask for a leader, see request
	halvings atomic.Int32 // of opsPerTxn, see inParts

	departures departures

	gate     *kit.Gate                      // calls in flight and background work
	ctx      context.Context                // ends with Close
	sessions *kit.Sessions[int64, *session] // by seconds asked for; those that were outgrown are replaced

	mu       sync.Mutex        // protects the following fields
	places   map[string]*place // by key
	requests map[string]string // the keys of requests that have a place
	station  int64             // see freeKeyLocked
}

// hold is a key of ours that counts as granted.
type hold struct {
	session  *session
	revision int64 // create revision: the token
	lost     func(backend.Reason)
	until    atomic.Int64 // an Instant: nobody was promised more
	adopted  bool         // not known to stand
}

var (
	_ backend.FencingDriver = (*Driver)(nil)
	_ backend.Pinger        = (*Driver)(nil)
	_ backend.Inspector     = (*Driver)(nil)
	_ backend.Lister        = (*Driver)(nil)
	_ backend.Watcher       = (*Driver)(nil)
	_ backend.ForceReleaser = (*Driver)(nil)
	_ backend.MultiAcquirer = (*Driver)(nil)
)

// New returns a driver on client. It does no I/O; what is wrong with the server, with client or o, shows in Ping or in
// the first call. The driver uses client.KV, client.Lease and client.Watcher, so a client whose KV and Watcher are
// wrapped by etcd's namespace package works. It never closes client.
func New(client *clientv3.Client, o *Options) *Driver {
	if o == nil {
		o = &Options{}
	}
	d := &Driver{
		gate: kit.NewGate(), client: client, prefix: o.KeyPrefix, clock: o.Clock, log: o.Logger,
		places: map[string]*place{}, requests: map[string]string{},
		station: randomStation(0), departures: departures{most: mostTogether},
	}
	if d.prefix == "" {
		d.prefix = "fencelock/"
	}
	if d.clock == nil {
		d.clock = backend.SystemClock()
	}
	d.sessions = kit.NewSessions[int64, *session](d.clock)
	if d.log == nil {
		d.log = slog.Default()
	}
	if client == nil || client.KV == nil || client.Lease == nil || client.Watcher == nil || client.ActiveConnection() == nil {
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

// badPrefix says why a prefix could reach into another one, or "".
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

// IssuesFencingTokens promises what backend.FencingDriver says, under the conditions in the package comment.
func (d *Driver) IssuesFencingTokens() backend.Driver { return d }

// Describe says what the driver can do. Its token space, and whether the cluster has one member only, are known after
// the first call.
func (d *Driver) Describe() backend.Description {
	exclusion := backend.ExclusionQuorum
	if d.single.Load() {
		exclusion = backend.ExclusionDurableServer
	}
	return backend.Description{
		Name:  driverName,
		Clock: d.clock, Exclusion: exclusion, KeepsHolds: true,
		Capabilities: backend.CapFencing | backend.CapFair | backend.CapMetadata | backend.CapInspect | backend.CapList |
			backend.CapWatch | backend.CapWatchReplay | backend.CapForceRelease | backend.CapShared | backend.CapPermits |
			backend.CapMultiAcquire,
		MinTTL: minTTL, MaxTTL: maxTTL, TTLGranularity: time.Second,
		TokenSpace: d.history.tokenSpace().name,
	}
}

// enter counts a call or a piece of background work in; it is refused after Close.
func (d *Driver) enter() error {
	if d.unfit != nil && d.ctx.Err() == nil {
		return d.unfit
	}
	return d.gate.Enter()
}

// begin is what every call does first: it is counted in, and the server is known.
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
func (d *Driver) beginBound(ctx context.Context) (bound context.Context, leave func(), err error) {
	if err := d.begin(ctx); err != nil {
		return nil, nil, err
	}
	bound, free := d.gate.Bind(ctx)
	return bound, func() { free(); d.gate.Leave() }, nil
}

// addHold notes that the key of a request is ours. The session ends it when it ends itself.
func (d *Driver) addHold(key, requestID string, h *hold) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.callLocked(key, requestID)
	p := d.places[key]
	p.calls--
	if p.hold != nil {
		p.hold.session.Leave(1)
	}
	p.hold = h
}

// moveHold notes that the hold of a key stands on s now, which has a user more for it. If the hold was given back
// meanwhile, old is not the one of the key any more, and that user leaves.
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

// hold returns the hold of key if it is the one that g names, or nil.
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

// dropHold forgets a hold, whose session it then no longer needs.
func (d *Driver) dropHold(key string, h *hold) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if p := d.places[key]; h != nil && p != nil && p.hold == h {
		p.hold = nil
		h.session.Leave(1)
		d.tidyLocked(key)
	}
}

// incarnation is the create revision in a grant; 0 for Request.Grant.
func incarnation(g backend.Grant) int64 {
	text, _, _ := strings.Cut(g.Incarnation, "@")
	revision, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0
	}
	return revision
}

// Close ends waiters with backend.ErrClosed and revokes the driver's leases, which removes whatever keys are left. It
// closes the client only if Open made it. Close may be called again.
func (d *Driver) Close(ctx context.Context) error {
	first := d.gate.Close()
	err := d.gate.Wait(ctx)
	if !first {
		return d.callError("close", "", err)
	}
	d.dropHolds()
	for _, s := range d.sessions.Live() {
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
