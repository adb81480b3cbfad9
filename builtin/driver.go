package builtin

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"iter"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
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

// Driver is a backend.FencingDriver on the bundled server. Make it with New, Open or Attach. It implements also
// backend.Pinger, Inspector, Pager, Watcher, ForceReleaser, MultiAcquirer and Expirer. All methods are safe for
// concurrent use.
type Driver struct {
	*engine.Driver
	service *service
}

var (
	_ backend.FencingDriver = (*Driver)(nil)
	_ backend.Pinger        = (*Driver)(nil)
	_ backend.Inspector     = (*Driver)(nil)
	_ backend.Pager         = (*Driver)(nil)
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
		d.service.unfit = kit.InvalidOption("list of addresses", "of none", "want host:port of at least one member")
	case slices.Contains(addrs, ""):
		d.service.unfit = kit.InvalidOption("address", `""`, "want host:port")
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
		d.service.unfit = kit.InvalidOption("attach", "nil", "want what connects to a server in this process")
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
	d.service.forming = m.Forming
	switch {
	case m.Connect == nil:
		d.service.unfit = kit.InvalidOption("Connect", "nil", "want what connects to a server in this process")
	case m.Address == "":
		d.service.unfit = kit.InvalidOption("Address", `""`, "want that of the server in this process")
	}
	return d
}

// newDriver is the part that all constructors share. It does no I/O and starts no goroutine.
func newDriver(addrs []string, dial dialer, o *Options) *Driver {
	o = cmp.Or(o, &Options{})
	s := &service{
		dialer: dial, addresses: addrs, clock: cmp.Or(o.Clock, backend.SystemClock()),
		log: cmp.Or(o.Logger, slog.Default()), under: slices.Clone(o.Under), unfit: cmp.Or(checkUnder(o.Under), checkToken(o)),
		wake: notify.New(), changed: make(chan struct{}), sessions: map[string]*session{}, entries: map[key]*entry{},
		moving: map[key]int{},
	}
	s.described.Store(&backend.Description{
		Name: driverName, Capabilities: capabilities | backend.CapFencing,
		Clock: s.clock, Exclusion: backend.ExclusionDurableServer, KeepsHolds: true,
		MinTTL: minTTL, MaxTTL: maxTTL, TTLGranularity: time.Nanosecond,
		Shows: backend.Shows{
			Look:       backend.StateFields{Since: true, ExpiresIn: true, Limit: true, Waiters: true, Queue: true, QueueSince: true},
			List:       backend.StateFields{Since: true, ExpiresIn: true, Limit: true, Waiters: true},
			RetryAfter: true, ChangeTime: true, ChangeAuthor: true,
		},
	})
	s.lineCtx, s.hangUp = context.WithCancel(context.Background())
	return &Driver{Driver: engine.New(s), service: s}
}

// capabilities that every server has.
const capabilities = backend.CapFair | backend.CapShared | backend.CapPermits | backend.CapMultiAcquire |
	backend.CapHierarchy | backend.CapDeadlock | backend.CapMinHold | backend.CapMetadata | backend.CapPushLoss |
	backend.CapInspect | backend.CapList | backend.CapWatch | backend.CapWatchReplay | backend.CapForceRelease

// IssuesFencingTokens promises fencing tokens, as backend.FencingDriver documents, for a durable server. Describe
// omits CapFencing once the server has reported that it is not durable.
func (d *Driver) IssuesFencingTokens() backend.Driver { return d }

// Expire implements backend.Expirer. It ends only a hold that this driver knows: a hold that has moved to another
// client is that client's.
func (d *Driver) Expire(ctx context.Context, g backend.Grant) error {
	return engine.Expire(ctx, d.Driver, g)
}

// ListAfter implements backend.Pager.
func (d *Driver) ListAfter(ctx context.Context, prefix, after string) iter.Seq2[backend.State, error] {
	return engine.ListAfter(ctx, d.Driver, prefix, after)
}
