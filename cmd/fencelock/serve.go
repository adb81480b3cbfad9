package main

import (
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
	"sync/atomic"
	"syscall"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/internal/audit"
	"github.com/fencelock/fencelock/internal/gateway"
	"github.com/fencelock/fencelock/internal/listeners"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/principal"
	"github.com/fencelock/fencelock/internal/rules"
	"github.com/fencelock/fencelock/internal/server"
	"github.com/fencelock/fencelock/internal/server/replica"
	"github.com/fencelock/fencelock/internal/tlsfiles"
)

const serveHelp = `Usage: fencelock serve [options]

Runs a lock server. Without options, it is a single member with its data in ./fencelock-data, and only clients on this
machine can connect, to fencelock://127.0.0.1:7480.

Options (durations like 500ms, 30s, 5m; addresses are HOST:PORT):

{options}

Each option can also be set in the environment, as FENCELOCK_DATA_DIR and so on; an empty variable counts as unset, and
FENCELOCK_JOIN_KEY and FENCELOCK_HTTP_KEY contain the key itself. The command line overrides the environment, and the
environment overrides --config.

To run three members on the machines a, b and c, run on a:

  fencelock serve --listen a:7480 --peer-listen a:7482 --join a:7482,b:7482,c:7482 --bootstrap-expect 3 --tls-cert …

Serve prints one line for each listener to standard output; the log goes to standard error.

After INT or TERM and --drain, the server hands leadership to another member, closes its connections and exits; locks
are not affected. A second signal ends it immediately, which loses no data either. HUP reloads the files of TLS and
--principals; new connections also reload them within a second of a change.

Exit codes:

    0  ended by INT or TERM
   64  the command line is invalid
   69  the server cannot start or continue
`

// limitUsage lists the limits.
func limitUsage() string {
	defaults := machine.DefaultLimits()
	lines := []string{"a limit of the cluster, as `NAME=VALUE`; may be given several times. The leader's limits " +
		"apply, so give all members the same. NAME is one of"}
	for _, l := range defaults.All() {
		lines = append(lines, fmt.Sprintf("%s: %s (default %d)", l.Name, limitsAre[l.Name], *l.Value))
	}
	return strings.Join(lines, "\n")
}

// limitsAre has the description of each limit.
var limitsAre = map[string]string{
	"sessions":         "open sessions",
	"holds":            "holds of all sessions",
	"waits":            "waiters of all sessions",
	"waiters-per-name": "waiters in one queue",
	"unacked":          "replies that one session has not acknowledged",
	"requests":         "names in one acquire",
	"name-bytes":       "bytes of a name; at most 512",
	"levels":           "levels of a hierarchical name",
	"metadata-bytes":   "bytes of the metadata of one request",
	"client-share":     "the percentage of sessions, holds, waits and connections that one client may have",
	"deadlock-steps":   "names, holders and waiters that one search for a deadlock visits",
}

// setLimit understands NAME=VALUE.
func setLimit(all *machine.Limits, text string) error {
	name, value, ok := strings.Cut(text, "=")
	if !ok {
		return errors.New("want NAME=VALUE")
	}
	for _, l := range all.All() {
		if l.Name != name {
			continue
		}
		n, err := strconv.Atoi(value)
		if err != nil || n < 1 || n > l.Most {
			return fmt.Errorf("%s is between 1 and %d", name, l.Most)
		}
		*l.Value = n
		return nil
	}
	return fmt.Errorf("there is no limit %q", name)
}

// serveSettings are the command line of "fencelock serve".
type serveSettings struct {
	config  server.Config
	dev     bool
	join    string
	joinKey string
	rules   string
	proofs  string                             // a file
	tokens  *tlsfiles.Files[*principal.Proofs] // nil without the file
	running atomic.Pointer[server.Server]      // nil until it has started
	peer    certificates
	peerCA  string
	adminCA string
	cluster clusterClient
	tls     *listeners.TLS // for clients
	peerTLS *listeners.TLS
	admins  *listeners.TLS // for operators over TCP
	door    door           // absent if its listen is empty
	ops     ops
	audit   auditing
	keys    keys
	listening
}

// logStoreOption selects the format of the log.
const (
	logStoreOption = "log-store"
	logStoreUsage  = "the storage of the log: `KIND` is wal or bolt. It cannot be changed later"
)

func defineServe(o *options) func([]string) error {
	s := newServe(o)
	return func(args []string) error {
		if err := s.read(o, args); err != nil {
			return err
		}
		logSources(s.config.Log, o)
		steadyHeap()
		return s.serve()
	}
}

