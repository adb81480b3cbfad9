// Package binding is what one exchange with ZooKeeper does, for package engine.
//
// A request is an ephemeral sequential node, on a session. The nodes of a name are its queue, and the zxid that created
// the node of a hold is its token. The layout is that of package zookeeper, whose clients exclude those of this package.
//
// The package has an own client for the protocol, since a session is a connection here, and a step is some requests that
// are sent together: their order on the connection is what makes a step one exchange.
//
// Three things wait in this package, and not in the engine. A connection pings and reconnects. Follow sets the watch
// of a hold some time after the grant, since most holds end before. An attempt without Wait behind attempts that are
// about to leave waits until they have left.
package binding

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
)

const driverName = "zookeeper"

// Options configure a Driver. They are those of package zookeeper.
type Options struct {
	KeyPrefix      string
	Chroot         string
	Tick           time.Duration
	User, Password string
	ACL            []zk.ACL
	TLS            *tls.Config
	Dial           func(ctx context.Context, network, address string) (net.Conn, error)
	Clock          backend.Clock
	Logger         *slog.Logger

	addrs []string
}

// Driver is a backend.FencingDriver on a ZooKeeper ensemble.
type Driver struct{ *engine.Driver }

var _ backend.FencingDriver = (*Driver)(nil)

// IssuesFencingTokens makes the promise of backend.FencingDriver. It returns d itself.
func (d *Driver) IssuesFencingTokens() backend.Driver { return d }

// service is the engine.Service.
type service struct {
	o       Options // with defaults
	root    string  // chroot included
	own     []zk.ACL
	clock   backend.Clock
	bad     error // of the options
	history history
	quorum  atomic.Bool // several servers vote

	// mu is taken before that of a session.
	mu       sync.Mutex // protects the following fields
	closed   bool
	sessions map[int64]*session
	spare    *session                   // for steps that need no particular session
	dirs     map[string]backend.Instant // the nodes of names that were used, and when last
	limit    int                        // requests of that size are refused; 0: none is known
	broke    int                        // the size of the last request that may have been too long
	breaks   int                        // how often in a row
}

// New returns a driver on the servers at addrs, host:port each. It does no I/O.
func New(addrs []string, o *Options) *Driver {
	e := &service{sessions: map[int64]*session{}, dirs: map[string]backend.Instant{}}
	if o != nil {
		e.o = *o
	}
	e.o.addrs = slices.Clone(addrs)
	e.o.KeyPrefix = cmp.Or(e.o.KeyPrefix, "/fencelock")
	e.o.Tick = cmp.Or(e.o.Tick, 2*time.Second)
	e.o.Clock = cmp.Or(e.o.Clock, backend.SystemClock())
	e.o.Logger = cmp.Or(e.o.Logger, slog.Default())
	e.own = zk.WorldACL(zk.PermAll)
	if e.o.User != "" {
		e.own = zk.AuthACL(zk.PermAll)
	}
	if e.o.ACL == nil {
		e.o.ACL = e.own
	}
	e.clock = e.o.Clock
	e.root = strings.TrimSuffix(e.o.Chroot, "/") + e.o.KeyPrefix
	e.bad = e.checkOptions()
	return &Driver{engine.New(e)}
}

// checkOptions returns the fault of the options, or nil.
func (e *service) checkOptions() error {
	bad := func(what, value, why string) error { return kit.InvalidOption(what, strconv.Quote(value), why) }
	if len(e.o.addrs) == 0 {
		return bad("addresses", "", "at least one is required")
	}
	for _, addr := range e.o.addrs {
		if _, _, err := net.SplitHostPort(addr); err != nil {
			return bad("address", addr, "it is not host:port")
		}
	}
	if why := notPath(e.o.KeyPrefix); why != "" {
		return bad("prefix", e.o.KeyPrefix, why)
	}
	if e.o.Chroot != "" && e.o.Chroot != "/" {
		if why := notPath(e.o.Chroot); why != "" {
			return bad("chroot", e.o.Chroot, why)
		}
	}
	if strings.HasPrefix(e.root+"/", "/zookeeper/") {
		return bad("prefix", e.root, "/zookeeper belongs to the servers")
	}
	if strings.Contains(e.o.User, ":") || e.o.User == "" && e.o.Password != "" {
		return bad("user", e.o.User, "a user of the digest scheme has a name without a colon")
	}
	if e.o.Tick < time.Millisecond || e.o.Tick > time.Minute || e.o.Tick%time.Millisecond != 0 {
		return bad("tick", e.o.Tick.String(), "it is not between 1 ms and 1 min, in whole milliseconds")
	}
	return nil
}

