package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/audit"
	"github.com/fencelock/fencelock/internal/gateway"
	"github.com/fencelock/fencelock/internal/listeners"
	"github.com/fencelock/fencelock/internal/principal"
)

const gatewayHelp = `Usage: fencelock gateway --backend URL [options]

Serves the locks of any lock service over HTTP, for programs in any language. A gateway is stateless: in front of Redis,
Redlock and the bundled server, run as many replicas as you like behind a load balancer. In front of etcd, ZooKeeper and
PostgreSQL one replica serves at a time, and another one refuses to start. docs/HTTP.md documents the API, and so does
the gateway itself, at /docs and /openapi.json.

Options (durations like 500ms, 30s, 5m; addresses are HOST:PORT):

{options}

Each option can also be set in the environment, as FENCELOCK_BACKEND and so on; an empty variable counts as unset, and
FENCELOCK_HTTP_KEY contains the key itself. The command line overrides the environment, and the environment overrides
--config. "fencelock serve" has the same names for the same options.

The gateway prints one line for each listener to standard output; the log goes to standard error. If the lock service
cannot be reached at the start, the gateway is live (/livez) but not ready (/readyz), and tries again.

After INT or TERM and --drain, the gateway answers its waiting requests and exits; locks are not affected. A second
signal ends it immediately. HUP reloads the files of TLS, --rules and --principals; requests also reload them within a
second of a change.

Exit codes:

    0  ended by INT or TERM
   64  the command line is invalid, or the backend does not support the request
   69  the gateway cannot start or continue, or the lock service is not configured for locks
   75  another replica serves, and did not end within --replica-wait
`

const httpListen = "127.0.0.1:7481"

// door are the options of an HTTP server.
type door struct {
	listen    string
	keyFiles  string
	identity  string // a file
	hosts     string
	proxies   string
	accessLog bool
	limits    gateway.Limits
	page      bool

	log     *slog.Logger
	addr    net.Addr                        // where HTTP is served
	gateway atomic.Pointer[gateway.Gateway] // nil until the lock service is connected
}

func (d *door) define(o *options, listen, usage string) {
	o.StringVar(&d.listen, "http-listen", listen, usage)
	o.StringVar(&d.keyFiles, httpKeyOption, "", "a `FILE` with a key of at least 16 bytes that all replicas share, "+
		"so that each of them accepts the lock tokens of the others. Without the file, the key is the value of "+
		variable(httpKeyOption)+", or else random. With NEW,OLD, the gateway encrypts lock tokens with the first key and accepts both; HUP "+
		"reloads the files")
	o.StringVar(&d.identity, httpIdentityOption, "", "a `FILE` with a key of at least 16 bytes from which all "+
		"replicas derive the ids of requests. Keep it when --http-key changes. Without the file, the key is the "+
		"value of "+variable(httpIdentityOption)+", or else --http-key")
	o.StringVar(&d.hosts, httpHostOption, "", "host names `A,B`, without ports, that requests without a client "+
		"certificate may use, such as locks.default.svc; the first label may be *. Addresses, localhost and the "+
		"names of the certificate are always accepted. Other names are refused with 421, as protection against DNS "+
		"rebinding by a page in a browser")
	o.StringVar(&d.proxies, "trusted-proxy", "", "networks `A,B` of proxies, such as 10.0.0.0/8, that send the "+
		"address of the client in X-Forwarded-For; limits per client use that address")
	d.limits.ClientOperations = clientOperations
	o.Func(httpLimitOption, httpLimitUsage(), func(text string) error { return setHTTPLimit(&d.limits, text) })
	o.BoolVar(&d.page, "http-page", true, "serve a read-only page for browsers at / that shows the locks")
	o.BoolVar(&d.accessLog, "access-log", true, "log one line for each HTTP request")
}

// clientOperations is the default of the limit: far above the rate of programs that hold locks, and well below a
// replica's capacity.
const clientOperations = 5000