// newServe returns settings that the options fill.
func newServe(o *options) *serveSettings {
	s := &serveSettings{}
	c := &s.config
	o.String(configOption, "", configUsage)
	o.BoolVar(&s.dev, "dev", false, "keep all data in memory, for development. Its tokens cannot fence, and the "+
		"correctness tier refuses it")
	o.dataDir(&c.DataDir, "the `DIRECTORY` for the data")
	o.BoolVar(&c.Moved, "moved", false, "start with a directory that is a copy. Give it once, and never start the "+
		"server of the original directory again")
	o.StringVar((*string)(&c.Store), logStoreOption, string(replica.StoreWAL), logStoreUsage)
	o.StringVar(&c.Listen, "listen", "127.0.0.1:7480", "the `ADDRESS` for clients")
	o.StringVar(&c.Advertise, "advertise", "", "the `ADDRESS` to announce to clients, if it differs from --listen")
	s.door.define(o, "", "the `ADDRESS` for clients over HTTP, such as 127.0.0.1:7481, with the same certificates as "+
		"--listen; see fencelock help gateway")
	s.ops.define(o)
	s.audit.define(o)
	o.StringVar(&c.AdminListen, "admin-listen", "", "the `ADDRESS` for changes and backups of the cluster: "+
		"unix:PATH, a socket for the user of this process and root; HOST:PORT, with --tls-cert and "+
		"--admin-client-ca; or none. The default is unix:admin.sock in --data-dir")
	o.StringVar(&s.adminCA, "admin-client-ca", "", "a `FILE` with the authority of the operators' certificates; any "+
		"client with such a certificate may change the cluster")
	o.StringVar(&c.PeerListen, "peer-listen", "127.0.0.1:7482", "the `ADDRESS` for the other members")
	o.StringVar(&c.PeerAdvertise, "peer-advertise", "", "the `ADDRESS` to announce to the other members, if it "+
		"differs from --peer-listen")
	o.StringVar(&s.join, joinOption, "", "the peer addresses `A,B,C` of the members of the cluster; they may include "+
		"this member")
	o.StringVar(&s.joinKey, joinKeyOption, "", "a `FILE` with a key of at least 16 bytes that all members share: a "+
		"server with this key is approved as a member. Without the file, the key is the value of "+
		variable(joinKeyOption)+". Without a key, a new member, or a member that has lost its data, gets no vote "+
		"until \"fencelock member add\" approves it")
	o.IntVar(&c.BootstrapExpect, "bootstrap-expect", 0, "form a new cluster once all `N` members of --join are up, "+
		"including this one, or join the cluster if it exists. Give all members the same --join")
	o.DurationVar(&c.MinTTL, "min-ttl", server.DefaultMinTTL, "the shortest TTL that clients may request. The "+
		"default outlasts the election of a leader")
	o.DurationVar(&c.MaxTTL, "max-ttl", 0, "the longest TTL that clients may request; a restored cluster refuses "+
		"clients for this time. The default is 1h, or 24h in a cluster created by a version before 0.1")
	o.DurationVar(&c.Timing.Heartbeat, "heartbeat-timeout", 0, "the time without contact to the leader after which a "+
		"member stands for election: 10ms to 10s, default 500ms. Give all members the same values of this and the "+
		"next three options. --min-ttl must outlast an election, which takes up to twice the sum of this and "+
		"--election-timeout")
	o.DurationVar(&c.Timing.Election, "election-timeout", 0, "the time that a candidate waits for votes before it "+
		"tries again: from --heartbeat-timeout, the default, to 10s")
	o.DurationVar(&c.Timing.Lease, "leader-lease", 0, "the time without contact to a majority after which a leader "+
		"steps down: from 5ms to --heartbeat-timeout, the default")
	o.DurationVar(&c.Timing.Commit, "commit-timeout", 0, "the maximum time until followers learn of a commit: 1ms to "+
		"--heartbeat-timeout, default 50ms")
	o.StringVar(&s.rules, rulesOption, "", "a `FILE` with the access rules of a new cluster, see docs/SECURITY.md. A "+
		"cluster that already has rules keeps them: see fencelock help rules. Give all members the same")
	o.StringVar(&s.proofs, principalsOption, "", "a `FILE` that maps the tokens of clients to principals. Clients "+
		"can send a token instead of, or in addition to, a certificate. It needs --tls-cert, and is reloaded when it "+
		"changes")
	o.Func(limitOption, limitUsage(), func(text string) error { return setLimit(&c.Limits, text) })
	s.cluster.define(o)
	s.peer.definePeer(o, &s.peerCA)
	s.listening.define(o)
	return s
}

