package redis

// This file is the driver's public face: options, construction, what it says of itself, and the methods that act on one
// hold. Where to read on:
//
//	acquire.go      an Acquire that does not wait; wait.go: one that does; all.go: several names
//	background.go   what is given back when nobody waits for it any more
//	batch.go        a step on its way to the server and back; lines.go: which connection it takes
//	push.go         the subscription; waiting.go: looking after those who wait; offer.go: after what was offered
//	probe.go        whether the server is fit; replicas.go: whether its replicas have a hold
//	list.go         List, ForceRelease; hooks.go: what hooks of the user's client see; open.go: URLs
//
// Most exported methods come in two parts: the exported one gives an error the words of the contract
// (redisconn.CallError), the other does the work. What the script does to the keys is in internal/redisscript/*.lua,
// and the connections are in internal/rediswire; package redlock uses both on several servers.
//
// Locks: lines.mu, push.mu and waiting.mu each protect their own struct for a few lines, and none of them is held while
// a server is asked.

import (
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
)

// driverName is the driver's name in errors and descriptions.
const driverName = "redis"

// The bounds of a TTL. Below the lower one the round trips eat the validity; the upper one catches mistakes of unit.
const (
	// minTTL is where the round trips begin to eat the validity.
	minTTL = 100 * time.Millisecond
	// maxTTL catches mistakes of unit.
	maxTTL = 30 * 24 * time.Hour
)

// Options configure a Driver. The zero value is ready to use. New copies what it needs, so they may be changed
// afterwards.
type Options struct {
	// KeyPrefix starts every key and channel; all clients of one set of locks use the same. It has no braces. Default
	// "fencelock:".
	KeyPrefix string

	// AllowVolatileEviction accepts a server with a maxmemory limit and a maxmemory-policy of volatile-…, the default
	// of some hosted ones. All keys of locks have a time to live, so a server that is full throws held locks away, with
	// volatile-ttl those first: two holders at once, until the first one's next renewal. Watch evicted_keys.
	AllowVolatileEviction bool

	// Assume is for servers that do not answer INFO, such as proxies, or not to this user: it takes the place of what
	// INFO would say, and nothing of that is checked. nil asks.
	Assume *Server

	// Replicas is how many replicas must have a hold before it is granted or renewed: WAIT, after each grant and each
	// renewal, in one more round trip. With fewer, a grant is given back and refused with a ReplicasError, also to one
	// who would wait, and a renewal has failed. 0 asks none. See the package comment for what this buys.
	Replicas int

	// ReplicaTimeout is how long the replicas may take to say so, at most half of the TTL. Default 500 ms.
	ReplicaTimeout time.Duration

	// ReplicaDisk says that they must have it in their append-only files, on disk: WAITAOF, from Redis 7.2.
	ReplicaDisk bool

	// Clock measures validity. Default backend.SystemClock.
	Clock backend.Clock
}

