// A binding of package engine. A request is an ephemeral sequential node on a session; the nodes of a name are its
// queue, and the zxid that created the node of a hold is its token.
//
// driver.go has the options, and service.go what is not about one step. enter.go, leave.go, hold.go and inspect.go are
// the steps. session.go and link.go are sessions and their connections, servers.go examines servers, history.go the
// ensemble's past. node.go and kind.go are the stored form, wire.go and errors.go the protocol.

package zookeeper

import (
	"cmp"
	"context"
	"crypto/tls"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
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

	// Logger receives a warning when the driver makes a new token space because the node of KeyPrefix is missing. Default
	// slog.Default.
	Logger *slog.Logger
}

// Driver is a backend.FencingDriver on a ZooKeeper ensemble, and implements backend.Inspector, Lister, ForceReleaser
// and Pinger. Make it with New or Open. All methods are safe for concurrent use.
type Driver struct {
	*engine.Driver
	service *service
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
	e := &service{
		o: *o, addrs: slices.Clone(addrs), first: rand.IntN(max(len(addrs), 1)), own: zk.WorldACL(zk.PermAll),
		sessions: map[int64]*session{}, dirs: map[string]backend.Instant{},
	}
	e.o.KeyPrefix = cmp.Or(o.KeyPrefix, "/fencelock")
	e.o.Tick = cmp.Or(o.Tick, 2*time.Second)
	e.o.Logger = cmp.Or(o.Logger, slog.Default())
	if o.ACL == nil {
		e.o.ACL = zk.WorldACL(zk.PermAll)
		if o.User != "" {
			e.o.ACL = zk.AuthACL(zk.PermAll)
		}
	}
	e.clock = cmp.Or(o.Clock, backend.SystemClock())
	e.root = strings.TrimSuffix(o.Chroot, "/") + e.o.KeyPrefix
	if e.bad = e.checkOptions(); e.bad != nil {
		e.o.Tick = 2 * time.Second // so that a request is valid, and its call returns e.bad
	}
	return &Driver{engine.New(e), e}
}

// checkOptions returns the fault of the options, or nil. New cannot return an error, so every call returns this one.
func (e *service) checkOptions() error {
	bad := func(what, value, why string) error { return kit.InvalidOption(what, strconv.Quote(value), why) }
	if len(e.addrs) == 0 {
		return bad("addresses", "", "at least one is required")
	}
	for _, addr := range e.addrs {
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