// read checks the options, and reads their files.
func (s *serveSettings) read(o *options, args []string) (err error) {
	c := &s.config
	switch {
	case len(args) > 0:
		return fmt.Errorf("%q: serve takes no arguments", args[0])
	case s.dev && (o.given("data-dir") || o.given(logStoreOption) || o.given("moved")):
		return errors.New("--dev keeps all data in memory: it excludes --data-dir, --moved and --log-store")
	case c.DataDir == "":
		return errors.New("--data-dir is empty; to keep all data in memory, give --dev")
	}
	if s.dev {
		c.DataDir = ""
	}
	if s.dev && s.join == "" && !o.given("peer-listen") {
		c.PeerListen = ""
	}
	if c.JoinKey, err = sharedKey(joinKeyOption, s.joinKey, server.MinJoinKey); err != nil {
		return err
	}
	if s.rules != "" {
		if _, err = parsed("--rules", s.rules, func(text []byte) (*rules.Rules, error) {
			c.Rules = string(text)
			return rules.Parse(text)
		}); err != nil {
			return err
		}
	}
	if s.join != "" {
		c.Join = strings.Split(s.join, ",")
	}
	c.Insecure, c.Version = s.insecure, version()
	handler, err := s.handler()
	if err != nil {
		return err
	}
	c.Log = slog.New(handler)
	if s.tls, err = s.client.forClients(s.clientCA, c.Log); err != nil {
		return err
	}
	if s.peerTLS, err = s.peer.forPeers(s.peerCA, c.Log); err != nil {
		return err
	}
	if s.adminCA != "" {
		if s.admins, err = s.client.load("--tls-cert", "--tls-key", "--admin-client-ca", s.adminCA, c.Log); err != nil {
			return err
		}
	}
	if s.proofs != "" {
		if s.tls == nil {
			return errors.New("--" + principalsOption + " needs --tls-cert, since tokens must not be sent unencrypted")
		}
		if s.tokens, err = reread("--"+principalsOption, s.proofs, principal.ParseProofs, c.Log, s.changedProofs); err != nil {
			return err
		}
		c.Proofs = s.tokens.Current
	}
	c.TLS, c.PeerTLS, c.AdminTLS = s.tls.Config(), s.peerTLS.Config(), s.admins.Config()
	if err = s.ops.check(); err != nil {
		return err
	}
	if err = s.audit.check(); err != nil {
		return err
	}
	if s.door.listen != "" {
		s.door.log = c.Log
		if s.keys, err = s.door.keys(); err != nil {
			return err
		}
		if err = s.door.check(c.Insecure || c.TLS != nil); err != nil {
			return err
		}
		return s.prepareClient()
	}
	return nil
}

// stopTime bounds the graceful end: the hand-over of the leadership.
const stopTime = 10 * time.Second

func (s *serveSettings) serve() error {
	if s.config.Insecure {
		s.config.Log.Warn("insecure: without TLS, anyone who can connect can take or break any lock")
	}
	if s.config.BootstrapExpect == 2 {
		s.config.Log.Warn("a cluster of two members cannot tolerate the loss of either: use one member, or three")
	}
	signalled, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := s.ops.drained(signalled, s.config.Log, stop)
	defer cancel()
	files := []reloader{s.tls, s.peerTLS, s.cluster.tls, s.admins, &s.door}
	if s.tokens != nil {
		files = append(files, s.tokens)
	}
	reloadOnHangup(ctx, s.config.Log, files...)
	endOps, err := s.ops.serve(s.config.Log)
	if err != nil {
		return failed(exitUnavailable, err)
	}
	defer endOps()
	endAudit, err := s.audit.open(s.config.Log)
	if err != nil {
		return failed(exitUnavailable, err)
	}
	defer endAudit()
	s.config.Audit = s.audit.log
	s.exportMetrics()
	s.config.Log.Info("server starts", "version", version(), "data-dir", s.config.DataDir, "listen", s.config.Listen,
		"peer-listen", s.config.PeerListen, "http-listen", s.door.listen, "ops-listen", s.ops.listen,
		"admin-listen", s.config.AdminListen)
	srv, err := server.Start(signalled, s.config)
	var mistake *replica.ConfigError
	switch {
	case errors.As(err, &mistake):
		return err
	case err != nil:
		return failed(exitUnavailable, err)
	}
	if s.dev {
		say("this server keeps all data in memory: for development only")
	}
	fmt.Printf("fencelock: serving clients at %s\n", srv.Addr())
	s.running.Store(srv)
	if s.ops.metrics != nil {
		s.ops.metrics.Server(srv)
	}
	s.ops.probes.set(listeners.Probes(func(context.Context) error {
		select {
		case <-s.ops.draining:
			return errStopping
		default:
			return srv.Ready()
		}
	}))
	door := s.serveHTTP(ctx, srv)
	notify(notifyReady)
	select {
	case <-ctx.Done():
	case <-srv.Done():
	case err := <-door:
		_ = srv.Close(context.WithoutCancel(ctx)) // it is as it was
		s.config.Log.Error("server stopped", "why", err)
		return failed(exitUnavailable, fmt.Errorf("--http-listen: %w", err))
	}
	cancel() // if the server failed
	stop()
	bounded, end := context.WithTimeout(context.Background(), stopTime)
	defer end()
	if s.door.listen != "" {
		select {
		case err := <-door:
			if err != nil {
				say("--http-listen: %v", err)
			}
		case <-bounded.Done():
		}
	}
	err = errors.Join(srv.Close(bounded), srv.Err())
	s.config.Log.Info("server stopped", "why", stopReason(ctx, err))
	if err != nil {
		return failed(exitUnavailable, err)
	}
	return nil
}