// Server is what a driver has to know of a server.
type Server struct {
	// Version is that of Redis, or of what it is compatible with, such as "7.0"; at least 6.0.
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
	// What New found wrong. Every call answers it, as New does no I/O and has no error of its own.
	unfit  error
	prefix string
	clock  backend.Clock
	// identity names this driver's channel and marks its holds and places. It is random, so that no two drivers share
	// one, and new for each driver: a process that starts again is another client.
	identity string
	// The last nonce, see Driver.nonce.
	nonces atomic.Int64

	probe redisconn.Probe
	// For one probe.
	patience time.Duration
	// Starts lines.follow, behind Sentinels.
	follow sync.Once

	evictable bool    // Options.AllowVolatileEviction
	assumed   *Server // Options.Assume
	replicas  replicas

	// A backend.Exclusion, as the last probe has found.
	exclusion atomic.Uint32
	batch     *batcher
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
// *goredis.ClusterClient, or a type that embeds a *goredis.Client. It does no I/O; what is wrong with the client or the
// server shows in Ping or in the first call, as an error that wraps backend.ErrMisconfigured or
// backend.ErrInvalidOption.
//
// Lock commands go on connections of the driver's own, made from client's options: whatever client's retries and
// timeouts are, a lock command is sent once, and never outlives its context. For its questions the driver uses client
// if that has MaxRetries: -1 and ContextTimeoutEnabled: true, and otherwise a client of its own from a copy of the
// options, with these two changed. Of a client of Sentinel the copy uses what finds the master, so that client must not
// be closed before the driver.
//
// Hooks that were added to client with AddHook before New see the lock commands, see the package comment: New adds one
// hook of its own for that, which lets everything else pass.
//
// The driver never closes client.
func New(client goredis.UniversalClient, o *Options) *Driver {
	if o == nil {
		o = &Options{}
	}
	fitting, own, unfit := fit(client)
	d := newDriver(fitting, own, unfit, o)
	if unfit == nil {
		d.batch.hooks = newHooks(client)
	}
	return d
}

// newDriver makes the driver on a client that is fit. What is wrong with the options is kept in unfit; the last check
// that finds something wins, as each is enough to refuse every call.
func newDriver(client goredis.UniversalClient, own bool, unfit error, o *Options) *Driver {
	d := &Driver{
		gate: kit.NewGate(), client: client, own: own, unfit: unfit,
		prefix: o.KeyPrefix, clock: o.Clock, identity: rand.Text()[:13], patience: probeTime,
	}
	if d.prefix == "" {
		d.prefix = "fencelock:"
	}
	if d.clock == nil {
		d.clock = backend.SystemClock()
	}
	if strings.ContainsAny(d.prefix, "{}") {
		d.unfit = &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "KeyPrefix", Value: strconv.Quote(d.prefix),
			Why: "braces are the hash tag of a lock's keys",
		}
	}
	d.batch = &batcher{lines: newLines(client, d.clock, redisscript.Channel(d.prefix, ""), d.suspect)}
	d.exclusion.Store(uint32(backend.ExclusionVolatileServer))
	d.evictable = o.AllowVolatileEviction
	d.replicas = replicas{want: o.Replicas, within: o.ReplicaTimeout, disk: o.ReplicaDisk}
	if d.replicas.within == 0 {
		d.replicas.within = replicaTime
	}
	if err := o.checkReplicas(); err != nil {
		d.unfit = err
	}
	if o.Assume != nil {
		d.assume(*o.Assume)
	}
	d.push.init()
	d.waiting.init()
	return d
}

// assume takes s for the server's own word, so that the probe asks nothing of it.
func (d *Driver) assume(s Server) {
	stated, err := redisconn.ParseVersion(s.Version)
	if err == nil && d.unfit == nil {
		d.unfit = d.canWait(stated)
	}
	if err != nil {
		d.unfit = &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "Assume.Version", Value: strconv.Quote(s.Version), Why: err.Error(),
		}
		return
	}
	_, cluster := d.client.(*goredis.ClusterClient)
	s.Cluster = s.Cluster || cluster
	d.assumed = &s
}

// Describe tells what the driver can do with the present server, without asking it. Exclusion is what the last probe
// found (see the package comment), and that of a volatile server before the first one.
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
		NoFencing: "Redis replicates asynchronously and may evict, flush or lose what it stored in a restart, so " +
			"that every counter in it can go back; and its TTLs follow the server's wall clock",
	}
}

// begin starts every call that acquires: it makes sure that the driver is open and its server fit. The call ends with
// end, unless begin fails.
func (d *Driver) begin(ctx context.Context) error { return d.enter(ctx, d.ready) }

// beginKnown starts every other call. The server need only have been fit once.
func (d *Driver) beginKnown(ctx context.Context) error { return d.enter(ctx, d.known) }