// httpLimitUsage lists the limits of an HTTP server.
func httpLimitUsage() string {
	lines := []string{"a limit of this replica's HTTP server, as `NAME=VALUE`; may be given several times. A client " +
		"is a certificate, or else an address or an IPv6 /64. NAME is one of"}
	var l gateway.Limits
	for _, x := range l.All() {
		n := x.Default
		if x.Value == &l.ClientOperations {
			n = clientOperations
		}
		lines = append(lines, fmt.Sprintf("%s: %s (default %d)", x.Name, x.About, n))
	}
	return strings.Join(lines, "\n")
}

// maxHTTPLimit bounds each of them.
const maxHTTPLimit = 1 << 30

// setHTTPLimit understands NAME=VALUE.
func setHTTPLimit(l *gateway.Limits, text string) error {
	name, value, ok := strings.Cut(text, "=")
	if !ok {
		return errors.New("want NAME=VALUE")
	}
	for _, x := range l.All() {
		if x.Name != name {
			continue
		}
		n, err := strconv.Atoi(value)
		least := 1
		if x.Default == 0 {
			least = 0
		}
		if err != nil || n < least || n > maxHTTPLimit {
			return fmt.Errorf("%s is between %d and %d", name, least, maxHTTPLimit)
		}
		*x.Value = n
		return nil
	}
	return fmt.Errorf("there is no limit %q", name)
}

// listening are the options of all servers for clients.
type listening struct {
	client            certificates
	clientCA          string
	insecure, verbose bool
	format            string
}

func (l *listening) define(o *options) {
	o.StringVar(&l.client.cert, "tls-cert", "", "a `FILE` in PEM with the server's certificate for clients")
	o.StringVar(&l.client.key, "tls-key", "", "a `FILE` with the key of --tls-cert")
	o.StringVar(&l.clientCA, "tls-client-ca", "", "a `FILE` with the only authority whose client certificates are "+
		"accepted")
	o.BoolVar(&l.insecure, "insecure", false, "allow non-loopback addresses without TLS; anyone who can connect can take "+
		"or break any lock")
	o.StringVar(&l.format, "log-format", "text", logFormatUsage)
	o.BoolVar(&l.verbose, "verbose", false, "log more")
}

// handler writes the log.
func (l *listening) handler() (slog.Handler, error) {
	o := &slog.HandlerOptions{Level: slog.LevelInfo}
	if l.verbose {
		o.Level = slog.LevelDebug
	}
	switch l.format {
	case "text":
		return slog.NewTextHandler(os.Stderr, o), nil
	case "json":
		return slog.NewJSONHandler(os.Stderr, o), nil
	}
	return nil, fmt.Errorf("--log-format %s: want text or json", l.format)
}

// logSources logs the values that are not from the command line.
func logSources(log *slog.Logger, o *options) {
	if len(o.from) > 0 {
		log.Info("settings that are not on the command line", "settings", o.from)
	}
}

// keys are the secrets of an HTTP server.
type keys struct {
	key, identity []byte // nil without keys
	old           [][]byte
}

// keys reads the secrets that the replicas share.
func (d *door) keys() (k keys, err error) {
	first, more, several := strings.Cut(d.keyFiles, ",")
	if k.key, err = sharedKey(httpKeyOption, first, gateway.MinKeyBytes); err != nil {
		return k, err
	}
	if k.identity, err = sharedKey(httpIdentityOption, d.identity, gateway.MinKeyBytes); err != nil || !several {
		return k, err
	}
	if k.identity == nil {
		return k, fmt.Errorf("--%s has several keys: give --%s as well, with the bytes of the key that there was first, so that "+
			"repeats of requests stay the same", httpKeyOption, httpIdentityOption)
	}
	for file := range strings.SplitSeq(more, ",") {
		old, err := sharedKey(httpKeyOption, file, gateway.MinKeyBytes)
		if err != nil {
			return k, err
		}
		k.old = append(k.old, old)
	}
	return k, nil
}

