package redis

// This file is the driver's public face: options, construction, Describe, and the methods that act on one hold. Where
// to read on:
//
//	acquire.go      an Acquire that does not wait; wait.go: one that does; all.go: several names
//	background.go   clean-up of leftovers that no caller waits for
//	internal/lines  a step on its way to the server and back, and which connection it takes
//	push.go         the subscription; waiting.go: the waiters; offer.go: offers to waiters
//	probe.go        whether the server is fit; replicas.go: whether its replicas have a hold
//	list.go         List, ForceRelease; open.go: URLs
//
// The keys and the script are in internal/redisscript/*.lua, and the connections are in internal/rediswire; package
// redlock uses both on several servers. The checks that begin each call, and the errors that end it, are in
// internal/redisconn.
//
// Locks: push.mu and waiting.mu each protect their own struct for a few lines. Neither is held while a server is asked.

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

// driverName is the driver's name in errors and descriptions.
const driverName = "redis"

const (
	// minTTL is where the round trips begin to eat the validity.
	minTTL = 100 * time.Millisecond
	// maxTTL catches mistakes of unit.
	maxTTL = 30 * 24 * time.Hour
)

// Options configure a Driver. The zero value is ready to use. New copies them, so they may be changed afterwards.
type Options struct {
	// KeyPrefix starts every key and channel; all clients of one set of locks use the same. It has no braces. Default
	// "fencelock:".
	KeyPrefix string

	// AllowVolatileEviction accepts a server with a maxmemory limit and a maxmemory-policy of volatile-…, the default
	// of some hosted ones. All keys of locks have a time to live, so a full server evicts held locks, with
	// volatile-ttl before other keys: two holders at the same time, until the first one's next renewal. Monitor
	// evicted_keys.
	AllowVolatileEviction bool

	// Assume is for servers that do not answer INFO, such as proxies, or not to this user: it replaces the answer of
	// INFO, and is not checked. nil: INFO is asked.
	Assume *Server

	// Replicas is the number of replicas that must have a hold before it is granted or renewed: WAIT, after each
	// grant and each renewal, in one more round trip. With fewer, a grant is released and the call fails with a
	// ReplicasError, even with Wait, and a renewal fails. 0: no WAIT. See the package comment for benefit and limits.
	Replicas int

	// ReplicaTimeout bounds the wait for the replicas, at most half of the TTL. Default 500 ms.
	ReplicaTimeout time.Duration

	// ReplicaDisk says that they must have it in their append-only files, on disk: WAITAOF, from Redis 7.2.
	ReplicaDisk bool

	// Clock measures validity. Default backend.SystemClock.
	Clock backend.Clock
}

// Server replaces the answer of INFO, see Options.Assume.
type Server struct {
	// Version is the Redis version, or a version that the server is compatible with, such as "7.0"; at least 6.0.
	Version string

	// Cluster says that names may be on different servers although the client is one of a single server: behind a
	// proxy.
	Cluster bool
}

// Driver is a backend.Driver, Pinger, Inspector, Lister, ForceReleaser and MultiAcquirer on Redis. Make it with New or
// Open. All methods are safe for concurrent use, and return within their contexts. Close it when no client uses it any
// more.
type Driver struct {
	client goredis.UniversalClient
	// Close closes client: Open made it, or fit did.
	own bool
	// The options, with defaults filled in.
	o     Options
	clock backend.Clock
	// identity names this driver's channel and marks its holds and places. It is random, so that no two drivers share
	// one, and new for each driver: a process that starts again is another client.
	identity string
	// How many tries were made.
	nonces atomic.Uint64

	probe redisconn.Probe
	// For one probe.
	patience time.Duration
	// Starts lines.follow, behind Sentinels.
	follow sync.Once

	// A backend.Exclusion, as the last probe has found.
	exclusion atomic.Uint32
	lines     *lines.Lines
	// Names that others want, or did within the last second: their requests go to the script at once.
	wanted  redisconn.Wanted
	push    push
	waiting waiting
	// gate counts calls and background work in, and refuses them after Close.
	gate *kit.Gate
}

