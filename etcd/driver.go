package etcd

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"unicode"
	"unicode/utf8"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
)

// driverName begins every error of this driver, and is Description.Name.
const driverName = "etcd"

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

// Driver is a backend.FencingDriver on an etcd cluster, and implements backend.Inspector, Lister, Watcher,
// ForceReleaser, MultiAcquirer and Pinger. Make it with New or Open; the zero value is not usable. All methods are safe
// for concurrent use, return within 50 ms of the end of their context, and wrap backend.ErrClosed after Close.
type Driver struct {
	*engine.Driver
	service *service
}

// New returns a driver on client, with o or, if that is nil, the defaults. It does no I/O and never fails: Ping and
// every other call return the error of an unfit server, client or option. The driver uses client.KV,
// client.Lease and client.Watcher, so a client whose KV and Watcher are wrapped by etcd's namespace package works. It
// never closes client, and several drivers may share one.
//
// A client that is passed to New keeps its connections: Open's handling of servers that do not answer, or check a
// password slowly, does not apply to it. See the package comment for the settings.
func New(client *clientv3.Client, o *Options) *Driver { return driverOn(client, o, nil) }

// driverOn returns a driver on a client that Open made, with its connections, or on a caller's client, with nil.
func driverOn(client *clientv3.Client, o *Options, conns *connections) *Driver {
	if o == nil {
		o = &Options{}
	}
	e := &service{
		client: client, prefix: cmp.Or(o.KeyPrefix, "fencelock/"), clock: cmp.Or(o.Clock, backend.SystemClock()),
		log: cmp.Or(o.Logger, slog.Default()), conns: conns, station: rand.Int64N(stations),
	}
	if client == nil || client.KV == nil || client.Lease == nil || client.Watcher == nil ||
		client.ActiveConnection() == nil {
		e.unfit = &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "etcd client", Value: "nil", Why: "make it with clientv3.New",
		}
	} else if why := badPrefix(e.prefix); why != "" {
		e.unfit = &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "KeyPrefix", Value: fmt.Sprintf("%.80q", e.prefix), Why: why,
		}
	}
	if conns != nil {
		e.members = newMembers(client)
	}
	e.life, e.end = context.WithCancel(context.Background())
	e.most.Store(maxOps)
	e.batch = engine.NewBatch(maxTogether, e.send)
	return &Driver{Driver: engine.New(e), service: e}
}

// badPrefix returns the reason why a prefix could overlap another one, or "". The driver's own keys begin with "+"
// after the prefix, and no part of a prefix does. So the keys of the prefix "a/" and the keys of "a/b/" never meet,
// although one prefix is the beginning of the other. Nested prefixes cannot be forbidden: a client does not know which
// prefixes exist.
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

// Key returns the key in etcd that a hold stands on, without I/O, and "" for a grant without an incarnation, which
// names no hold. Later holds of the name may stand on the same key, with greater create revisions: so compare the
// revision too, as OwnerCmp does.
func (d *Driver) Key(g backend.Grant) string {
	key, revision := d.service.keyOf(g.Name, usedBy(g), g.Incarnation)
	if revision == 0 {
		return ""
	}
	return key
}

// OwnerCmp returns the comparison that is true while g is held: in the caller's own transaction it makes etcd itself
// the guard. It does no I/O, stays right when a renewal moves the hold, and may be used repeatedly.
//
//	grant := lease.Grant()
//	client.Txn(ctx).If(driver.OwnerCmp(grant)).Then(clientv3.OpPut("config", "new")).Commit()
//
// For the zero Grant and others that this driver did not issue, it is never true. Under a shared hold or permits others
// hold beside g, and may write too.
func (d *Driver) OwnerCmp(g backend.Grant) clientv3.Cmp {
	if key, revision := d.service.keyOf(g.Name, usedBy(g), g.Incarnation); revision > 0 {
		return created(key, revision)
	}
	return created(d.service.spaceKey(), -1)
}
