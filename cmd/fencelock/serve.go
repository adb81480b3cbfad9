package main

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/internal/gateway"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server"
	"github.com/fencelock/fencelock/internal/server/replica"
)

const serveHelpFormat = `Usage: fencelock serve [options]

Runs a lock server. Without options: one member that keeps its data in ./fencelock-data and that this machine alone
reaches. Clients find it at fencelock://127.0.0.1:7480.

Options (durations like 500ms, 30s, 5m; addresses are HOST:PORT):

  --config FILE          a file in YAML with options, without the dashes: "data-dir: /var/lib/fencelock". --join may be
                         a list there, --limit a mapping of names to values. What is no option is refused, with its
                         line. Each option is also read from the environment, as FENCELOCK_DATA_DIR and so on, if that
                         is not empty. The command line counts before the environment, and that before the file
  --dev                  keep nothing: for trying out. Its tokens do not fence, and the correctness tier refuses it
  --data-dir DIR         where the data is kept. Default: fencelock-data
  --store KIND           how the log is kept: wal (default) or bolt. It cannot be changed later
  --listen ADDRESS       for clients. Default: 127.0.0.1:7480
  --advertise ADDRESS    what clients are told, if they reach --listen by another name
  --http-listen ADDRESS  for clients over HTTP, beside --listen and with the same certificates: see fencelock help
                         gateway. 127.0.0.1:7481 for example. Default: none
  --http-key FILE        at least 16 bytes that all members share, so that each renews and releases what another one was
                         granted over HTTP. Default: $FENCELOCK_HTTP_KEY, else random
  --peer-listen ADDRESS  for the other members. Default: 127.0.0.1:7482
  --peer-advertise ADDRESS
                         what the other members are told, if they reach --peer-listen by another name
  --join A,B,C           peer addresses of the members of the cluster to be in; the own one may be among them
  --join-key FILE        at least 16 bytes that all members share: who has them is approved as a member. Default:
                         $FENCELOCK_JOIN_KEY, else none: a new member, and one that has lost its data, has no vote
                         before "fencelock member add" approves it
  --bootstrap-expect N   make a new cluster once all N members of --join are there, this one included. Give all of them
                         the same --join. Where a cluster exists already, it is joined
  --min-ttl D            shortest TTL that clients may ask for. Default: 3s, which outlasts the election of a leader
  --max-ttl D            longest TTL that clients may ask for. Default: 24h
  --heartbeat-timeout D  how long a member hears nothing of its leader before it stands for election: 10ms to 10s.
                         Default: 500ms. Give all members the same, also of the next three. --min-ttl must outlast an
                         election, which takes up to twice this and twice --election-timeout
  --election-timeout D   how long it then waits for votes before it tries again: --heartbeat-timeout, the default, to
                         10s
  --leader-lease D       how long a leader hears nothing of most members before it steps down: 5ms to
                         --heartbeat-timeout, the default
  --commit-timeout D     how soon, at the latest, followers learn what is committed: 1ms to --heartbeat-timeout.
                         Default: 50ms
  --limit NAME=VALUE     how much the cluster takes on; may be given several times. Give all members the same: those of
                         the one that leads count. NAME is one of
%s
  --tls-cert FILE --tls-key FILE
                         certificate for clients, in PEM
  --tls-client-ca FILE   accept clients with a certificate of this authority only
  --peer-cert FILE --peer-key FILE --peer-ca FILE
                         certificate for the other members, which must have one of the same authority. It speaks for the
                         member whose host it names, in --peer-advertise or else --peer-listen, and for no other
  --insecure             permit addresses that others reach, without TLS: whoever reaches them takes and breaks every
                         lock
  --log-format FORMAT    of the log: text (default), or json with one object on each line
  --verbose              log more

Three members, each on a machine of its own, here on a:

  fencelock serve --listen a:7480 --peer-listen a:7482 --join a:7482,b:7482,c:7482 --bootstrap-expect 3 --tls-cert …

Standard output gets one line when clients can connect; the log goes to standard error.

INT and TERM hand the leadership to another member, end the connections and the server; locks stay as they are. A second
one ends it at once, which loses nothing either.

Exit codes:

    0  ended by INT or TERM
   64  the command line makes no sense
   69  the server cannot start or go on
`

// serveHelp has the limits in their place.
func serveHelp() string {
	defaults := machine.DefaultLimits()
	var lines []string
	for _, l := range defaults.All() {
		lines = append(lines, fmt.Sprintf("%25s%-17s %s. Default: %d", "", l.Name, limitsAre[l.Name], *l.Value))
	}
	return fmt.Sprintf(serveHelpFormat, strings.Join(lines, "\n"))
}