var (
	_ backend.Driver        = (*Driver)(nil)
	_ backend.Pinger        = (*Driver)(nil)
	_ backend.Inspector     = (*Driver)(nil)
	_ backend.Lister        = (*Driver)(nil)
	_ backend.ForceReleaser = (*Driver)(nil)
	_ backend.MultiAcquirer = (*Driver)(nil)
	_ backend.Expirer       = (*Driver)(nil)
)

// New returns a driver on client, which may be a *goredis.Client (also from NewFailoverClient), a
// *goredis.ClusterClient, or a type that embeds a *goredis.Client. It does no I/O; problems of the client or the
// server show in Ping or in the first call, as an error that wraps backend.ErrMisconfigured or
// backend.ErrInvalidOption.
//
// Lock commands use the driver's own connections, made from client's options: whatever client's retries and timeouts, a
// lock command is sent once, and never outlives its context. For other commands the driver uses client if that
// has MaxRetries: -1 and ContextTimeoutEnabled: true, and otherwise its own client from a copy of the options, with
// these two changed. The copy of a Sentinel client finds the master through the original, so do not close that client
// before the driver.
//
// Hooks that were added to client with AddHook before New see the lock commands, see the package comment: New adds a
// hook to client for that, which passes all other commands on.
//
// The driver never closes client.
func New(client goredis.UniversalClient, o *Options) *Driver {
	if o == nil {
		o = &Options{}
	}
	fitting, own, unfit := fit(client)
	d := newDriver(fitting, own, unfit, o)
	if unfit == nil {
		d.lines.ShowTo(client)
	}
	return d
}

// newDriver makes the driver on a client; unfit says why the client is unfit, or is nil. A mistake in the options takes
// precedence.
func newDriver(client goredis.UniversalClient, own bool, unfit error, o *Options) *Driver {
	d := &Driver{
		gate: kit.NewGate(), client: client, own: own, o: *o, identity: rand.Text()[:13], patience: probeTime,
	}
	if err := o.check(); err != nil {
		unfit = err
	}
	d.o.KeyPrefix = cmp.Or(o.KeyPrefix, redisconn.DefaultPrefix)
	d.o.ReplicaTimeout = cmp.Or(o.ReplicaTimeout, replicaTime)
	if o.Assume != nil {
		_, cluster := client.(*goredis.ClusterClient)
		d.o.Assume = &Server{Version: o.Assume.Version, Cluster: o.Assume.Cluster || cluster}
	}
	if d.clock = o.Clock; d.clock == nil {
		d.clock = backend.SystemClock()
	}
	d.lines = lines.New(client, d.clock, redisscript.Channel(d.o.KeyPrefix, ""), d.suspect)
	d.probe = redisconn.Probe{Gate: d.gate, Unfit: unfit, Look: d.inspect}
	d.exclusion.Store(uint32(backend.ExclusionVolatileServer))
	d.push.init()
	d.waiting.init()
	return d
}

// check refuses options that cannot be meant, such as ways to confirm without a number of replicas that do.
func (o *Options) check() error {
	switch {
	case strings.ContainsAny(o.KeyPrefix, "{}"):
		return kit.InvalidOption("KeyPrefix", strconv.Quote(o.KeyPrefix), redisconn.NoBraces)
	case o.Replicas < 0 || o.Replicas > maxReplicas:
		return kit.InvalidOption("Replicas", strconv.Itoa(o.Replicas), fmt.Sprint("want 0 to ", maxReplicas))
	case o.ReplicaTimeout < 0:
		return kit.InvalidOption("ReplicaTimeout", o.ReplicaTimeout.String(), "it is negative")
	case o.Replicas == 0 && (o.ReplicaTimeout > 0 || o.ReplicaDisk):
		return kit.InvalidOption("Replicas", "0", "ReplicaTimeout and ReplicaDisk say how replicas confirm")
	case o.Assume == nil:
		return nil
	}
	stated, err := redisconn.ParseVersion(o.Assume.Version)
	if err != nil {
		return kit.InvalidOption("Assume.Version", strconv.Quote(o.Assume.Version), err.Error())
	}
	return o.canWait(stated)
}