// notPath tells why a prefix or a chroot is not the path of a node in which locks may lie, or returns "". It is called
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

// Unfit is engine.Checked's.
func (e *service) Unfit() error { return e.bad }

// Prompt is engine.Prompt's: all steps wait by engine.Await.
func (e *service) Prompt() {}

// Patient is engine.Patient's: a connection that does not answer is replaced.
func (e *service) Patient() {}

// Describe is engine.Service's. TokenSpace is empty and Exclusion is that of one durable server until the ensemble is
// known. MinTTL is the servers' minimum, or, for very short ticks, enough to leave a little time to hold the lock.
// Margin is one tick, by which a hold ends before its session may: see Prove.
func (e *service) Describe() backend.Description {
	exclusion := backend.ExclusionDurableServer
	if e.quorum.Load() {
		exclusion = backend.ExclusionQuorum
	}
	return backend.Description{
		Name: driverName, Clock: e.clock, Exclusion: exclusion, KeepsHolds: true,
		Capabilities: backend.CapFencing | backend.CapFair | backend.CapMetadata | backend.CapPushLoss |
			backend.CapInspect | backend.CapList | backend.CapForceRelease | backend.CapShared | backend.CapPermits,
		MinTTL: max(2*e.o.Tick, e.o.Tick+200*time.Millisecond), MaxTTL: 20 * e.o.Tick, TTLGranularity: time.Millisecond,
		Margin: e.o.Tick, TokenSpace: e.history.learn(""),
		Shows: backend.Shows{
			Look: backend.StateFields{Since: true, Limit: true, Waiters: true, Queue: true, QueueSince: true},
			List: backend.StateFields{Since: true, Limit: true, Waiters: true},
		},
	}
}

// all returns the living sessions.
func (e *service) all() []*session {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := slices.Collect(maps.Values(e.sessions))
	if e.spare != nil {
		all = append(all, e.spare)
	}
	return all
}

// Close is engine.Service's. The engine has ended the sessions but the spare one.
func (e *service) Close(ctx context.Context) error {
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()
	var errs []error
	for _, s := range e.all() {
		errs = append(errs, e.End(ctx, s))
	}
	return errors.Join(errs...)
}

// brokeUnder notes that a server has closed a connection with a long request on it. Servers do that with requests above
// jute.maxbuffer, without an answer; a few times in a row, with the same request, that is the reason.
func (e *service) brokeUnder(size int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.broke != size {
		e.broke, e.breaks = size, 0
	}
	if e.breaks++; e.breaks >= maxBreaks {
		e.limit = size
	}
}

// answered notes the answer to a long request.
func (e *service) answered(size int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if size >= e.broke {
		e.broke, e.breaks = 0, 0
	}
	if size >= e.limit {
		e.limit = 0
	}
}

// tooLong refuses a request that servers would close the connection for.
func (e *service) tooLong(size int) error {
	if size += 4 + 8; size < suspectBytes {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.limit == 0 || size < e.limit {
		return nil
	}
	return &backend.ConfigError{
		Setting: "jute.maxbuffer", Value: fmt.Sprintf("less than %d bytes", e.limit),
		Want: fmt.Sprintf("more than %d bytes", size),
		Why:  "the servers close the connection for a longer request: shorten the metadata of the hold, or raise it",
	}
}