// limitsAre says what each limit counts.
var limitsAre = map[string]string{
	"sessions":         "open sessions",
	"holds":            "holds of all sessions",
	"waits":            "waiters of all sessions",
	"waiters-per-name": "waiters in one queue",
	"unacked":          "answers that one session has not acknowledged",
	"requests":         "names in one acquire",
	"name-bytes":       "bytes of a name; at most 512",
	"levels":           "levels of a hierarchical name",
	"metadata-bytes":   "bytes of the metadata of one request",
	"client-share":     "hundredths of sessions, holds, waits and connections that one client may have; at most 100",
	"deadlock-steps":   "names, holders and waiters that a search for a deadlock looks at",
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
	config   server.Config
	dev      bool
	join     string
	joinKey  string
	store    string
	client   certificates
	clientCA string
	peer     certificates
	peerCA   string
	door     door // none if its listen is empty
	key      []byte
	verbose  bool
	log      slog.Handler
	from     []string // where settings come from that are not on the command line
}

// Options that are not read like the others.
const (
	configOption = "config"
	joinOption   = "join"
	limitOption  = "limit"
)

// serveMain is "fencelock serve".
func serveMain(args []string) int {
	s, err := parseServe(args)
	if code, done := unparsed("serve", serveHelp(), err); done {
		return code
	}
	steadyHeap()
	return s.serve()
}

// newServe returns settings and the flags that fill them, and what else they read.
func newServe() (s *serveSettings, f *flag.FlagSet, format, file *string) {
	s = &serveSettings{}
	c := &s.config
	f = newFlags("serve")
	f.BoolVar(&s.dev, "dev", false, "")
	f.StringVar(&c.DataDir, "data-dir", "fencelock-data", "")
	f.StringVar(&s.store, "store", string(replica.StoreWAL), "")
	f.StringVar(&c.Listen, "listen", "127.0.0.1:7480", "")
	f.StringVar(&c.Advertise, "advertise", "", "")
	f.StringVar(&c.PeerListen, "peer-listen", "127.0.0.1:7482", "")
	f.StringVar(&c.PeerAdvertise, "peer-advertise", "", "")
	f.StringVar(&s.join, joinOption, "", "")
	f.StringVar(&s.joinKey, joinKeyOption, "", "")
	f.IntVar(&c.BootstrapExpect, "bootstrap-expect", 0, "")
	f.DurationVar(&c.MinTTL, "min-ttl", server.DefaultMinTTL, "")
	f.DurationVar(&c.MaxTTL, "max-ttl", server.DefaultMaxTTL, "")
	f.DurationVar(&c.Timing.Heartbeat, "heartbeat-timeout", 0, "")
	f.DurationVar(&c.Timing.Election, "election-timeout", 0, "")
	f.DurationVar(&c.Timing.Lease, "leader-lease", 0, "")
	f.DurationVar(&c.Timing.Commit, "commit-timeout", 0, "")
	f.Func(limitOption, "", func(text string) error { return setLimit(&c.Limits, text) })
	f.StringVar(&s.client.cert, "tls-cert", "", "")
	f.StringVar(&s.client.key, "tls-key", "", "")
	f.StringVar(&s.clientCA, "tls-client-ca", "", "")
	f.StringVar(&s.peer.cert, "peer-cert", "", "")
	f.StringVar(&s.peer.key, "peer-key", "", "")
	f.StringVar(&s.peerCA, "peer-ca", "", "")
	s.door.define(f, "")
	f.BoolVar(&c.Insecure, "insecure", false, "")
	f.BoolVar(&s.verbose, "verbose", false, "")
	format = f.String("log-format", "text", "")
	file = f.String(configOption, os.Getenv(variable(configOption)), "")
	return s, f, format, file
}