// Reload rereads the keys. Unusable files leave the earlier keys in use. Without --http-identity-key the keys stay:
// the ids of requests would change with them, at a later start.
func (d *door) Reload() {
	g := d.gateway.Load()
	if g == nil || d.keyFiles == "" {
		return
	}
	k, err := d.keys()
	if err == nil && k.identity == nil {
		return
	}
	if err == nil {
		err = g.SetKeys(k.key, k.old...)
	}
	if err != nil {
		d.log.Warn("the new keys of lock tokens are invalid: the previous keys stay in use", "error", err)
		return
	}
	d.log.Info("the keys of lock tokens were reloaded", "keys", 1+len(k.old))
}

// sharedKey reads a key that several servers share, from the file that an option names or else from the option's
// variable; nil if there is neither.
func sharedKey(option, file string, least int) ([]byte, error) {
	what := variable(option)
	key := []byte(os.Getenv(what))
	if file != "" {
		var err error
		if key, err = os.ReadFile(file); err != nil {
			return nil, fmt.Errorf("--%s: %w", option, err)
		}
		what = "--" + option + " " + file
	}
	if key = bytes.TrimSpace(key); len(key) == 0 && file == "" {
		return nil, nil
	}
	if len(key) < least {
		return nil, fmt.Errorf("%s: it has %d bytes; want at least %d", what, len(key), least)
	}
	return key, nil
}

// check refuses names that no Host has, and an address that others reach if the traffic is readable by others.
func (d *door) check(secure bool) error {
	for _, name := range d.names() {
		if name == "" || strings.ContainsAny(name, ":/ ") {
			return fmt.Errorf("--%s %q: want names without ports, separated by commas", httpHostOption, d.hosts)
		}
	}
	if _, err := d.trusted(); err != nil {
		return err
	}
	host, _, err := net.SplitHostPort(d.listen)
	if err != nil {
		return fmt.Errorf("--http-listen: %w", err)
	}
	ip := net.ParseIP(host)
	if secure || host == "localhost" || ip != nil && ip.IsLoopback() {
		return nil
	}
	return fmt.Errorf("--http-listen %s: refusing to serve other machines without TLS; give --tls-cert and "+
		"--tls-key, or --insecure",
		d.listen)
}

// trusted are the networks of --trusted-proxy.
func (d *door) trusted() (all []netip.Prefix, err error) {
	if d.proxies == "" {
		return nil, nil
	}
	for text := range strings.SplitSeq(d.proxies, ",") {
		network, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("--trusted-proxy %s: want networks like 10.0.0.0/8, separated by commas", d.proxies)
		}
		all = append(all, network)
	}
	return all, nil
}

// names are the names of --http-host.
func (d *door) names() []string {
	if d.hosts == "" {
		return nil
	}
	return strings.Split(d.hosts, ",")
}

type gatewaySettings struct {
	backend string
	tier    fencelock.Tier
	door    door
	ops     ops
	audit   auditing
	access  accessFiles
	keys    keys
	listening

	replicaGroup string
	patience     replicaPatience

	log *slog.Logger
	// The following fields are nil until the lock service is connected.
	locks   *fencelock.Client
	replica *soleReplica // nil also where replicas share holds
}

func defineGateway(o *options) func([]string) error {
	s := &gatewaySettings{}
	o.String(configOption, "", configUsage)
	from := o.backend("the lock service, " + localServer + " if none is given")
	tier := o.tier("correctness refuses a backend that cannot fence")
	s.door.define(o, httpListen, "the `ADDRESS` where HTTP is served")
	o.DurationVar(&s.patience.wait, "replica-wait", replicaWait, "in front of etcd, ZooKeeper and PostgreSQL, how long to wait "+
		"at the start for the end of another replica. A replica that was killed counts for another 10s")
	o.StringVar(&s.replicaGroup, "replica-group", "", "the `NAME` of the replicas to which this one belongs. In front of etcd, "+
		"ZooKeeper and PostgreSQL one replica of each group serves; no client may use two groups")
	s.ops.define(o)
	s.audit.define(o)
	s.access.define(o)
	s.listening.define(o)
	return func(args []string) error {
		if len(args) > 0 {
			return fmt.Errorf("%q: gateway takes no arguments", args[0])
		}
		if err := s.read(from, tier); err != nil {
			return err
		}
		logSources(s.log, o)
		if err := s.serve(); err != nil {
			return failed(exitOf(err), err)
		}
		return nil
	}
}