var errStopping = errors.New("the process is stopping")

// changedProofs writes that the tokens of clients were read again.
func (s *serveSettings) changedProofs(*principal.Proofs) {
	if srv := s.running.Load(); srv != nil {
		s.audit.log.Write(audit.Event{
			Server: srv.ID(), Event: "set-principals", Outcome: audit.Done, Principal: string(principal.Process), Name: s.proofs,
		})
	}
}

// exportMetrics registers the server's metrics, if a listener serves them.
func (s *serveSettings) exportMetrics() {
	m := s.ops.metrics
	if m == nil {
		return
	}
	m.Configure(&s.config)
	s.audit.export(m)
	if s.tls != nil {
		m.Certificate("clients", s.tls.Certificate)
	}
	if s.peerTLS != nil {
		m.Certificate("members", s.peerTLS.Certificate)
	}
}

// stopReason returns why a server or a gateway has stopped, for the log: err, or else the signal that ended ctx.
func stopReason(ctx context.Context, err error) error {
	if err != nil {
		return err
	}
	return context.Cause(ctx)
}

// serveHTTP serves HTTP at this member, if it is asked for. Behind it is a client of the cluster that reaches this
// member without a socket, and the others when they lead. Whichever member leads, every member serves, and a client
// counts its TTL from an earlier instant than the leader does. The channel gets an error if the door fails, and is
// closed when the door has ended.
func (s *serveSettings) serveHTTP(ctx context.Context, srv *server.Server) <-chan error {
	failed := make(chan error, 1)
	if s.door.listen == "" {
		return failed
	}
	d := builtin.AttachMember(builtin.Member{
		Connect: func(ctx context.Context) builtin.Stream { return srv.AttachDoor(ctx, doorClient) },
		Address: srv.Advertised(),
	}, &builtin.Options{TLS: s.cluster.config, Logger: s.config.Log})
	go func() {
		defer close(failed)
		admit := func(l net.Listener, trusted []netip.Prefix) net.Listener {
			return srv.Admit(l, "HTTP clients", s.door.limits.Connections, s.door.limits.ClientConnections, trusted...)
		}
		admin := builtin.NewAdmin([]string{srv.Advertised()}, &builtin.Options{TLS: s.cluster.config})
		o := gateway.Options{
			Key: s.keys.key, OldKeys: s.keys.old, Identity: s.keys.identity, Log: s.config.Log,
			Audit: s.audit.log, AuditAs: srv.ID(), Draining: s.ops.draining, Service: serviceOf(admin, srv),
			Access: &gateway.Access{Proofs: s.config.Proofs, Certificate: server.PrincipalOf, Ruled: srv.Ruled},
		}
		reached := func(context.Context, func(error)) (backend.Driver, error) { return d, nil }
		held, err := s.door.serve(ctx, o, s.tls, admit, reached, &s.ops, func() {})
		if held == 0 {
			closeQuietly(d.Close)
		}
		if err != nil {
			failed <- err
		}
	}()
	return failed
}

// doorClient is the name of the HTTP server in the lists of sessions, where limits count by client.
const doorClient = "http"