func parseServe(args []string) (*serveSettings, error) {
	_, f, _, file := newServe()
	if err := f.Parse(args); err != nil { // of this, the file counts
		return nil, err
	}
	s, f, format, _ := newServe()
	from := settings{flags: f}
	if *file != "" {
		if err := from.readFile(*file); err != nil {
			return nil, err
		}
	}
	if err := from.readEnvironment(os.LookupEnv); err != nil {
		return nil, err
	}
	s.from = from.from
	c := &s.config
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	given := givenOf(f)
	switch {
	case f.NArg() > 0:
		return nil, fmt.Errorf("%q: serve takes no arguments", f.Arg(0))
	case s.dev && (given["data-dir"] || given["store"]):
		return nil, errors.New("--dev keeps nothing: it excludes --data-dir and --store")
	case c.DataDir == "":
		return nil, errors.New("--data-dir is empty; --dev keeps nothing")
	}
	if s.dev {
		c.DataDir = ""
	}
	if s.dev && s.join == "" && !given["peer-listen"] {
		c.PeerListen = ""
	}
	var err error
	if c.JoinKey, err = sharedKey(joinKeyOption, s.joinKey, server.MinJoinKey); err != nil {
		return nil, err
	}
	if s.join != "" {
		c.Join = strings.Split(s.join, ",")
	}
	c.Store = replica.Store(s.store)
	c.Version = version()
	if s.log, err = s.handler(*format); err != nil {
		return nil, err
	}
	if c.TLS, err = s.client.forClients(s.clientCA); err != nil {
		return nil, err
	}
	if s.door.listen != "" {
		if s.key, err = s.door.key(); err != nil {
			return nil, err
		}
		if err = s.door.check(c.Insecure || c.TLS != nil); err != nil {
			return nil, err
		}
	}
	c.PeerTLS, err = s.peer.forPeers(s.peerCA)
	return s, err
}

// stopTime bounds the polite end: the hand-over of the leadership.
const stopTime = 10 * time.Second

// handler writes the log.
func (s *serveSettings) handler(format string) (slog.Handler, error) {
	o := &slog.HandlerOptions{Level: slog.LevelInfo}
	if s.verbose {
		o.Level = slog.LevelDebug
	}
	switch format {
	case "text":
		return slog.NewTextHandler(os.Stderr, o), nil
	case "json":
		return slog.NewJSONHandler(os.Stderr, o), nil
	}
	return nil, fmt.Errorf("--log-format %s: want text or json", format)
}

func (s *serveSettings) serve() int {
	s.config.Log = slog.New(s.log)
	if len(s.from) > 0 {
		s.config.Log.Info("settings that are not on the command line", "settings", s.from)
	}
	if s.config.Insecure {
		s.config.Log.Warn("insecure: where there is no TLS, whoever reaches this server takes and breaks every lock")
	}
	if s.config.BootstrapExpect == 2 {
		s.config.Log.Warn("a cluster of two members survives the loss of neither: use one, or three")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	srv, err := server.Start(ctx, s.config)
	var mistake *replica.ConfigError
	switch {
	case errors.As(err, &mistake):
		return usageError("serve", err)
	case err != nil:
		say("%v", err)
		return exitUnavailable
	}
	if s.dev {
		say("this server keeps nothing: for trying out")
	}
	fmt.Printf("fencelock: serving clients at %s\n", srv.Addr())
	failed := s.serveHTTP(ctx, srv)
	select {
	case <-ctx.Done():
	case <-srv.Done():
	case err := <-failed:
		say("--http-listen: %v", err)
		_ = srv.Close(context.WithoutCancel(ctx)) // it is as it was
		return exitUnavailable
	}
	stop() // the next signal ends the process
	bounded, cancel := context.WithTimeout(context.Background(), stopTime)
	defer cancel()
	if s.door.listen != "" {
		select {
		case err := <-failed:
			if err != nil {
				say("--http-listen: %v", err)
			}
		case <-bounded.Done():
		}
	}
	if err := errors.Join(srv.Close(bounded), srv.Err()); err != nil {
		say("%v", err)
		return exitUnavailable
	}
	return exitOK
}

// serveHTTP serves HTTP at this member, if it is asked for. Behind it is an ordinary client of the cluster: whichever
// member leads, every member serves, and what a client counts from is earlier than what the leader counts from. What is
// returned gets an error when that has failed, and is closed when it has ended.
func (s *serveSettings) serveHTTP(ctx context.Context, srv *server.Server) <-chan error {
	failed := make(chan error, 1)
	if s.door.listen == "" {
		return failed
	}
	d := builtin.New([]string{srv.Addr().String()}, &builtin.Options{TLS: s.asClient(), Logger: s.config.Log})
	go func() {
		defer close(failed)
		o := gateway.Options{Driver: d, Key: s.key, Log: s.config.Log, Metrics: srv.WriteMetrics}
		held, err := s.door.serve(ctx, o, s.config.TLS, func() {})
		if held == 0 {
			closeQuietly(d.Close)
		}
		if err != nil {
			failed <- err
		}
	}()
	return failed
}

// asClient is how this member speaks to the one that leads, as a client does: with its own certificate, which that one
// accepts if it accepts clients of the same authority.
func (s *serveSettings) asClient() *tls.Config {
	if s.config.TLS == nil {
		return nil
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: s.config.TLS.Certificates, RootCAs: s.config.TLS.ClientCAs,
	}
}