// read reads the files and URLs of the options.
func (s *gatewaySettings) read(from *urlSource, tier func() (fencelock.Tier, error)) (err error) {
	if s.backend, err = from.read(); err != nil {
		return err
	}
	if s.backend == "" {
		s.backend = localServer
	}
	if s.tier, err = tier(); err != nil {
		return err
	}
	if s.keys, err = s.door.keys(); err != nil {
		return err
	}
	handler, err := s.handler()
	if err != nil {
		return err
	}
	s.log = slog.New(handler)
	if err := errors.Join(s.ops.check(), s.audit.check(), s.checkReplica()); err != nil {
		return err
	}
	return s.door.check(s.insecure || s.client != (certificates{}))
}

func (s *gatewaySettings) serve() error {
	certificates, err := s.client.forClients(s.clientCA, s.log)
	if err != nil {
		return fmt.Errorf("%w: %w", backend.ErrInvalidOption, err)
	}
	endAudit, err := s.audit.open(s.log)
	if err != nil {
		return err
	}
	defer endAudit()
	host, err := os.Hostname()
	if err != nil {
		host = s.door.listen
	}
	access, files, err := s.access.open(s.log, isBundled(s.backend), func(event, file, rules string) {
		s.audit.log.Write(audit.Event{
			Server: host, Event: event, Outcome: audit.Done, Principal: string(principal.Process), Name: file, Rules: rules,
		})
	})
	if err != nil {
		return fmt.Errorf("%w: %w", backend.ErrInvalidOption, err)
	}
	signalled, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := s.ops.drained(signalled, s.log, stop)
	defer cancel()
	s.door.log = s.log
	reloadOnHangup(ctx, s.log, append(files, certificates, &s.door)...)
	endOps, err := s.ops.serve(s.log)
	if err != nil {
		return err
	}
	defer endOps()
	s.audit.export(s.ops.metrics)
	admit := func(l net.Listener, trusted []netip.Prefix) net.Listener {
		clients, _ := listeners.Connections(listeners.FileLimit())
		most, share := s.door.limits.Connections, s.door.limits.ClientConnections
		return listeners.NewGate(clients, cmp.Or(share, max(clients/4, 1)), s.log).
			Admit(l, cmp.Or(most, clients), "HTTP clients", trusted...)
	}
	s.log.Info("gateway starts", "version", version(), "backend", backend.RedactURL(s.backend),
		"http-listen", s.door.listen, "ops-listen", s.ops.listen)
	if s.ops.metrics != nil && certificates != nil {
		s.ops.metrics.Certificate("clients", certificates.Certificate)
	}
	o := gateway.Options{
		Grants: func() error {
			if s.replica == nil {
				return nil
			}
			return s.replica.grants()
		},
		Key: s.keys.key, OldKeys: s.keys.old, Identity: s.keys.identity, Access: access, Log: s.log,
		Audit: s.audit.log, AuditAs: host, Draining: s.ops.draining, Service: serviceAt(s.backend),
	}
	held, err := s.door.serve(ctx, o, certificates, admit, s.connect, &s.ops, func() { notify(notifyReady) })
	if s.replica != nil {
		s.replica.release()
	}
	s.log.Info("gateway stopped", "why", stopReason(ctx, err))
	switch {
	case held > 0:
		// Closing the driver would end the holds that it keeps alive. Without Close, another replica takes them over,
		// or they end with their TTL.
		s.log.Info("locks stay with their holders", "locks", held)
	case s.locks != nil:
		closeQuietly(s.locks.Close)
	}
	return err
}