// keys returns the keys of a name.
func (d *Driver) keys(name string) redisscript.Keys { return redisscript.KeysOf(d.o.KeyPrefix, name) }

// Describe returns the capabilities of the driver with the current server, without I/O. Exclusion is the result of
// the last probe (see the package comment), and ExclusionVolatileServer before the first probe.
func (d *Driver) Describe() backend.Description {
	capabilities := backend.CapShared | backend.CapPermits | backend.CapMinHold | backend.CapMetadata |
		backend.CapInspect | backend.CapList | backend.CapForceRelease
	if !d.sharded() {
		capabilities |= backend.CapMultiAcquire
	}
	return backend.Description{
		Name:  driverName,
		Clock: d.clock, Exclusion: backend.Exclusion(d.exclusion.Load()),
		Capabilities:   capabilities,
		MinTTL:         minTTL,
		MaxTTL:         maxTTL,
		TTLGranularity: time.Millisecond,
		Shows: backend.Shows{
			Look:       backend.StateFields{ExpiresIn: true, Limit: true, Waiters: true, Queue: true},
			List:       backend.StateFields{ExpiresIn: true, Limit: true, Waiters: true},
			RetryAfter: true,
		},
		NoFencing: "Redis replicates asynchronously and may evict, flush or lose what it stored in a restart, so " +
			"that every counter in it can go back; and its TTLs follow the server's wall clock",
	}
}

// Acquire takes a lock: one round trip for a free name. With Wait the request stays in the name's queue until it is
// granted or ctx ends, and is removed then. The same RequestID gets the same hold again; after that happened through
// two drivers, only a release by one of them, or its expiry, ends the hold. Validity counts from Grant.SentAt.
//
// Errors wrap backend.ErrHeld (with the holder's id and the remaining time of its hold), ErrUnavailable (not sent),
// ErrUnknown (a possible grant could not be released yet), ErrMisconfigured, ErrLimitMismatch, ErrClosed, or ctx's
// error.
func (d *Driver) Acquire(ctx context.Context, r backend.Request) (_ backend.Grant, err error) {
	defer redisconn.Tell(ctx, driverName, "acquire", r.Name, &err)
	if err := d.probe.BeginAcquire(ctx, d.Describe(), r); err != nil {
		return backend.Grant{}, err
	}
	defer d.gate.Leave()
	a := d.attempt(r)
	acquire := a.noWait
	if r.Wait {
		acquire = a.wait
	}
	g, err := acquire(ctx)
	if err == nil {
		err = d.confirmed(ctx, g)
	}
	if err != nil {
		return backend.Grant{}, err
	}
	return g, nil
}