// enter counts a call in and waits until ready lets it pass.
func (d *Driver) enter(ctx context.Context, ready func(context.Context) error) error {
	if d.gate.Enter() != nil {
		return backend.ErrClosed
	}
	err := ready(ctx)
	if err != nil {
		d.end()
	}
	return err
}

// end counts a call out. Close waits for that.
func (d *Driver) end() { d.gate.Leave() }

// Acquire takes a lock: one round trip for a free name. With Wait the request stands in the name's queue until it is
// granted or ctx ends, and leaves nothing there. The same RequestID again gets the same hold; once that was so through
// two drivers, only a release by one of them, or its time, ends the hold. Validity counts from Grant.SentAt.
//
// Errors wrap backend.ErrHeld (with the holder's id and the time that its hold has left), ErrUnavailable (nothing was
// sent), ErrUnknown (what the request may have taken could not be given back yet), ErrMisconfigured, ErrLimitMismatch,
// ErrClosed, or ctx's error.
func (d *Driver) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	g, err := d.acquire(ctx, r)
	return g, redisconn.CallError(ctx, driverName, "acquire", r.Name, err)
}

// acquire is Acquire without the words of its error.
func (d *Driver) acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	if err := kit.Validate(d.Describe(), r); err != nil {
		return backend.Grant{}, err
	}
	if err := redisconn.Begin(ctx, r.Wait, d.begin); err != nil {
		return backend.Grant{}, err
	}
	defer d.end()
	c := d.call(r)
	acquire := c.try
	if r.Wait {
		acquire = c.wait
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

// Renew prolongs grants, and answers for each of them, in order: one script call for up to 128 grants, all calls in one
// pipeline (on a cluster, one call a grant and one pipeline a node). It never shortens: a renewal that arrives late, or
// asks for less than the hold has, changes nothing. A hold that is gone is a backend.NotHeldError with its reason and
// is never made again; where the server did not answer the hold may live on, and the error wraps backend.ErrUnavailable
// or ErrUnknown. With Options.Replicas a renewal that too few replicas have is a ReplicasError.
func (d *Driver) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	if err := d.beginKnown(ctx); err != nil {
		return redisconn.Unrenewed(ctx, driverName, grants, err)
	}
	answers := make([]backend.Renewal, len(grants))
	defer d.end()
	now := d.clock.Now()
	all := make([]*step, 0, len(grants))
	for _, g := range grants {
		all = append(all, newStep(codesOf(g.Kind).renew, redisscript.KeysOf(d.prefix, g.Name), redisconn.StartOf(g),
			redisscript.Millis(redisconn.PXOf(g, now))))
	}
	var lost []*backend.NotHeldError // by grant; nil while none is
	d.batch.doAll(ctx, all, func(i int, s *step, err error) {
		g := grants[i]
		if err == nil { // only then is the step this goroutine's to read
			if n, ok := s.answer.(int64); ok && n == 1 && g.Incarnation != "" {
				answers[i] = backend.Renewal{SentAt: s.sentAt, TTL: g.TTL}
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

// Release gives a hold back if it still is the one that was granted, in one round trip, and offers the lock to the
// first waiter. With a grant that Request.Grant made it removes whatever that request has, its hold or its place in the
// queue. What is not held is backend.ErrNotHeld, and nothing is changed.
func (d *Driver) Release(ctx context.Context, g backend.Grant) error {
	return redisconn.CallError(ctx, driverName, "release", g.Name, d.release(ctx, g))
}

// release is Release without the words of its error. An exclusive hold of a name that nobody is known to want ends by
// the short script, which does nothing where somebody waits: then the whole script is asked, in a second round trip.
// Releases by request id, of shares and of minimum holds ask the whole script at once.
func (d *Driver) release(ctx context.Context, g backend.Grant) error {
	if g.Kind > backend.KindPermits {
		return fmt.Errorf("%v: %w", g.Kind, backend.ErrUnsupported)
	}
	if err := d.beginKnown(ctx); err != nil {
		return err
	}
	defer d.end()
	keys, start := redisscript.KeysOf(d.prefix, g.Name), redisconn.StartOf(g)
	closed := redisconn.ClosedFor(g.MinHoldUntil, d.clock.Now())
	if start != "" && g.Kind == backend.KindExclusive && closed == "0" && !d.wanted.Has(keys.Lock) {
		answer, _, err := d.batch.do(ctx, newStep(redisscript.Free, keys, start))
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
	ended, err := d.endHold(ctx, code, keys, args...)
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

// endHold runs a step that ends a hold, and reports whether there was one. If somebody was offered the lock, it sees to
// it that the offer is looked after.
func (d *Driver) endHold(ctx context.Context, code string, keys redisscript.Keys, args ...string) (
	ended bool, err error,
) {
	answer, _, err := d.batch.do(ctx, newStep(code, keys, args...))
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

// Expire ends a hold as its time would, in one round trip: unlike Release it leaves a hold that another driver was
// answered with, so that what one of two gateways gives up does not take it from the other. With a minimum hold the
// name stays closed until that is over. What is not held, or was granted to others too, is backend.ErrNotHeld.
func (d *Driver) Expire(ctx context.Context, g backend.Grant) error {
	return redisconn.CallError(ctx, driverName, "expire", g.Name, d.expire(ctx, g))
}

// expire is Expire without the words of its error.
func (d *Driver) expire(ctx context.Context, g backend.Grant) error {
	start := redisconn.StartOf(g)
	if start == "" {
		return &backend.NotHeldError{Name: g.Name}
	}
	if err := d.beginKnown(ctx); err != nil {
		return err
	}
	defer d.end()
	closed := redisconn.ClosedFor(g.MinHoldUntil, d.clock.Now())
	ended, err := d.endHold(ctx, redisscript.Expire, redisscript.KeysOf(d.prefix, g.Name), start, closed)
	if err == nil && !ended {
		err = &backend.NotHeldError{Name: g.Name}
	}
	return err
}

// Look tells who holds a name and how many wait for it, in one round trip, as the server saw it in one moment. Since is
// not known. A name that nobody holds is a State that is not Held, and no error. Errors wrap backend.ErrUnavailable,
// ErrMisconfigured, ErrClosed, or ctx's error.
func (d *Driver) Look(ctx context.Context, name string) (backend.State, error) {
	state, err := d.holder(ctx, name)
	return state, redisconn.CallError(ctx, driverName, "holder", name, err)
}

// holder is Look without the words of its error.
func (d *Driver) holder(ctx context.Context, name string) (backend.State, error) {
	if err := backend.ValidateName(name); err != nil {
		return backend.State{}, err
	}
	if err := d.beginKnown(ctx); err != nil {
		return backend.State{}, err
	}
	defer d.end()
	answer, _, err := d.batch.do(ctx, newStep(redisscript.Inform, redisscript.KeysOf(d.prefix, name)))
	if err != nil {
		return backend.State{}, err
	}
	return stateOf(name, answer)
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

// Close ends waiters with backend.ErrClosed and gives their places in the queues back, as far as ctx and the server
// allow. It releases no holds, and closes the client only if Open made it. Close may be called again, and beside other
// calls, which fail with backend.ErrClosed from then on.
//
// The order matters: calls and background work end first, since they need the lines; then the timers, the subscription
// and the lines. If ctx ends before that, the goroutines are left to end with their connections.
func (d *Driver) Close(ctx context.Context) error {
	first := d.gate.Close()
	err := d.gate.Wait(ctx)
	d.waiting.close()
	if err == nil {
		err = errors.Join(d.push.close(ctx), d.batch.lines.close(ctx))
	} else { // ctx has ended; the goroutines end with their connections
		_, _ = d.push.close(ctx), d.batch.lines.close(ctx)
	}
	if first && d.own {
		err = errors.Join(err, d.client.Close())
	}
	return redisconn.CallError(ctx, driverName, "close", "", err)
}