// connect opens the lock service. While the service is unreachable it retries, until ctx ends.
func (s *gatewaySettings) connect(ctx context.Context, failed func(error)) (backend.Driver, error) {
	for pause := connectPause; ; pause = min(2*pause, maxConnectPause) {
		d, err := s.open(ctx, failed)
		if err == nil || ctx.Err() != nil ||
			!errors.Is(err, backend.ErrUnavailable) && !errors.Is(err, backend.ErrUnknown) {
			return d, err
		}
		failed(err)
		if pause == connectPause {
			s.log.Warn("the lock service cannot be reached; trying again", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(pause):
		}
	}
}

// open tries once. It reports to waits that another replica is in the way.
func (s *gatewaySettings) open(ctx context.Context, waits func(error)) (backend.Driver, error) {
	opening, cancel := context.WithTimeout(ctx, attemptTime)
	defer cancel()
	d, err := backend.Open(opening, s.backend)
	switch {
	case err != nil && opening.Err() != nil:
		return nil, fmt.Errorf("open %s: %w: %w", backend.RedactURL(s.backend), backend.ErrUnavailable, err)
	case err != nil:
		return nil, fmt.Errorf("open %s: %w", backend.RedactURL(s.backend), err)
	}
	locks, err := fencelock.New(d, s.tier, &fencelock.Options{Owner: replicaOwner(s.door.addr)})
	if err != nil {
		closeQuietly(d.Close)
		return nil, err
	}
	if !gateway.SharesHolds(d) {
		if s.replica, err = claimReplica(ctx, locks, s.replicaGroup, &s.patience, s.log, waits); err != nil {
			closeQuietly(locks.Close)
			return nil, err
		}
	}
	s.locks = locks
	return d, nil
}

func closeQuietly(end func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), releaseTime)
	defer cancel()
	_ = end(ctx) // it holds no lock
}

// admission bounds the connections of a listener, without a share for connections of trusted proxies.
type admission func(l net.Listener, trusted []netip.Prefix) net.Listener

// serve serves HTTP in front of the driver that connect returns, until ctx ends, and answers the probes of p.
// Until connect returns, the process is live and not ready; connect reports why. serve returns the number of holds that
// the driver keeps alive at the end.
func (d *door) serve(
	ctx context.Context, o gateway.Options, certificates *listeners.TLS, admit admission,
	connect func(ctx context.Context, failed func(error)) (backend.Driver, error),
	p *ops, ready func(),
) (held int, err error) {
	if o.TrustedProxies, err = d.trusted(); err != nil {
		return 0, err
	}
	if o.Key == nil {
		o.Log.Warn("no --http-key: other replicas, and this one after a restart, will reject the lock tokens " +
			"it issues")
	}
	o.Version, o.Hosts, o.AccessLog, o.Limits, o.NoPage = version(), d.names(), d.accessLog, d.limits, !d.page
	scheme := "http"
	if certificates != nil {
		o.Certificate = certificates.Certificate
		scheme = "https"
	}
	if p.metrics != nil {
		o.Observe = p.metrics.Request
	}
	l, err := net.Listen("tcp", d.listen)
	if err != nil {
		return 0, err
	}
	d.addr = l.Addr()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	now, unreached := &answering{}, &reason{err: errors.New("the gateway is still connecting to the lock service")}
	now.set(gateway.Unready(unreached.get))
	p.probes.set(now)
	connected := make(chan struct{})
	var g *gateway.Gateway // set when connected is closed, unless connect failed
	go func() {
		defer close(connected)
		driver, err := connect(ctx, unreached.set)
		if err == nil {
			o.Driver = driver
			g, err = gateway.New(o)
		}
		if err != nil {
			cancel(err)
			return
		}
		d.gateway.Store(g)
		now.set(g.Handler())
		fmt.Printf("fencelock: serving HTTP at %s://%s\n", scheme, l.Addr())
		ready()
	}()
	err = gateway.Serve(ctx, admit(l, o.TrustedProxies), certificates.Config(), o.Log, now, func() {
		<-connected // ctx has ended
		if g != nil {
			g.End()
		}
	})
	cancel(err)
	<-connected
	if g == nil {
		if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
			err = cause
		}
		return 0, err
	}
	bounded, stop := context.WithTimeout(context.Background(), stopTime)
	defer stop()
	return g.Close(bounded), err
}

// reason is the reason why a process is not ready.
type reason struct {
	mu  sync.Mutex // protects the following field
	err error
}

func (r *reason) set(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = err
}

func (r *reason) get() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}