// Renew prolongs grants, and returns a result for each of them, in order: one script call for up to 128 grants, all
// calls in one pipeline (on a cluster, one call per grant and one pipeline per node). It never shortens: a late
// renewal, or a renewal for less than the remaining time, has no effect. A missing hold is a backend.NotHeldError
// with its reason and is never made again; if the server did not answer the hold may live on, and the error wraps
// backend.ErrUnavailable or ErrUnknown. With Options.Replicas, a renewal that too few replicas confirm is a
// ReplicasError.
func (d *Driver) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	if err := d.probe.BeginKnown(ctx); err != nil {
		return redisconn.Unrenewed(ctx, driverName, grants, err)
	}
	answers := make([]backend.Renewal, len(grants))
	defer d.gate.Leave()
	now := d.clock.Now()
	all := make([]*lines.Step, 0, len(grants))
	for _, g := range grants {
		all = append(all, lines.NewStep(codesOf(g.Kind).renew, d.keys(g.Name), redisconn.StartOf(g),
			redisscript.Millis(redisconn.PXOf(g, now))))
	}
	var lost []*backend.NotHeldError // by grant; nil until the first loss
	d.lines.DoAll(ctx, all, func(i int, s *lines.Step, err error) {
		g := grants[i]
		if err == nil { // only then is the step this goroutine's to read
			if n, ok := s.Answer.(int64); ok && n == 1 && g.Incarnation != "" {
				answers[i] = backend.Renewal{SentAt: s.SentAt, TTL: g.TTL}
				return
			}
			if lost == nil {
				lost = make([]*backend.NotHeldError, len(grants))
			}
			lost[i] = &backend.NotHeldError{Name: g.Name, Reason: redisconn.LossReason(g, d.clock.Now())}
			err = lost[i]
		}
		answers[i].Err = redisconn.CallError(ctx, driverName, "renew", g.Name, err)
	})
	if lost != nil {
		d.explain(ctx, grants, lost)
	}
	c := confirmation{d: d}
	for i, g := range grants {
		if answers[i].Err == nil {
			if err := c.of(ctx, g); err != nil {
				answers[i] = backend.Renewal{Err: redisconn.CallError(ctx, driverName, "renew", g.Name, err)}
			}
		}
	}
	return answers
}

// Release ends a hold if it is still the granted one, in one round trip, and offers the lock to the first waiter.
// With a grant that Request.Grant made it removes the hold of that request, or its place in the queue. If there is
// neither, it returns backend.ErrNotHeld without a change.
func (d *Driver) Release(ctx context.Context, g backend.Grant) (err error) {
	defer redisconn.Tell(ctx, driverName, "release", g.Name, &err)
	if g.Kind > backend.KindPermits {
		return fmt.Errorf("%v: %w", g.Kind, backend.ErrUnsupported)
	}
	if err := d.probe.BeginKnown(ctx); err != nil {
		return err
	}
	defer d.gate.Leave()
	keys, start := d.keys(g.Name), redisconn.StartOf(g)
	closed := redisconn.ClosedFor(g.MinHoldUntil, d.clock.Now())
	// An exclusive hold of an uncontended name ends by the short script, which has no effect if a request waits: then
	// the whole script is asked, in a second round trip.
	if start != "" && g.Kind == backend.KindExclusive && closed == "0" && !d.wanted.Has(keys.Lock) {
		answer, _, err := d.lines.Do(ctx, lines.NewStep(redisscript.Free, keys, start))
		if err != nil || answer == int64(1) {
			return err
		}
		d.wanted.Note(keys.Lock)
	}
	code, args := redisscript.Release, []string{start, closed}
	switch {
	case start == "":
		code, args = redisscript.Remove, []string{g.RequestID}
	case g.Kind != backend.KindExclusive:
		code = redisscript.GroupRelease
	}
	ended, err := d.endHold(ctx, lines.NewStep(code, keys, args...))
	switch {
	case ended || err != nil:
		return err
	case start == "":
		return &backend.NotHeldError{Name: g.Name}
	}
	lost := &backend.NotHeldError{Name: g.Name, Reason: redisconn.LossReason(g, d.clock.Now())}
	d.explain(ctx, []backend.Grant{g}, []*backend.NotHeldError{lost})
	return lost
}

// endHold runs a step that ends a hold, and reports whether there was one. If a waiter was offered the lock, it
// monitors the offer.
func (d *Driver) endHold(ctx context.Context, s *lines.Step) (ended bool, err error) {
	keys := s.Keys
	answer, _, err := d.lines.Do(ctx, s)
	if err != nil {
		return false, err
	}
	n, ok := answer.(int64)
	switch {
	case !ok:
		return false, &redisconn.Failure{Cause: redisconn.ErrAnswer, Fatal: true}
	case n == redisscript.Offered:
		d.waiting.follow(d, keys)
	}
	return n > 0, nil
}

