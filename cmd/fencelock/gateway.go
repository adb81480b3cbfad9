package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"syscall"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/gateway"
)

const gatewayHelp = `Usage: fencelock gateway --backend URL [options]

Serves locks over HTTP, for every language, before any lock service. It keeps no locks: run as many as you like behind a
load balancer. docs/HTTP.md tells the calls; so does the gateway, at /docs and /openapi.json.

Options (durations like 500ms, 30s, 5m; addresses are HOST:PORT):

  --backend URL          the lock service. Default: $FENCELOCK_BACKEND, else ` + localServer + `
  --tier TIER            efficiency (default), or correctness: refuse a backend that cannot fence
` + httpOptions + `  --tls-cert FILE --tls-key FILE
                         certificate for clients, in PEM
  --tls-client-ca FILE   accept clients with a certificate of this authority only
  --insecure             permit an address that others reach, without TLS: whoever reaches it takes every lock
  --verbose              log more

Standard output gets one line when clients can connect; the log goes to standard error.

INT and TERM answer those who wait and end the gateway; locks stay as they are. A second one ends it at once.

Exit codes:

    0  ended by INT or TERM
   64  the command line makes no sense, or the backend cannot do what it asks for
   69  the gateway cannot start or go on, or the lock service cannot be reached
`

const httpListen = "127.0.0.1:7481"

const httpOptions = `  --http-listen ADDRESS  where HTTP is served. Default of gateway: ` + httpListen + `
  --http-key FILE        at least 16 bytes that all replicas share, so that each renews and releases what another one
                         was granted. Default: $FENCELOCK_HTTP_KEY, else random
`

// door are the options of what serves HTTP.
type door struct {
	listen  string
	keyFile string
}

func (d *door) define(f *flag.FlagSet, listen string) {
	f.StringVar(&d.listen, "http-listen", listen, "")
	f.StringVar(&d.keyFile, httpKeyOption, "", "")
}

// key reads what the replicas share; nil if there is nothing.
func (d *door) key() ([]byte, error) { return sharedKey(httpKeyOption, d.keyFile, gateway.MinKeyBytes) }

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
		return nil, fmt.Errorf("%s: it has %d bytes, fewer than %d", what, len(key), least)
	}
	return key, nil
}

// check refuses an address that others reach, if what is said there can be read by others.
func (d *door) check(secure bool) error {
	host, _, err := net.SplitHostPort(d.listen)
	if err != nil {
		return fmt.Errorf("--http-listen: %w", err)
	}
	ip := net.ParseIP(host)
	if secure || host == "localhost" || ip != nil && ip.IsLoopback() {
		return nil
	}
	return fmt.Errorf("--http-listen %s: others reach it without TLS; give --tls-cert and --tls-key, or --insecure",
		d.listen)
}

type gatewaySettings struct {
	backend  string
	tier     fencelock.Tier
	door     door
	key      []byte
	client   certificates
	clientCA string
	insecure bool
	verbose  bool
}

// gatewayMain is "fencelock gateway".
func gatewayMain(args []string) int {
	s, err := parseGateway(args)
	if code, done := unparsed("gateway", gatewayHelp, err); done {
		return code
	}
	if err := s.serve(); err != nil {
		say("%v", err)
		return exitOf(err)
	}
	return exitOK
}

func parseGateway(args []string) (*gatewaySettings, error) {
	s := &gatewaySettings{}
	var tier string
	f := newFlags("gateway")
	f.StringVar(&s.backend, "backend", os.Getenv("FENCELOCK_BACKEND"), "")
	f.StringVar(&tier, "tier", fencelock.Efficiency.String(), "")
	s.door.define(f, httpListen)
	f.StringVar(&s.client.cert, "tls-cert", "", "")
	f.StringVar(&s.client.key, "tls-key", "", "")
	f.StringVar(&s.clientCA, "tls-client-ca", "", "")
	f.BoolVar(&s.insecure, "insecure", false, "")
	f.BoolVar(&s.verbose, "verbose", false, "")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	if f.NArg() > 0 {
		return nil, fmt.Errorf("%q: gateway takes no arguments", f.Arg(0))
	}
	if s.backend == "" {
		s.backend = localServer
	}
	var err error
	if s.tier, err = tierOf(tier); err != nil {
		return nil, err
	}
	if s.key, err = s.door.key(); err != nil {
		return nil, err
	}
	return s, errors.Join(checkBackend(s.backend), s.door.check(s.insecure || s.client != (certificates{})))
}

func (s *gatewaySettings) serve() error {
	log := logger(s.verbose)
	config, err := s.client.forClients(s.clientCA)
	if err != nil {
		return fmt.Errorf("%w: %w", backend.ErrInvalidOption, err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	opening, cancel := context.WithTimeout(ctx, attemptTime)
	defer cancel()
	d, err := backend.Open(opening, s.backend)
	if err != nil {
		return fmt.Errorf("open %s: %w", backend.RedactURL(s.backend), err)
	}
	locks, err := fencelock.Open(d, s.tier, nil) // for the tier's gate alone
	if err != nil {
		closeQuietly(d.Close)
		return err
	}
	held, err := s.door.serve(ctx, gateway.Options{Driver: d, Key: s.key, Log: log}, config, stop)
	if held > 0 {
		// Closing the driver would end what it keeps alive. As it is, another replica takes it over, or it ends with
		// its TTL.
		log.Info("locks are left to their holders", "locks", held)
		return err
	}
	closeQuietly(locks.Close)
	return err
}

func closeQuietly(end func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), releaseTime)
	defer cancel()
	_ = end(ctx) // it holds nothing
}

func logger(verbose bool) *slog.Logger {
	level := slog.LevelInfo
	if verbose {
		level = slog.LevelDebug
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
}

// serve serves HTTP before a driver until ctx ends. It returns how many holds that keeps alive by then.
func (d *door) serve(
	ctx context.Context, o gateway.Options, config *tls.Config, ending func(),
) (held int, err error) {
	if o.Key == nil {
		o.Log.Warn("no --http-key: the lock tokens of this replica are unknown to others, " +
			"and to itself after a restart")
	}
	o.Version = version()
	g, err := gateway.New(o)
	if err != nil {
		return 0, err
	}
	l, err := net.Listen("tcp", d.listen)
	if err != nil {
		g.Close(ctx)
		return 0, err
	}
	scheme := "http"
	if config != nil {
		scheme = "https"
	}
	fmt.Printf("fencelock: serving HTTP at %s://%s\n", scheme, l.Addr())
	err = g.Serve(ctx, l, config)
	ending() // the next signal ends the process
	bounded, cancel := context.WithTimeout(context.Background(), stopTime)
	defer cancel()
	return g.Close(bounded), err
}