// Expire ends a hold as its expiry would, in one round trip: unlike Release it keeps a hold that was granted to
// another driver too, so that one of two gateways cannot end the other's hold. With a minimum hold the name stays
// closed until that is over. A hold that has ended, or was granted to others too, is backend.ErrNotHeld.
func (d *Driver) Expire(ctx context.Context, g backend.Grant) (err error) {
	defer redisconn.Tell(ctx, driverName, "expire", g.Name, &err)
	start := redisconn.StartOf(g)
	if start == "" {
		return &backend.NotHeldError{Name: g.Name}
	}
	if err := d.probe.BeginKnown(ctx); err != nil {
		return err
	}
	defer d.gate.Leave()
	closed := redisconn.ClosedFor(g.MinHoldUntil, d.clock.Now())
	ended, err := d.endHold(ctx, lines.NewStep(redisscript.Expire, d.keys(g.Name), start, closed))
	if err == nil && !ended {
		err = &backend.NotHeldError{Name: g.Name}
	}
	return err
}

// Look returns the holders of a name and the number of waiters, in one round trip, as the server saw them in one
// moment. Since is not known. A free name is a State that is not Held, and no error. Errors wrap
// backend.ErrUnavailable, ErrMisconfigured, ErrClosed, or ctx's error.
func (d *Driver) Look(ctx context.Context, name string) (_ backend.State, err error) {
	defer redisconn.Tell(ctx, driverName, "holder", name, &err)
	if err := backend.ValidateName(name); err != nil {
		return backend.State{}, err
	}
	if err := d.probe.BeginKnown(ctx); err != nil {
		return backend.State{}, err
	}
	defer d.gate.Leave()
	answer, _, err := d.lines.Do(ctx, lines.NewStep(redisscript.Inform, d.keys(name)))
	if err != nil {
		return backend.State{}, err
	}
	state, err := stateOf(name, answer)
	if err == nil && state.Waiters > 0 {
		state.Queue, err = lines.Question(ctx, func(ctx context.Context) ([]backend.Waiter, error) {
			return redisconn.Queue(ctx, d.client, d.keys(name))
		})
	}
	return state, err
}

// stateOf reads the answer to Inform: an exclusive hold, or the shares of a name that is held in shares.
func stateOf(name string, answer any) (backend.State, error) {
	state, ok := redisscript.ParseState(answer)
	if !ok {
		return backend.State{}, &redisconn.Failure{Cause: redisconn.ErrAnswer, Fatal: true}
	}
	info := backend.State{Name: name, Waiters: state.Waiters}
	holds := state.Shares
	if state.Held {
		holds = []redisscript.State{state}
	}
	for _, s := range holds {
		holder, err := redisconn.HolderOf(s)
		if err != nil {
			return backend.State{}, err
		}
		info.Holders = append(info.Holders, holder)
	}
	info.Held = len(info.Holders) > 0
	return info, nil
}

// Close ends waiters with backend.ErrClosed and removes their places in the queues, as far as ctx and the server
// allow. It releases no holds, and closes the client only if Open made it. Close may be called again, and beside other
// calls, which fail with backend.ErrClosed from then on.
//
// The order matters: calls and background work end first, since they need the lines; then the timers, and the
// subscription and the lines side by side. If ctx ends before that, the goroutines end with their connections.
func (d *Driver) Close(ctx context.Context) error {
	first := d.gate.Close()
	err := d.gate.Wait(ctx)
	d.waiting.close()
	if ends := append(d.lines.Close(), d.push.subscription.Close()); err == nil {
		err = redisconn.Await(ctx, ends...)
	}
	if first && d.own {
		err = errors.Join(err, d.client.Close())
	}
	return redisconn.CallError(ctx, driverName, "close", "", err)
}
