// Package gateway serves a lock service over HTTP: it maps JSON requests to the calls of a backend.Driver, for clients
// in every language. docs/HTTP.md documents it. Its specification, openapi.json, is generated from the types of this
// package.
//
// A gateway stores no locks. A lock token is the driver's grant, encrypted with a key that all replicas share. So any
// replica can renew and release a hold that another replica acquired, as far as the driver allows it:
//
//   - If holds expire in the service (Redis, Redlock), they survive the death of a replica. If the driver is also a
//     backend.Expirer (Redis), the same request gets the same hold through every replica.
//   - If the driver keeps holds alive on sessions and is a backend.Expirer (the bundled server), a renewal through
//     another replica moves the hold to that replica. Without a renewal the hold ends one TTL after its replica died.
//   - If the driver keeps holds alive but is not an Expirer (etcd, ZooKeeper, PostgreSQL), only the replica that
//     acquired a hold renews it. The others answer HELD_ELSEWHERE. Any replica releases it. One replica serves at a
//     time: see SharesHolds, ReplicaLock and Options.Grants.
//
// In the latter two cases the replica ends a hold that its client has not renewed for one TTL.
//
// So a hold of the gateway is no lease of package fencelock, which ends with its process: see docs/decisions,
// the-gateway-calls-drivers.
//
// A client may rely on validForMillis, which counts from the instant at which the client sent the request. The service
// counts from a later instant. No decision uses a wall clock.
package gateway

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/audit"
	"github.com/fencelock/fencelock/internal/cleanup"
	"github.com/fencelock/fencelock/internal/history"
)

// Options configure a Gateway. All fields but Driver have defaults.
type Options struct {
	// Driver is the gateway's backend. Its owner closes it, after the gateway.
	Driver backend.Driver

	// Key is the secret that all replicas share, of at least MinKeyBytes. It seals lock tokens. Nil: a random key, so that
	// only this replica can open its tokens. OldKeys open the lock tokens that they sealed. The gateway derives the ids of
	// requests from Identity, or from Key if Identity is nil. Identity must stay the same while Key changes.
	Key, Identity []byte
	OldKeys       [][]byte

	// Grants returns the reason why this replica grants no locks at present, nil if it grants them. A replica that grants
	// no locks is not ready, but renews and releases existing holds. Nil: it always grants.
	Grants func() error

	// Access contains the rights. Nil: everybody may do everything, but force-release requires a client on this machine or
	// a verified certificate.
	Access *Access

	// Limits bound the gateway's state.
	Limits Limits

	// TrustedProxies are the networks of proxies whose X-Forwarded-For header names the address of the client.
	TrustedProxies []netip.Prefix

	// Draining is closed when the process is about to stop. From then on /readyz answers 503; all other calls work as
	// before. Nil: the process never drains.
	Draining <-chan struct{}

	// Observe is called after each answered request with its method, the pattern of its route (empty if the request was
	// refused before routing), the status and the duration. It is called concurrently. May be nil.
	Observe func(method, route string, status int, took time.Duration)

	// NoPage disables the web page.
	NoPage bool
	// Service returns the members and limits that the web page shows. Nil: unknown.
	Service func(context.Context) Service

	// Version is the version in the specification.
	Version string

	// Hosts are host names that requests without a credential may use for the gateway, in addition to localhost, addresses
	// and the names of its certificate. They have no port; the first label may be *.
	Hosts []string
	// Certificate returns the gateway's own certificate. Nil: no certificate.
	Certificate func() *x509.Certificate

	// AccessLog writes a line to Log for each request.
	AccessLog bool

	// Audit records who did what. AuditAs is the name of this server in its events. Nil: no audit log.
	Audit   *audit.Log
	AuditAs string

	// Log receives a record of each fault. Default slog.Default.
	Log *slog.Logger
}

// certificateOf returns a name for the subject of the client's verified certificate; empty without a certificate.
func certificateOf(r *http.Request) string {
	if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 {
		return ""
	}
	leaf := r.TLS.VerifiedChains[0][0]
	sum := sha256.Sum256(leaf.RawSubject)
	return "certificate " + hex.EncodeToString(sum[:])
}

// Gateway serves the calls of docs/HTTP.md. New creates it. Its handler is safe for concurrent use.
type Gateway struct {
	o       Options
	driver  backend.Driver
	multi   backend.MultiAcquirer // nil if the driver does not implement it
	expirer backend.Expirer       // nil if the driver does not implement it
	keeps   bool                  // Description.KeepsHolds
	wanders bool                  // SharesHolds
	clock   backend.Clock
	sealer  *Sealer
	handler http.Handler
	// patterns are the patterns of all routes.
	patterns []string
	hosts    hosts
	bodies   bodies
	rates    *rates
	works    *work
	named    sync.Once      // guards the warning about Hosts
	history  history.Tokens // the tokens that this replica got from the service

	closing context.Context // ends when Close begins: waits and watches
	close   context.CancelFunc
	work    sync.WaitGroup
	cleaner cleanup.Cleaner // releases holds of clients that are gone
	refused rate.Sometimes  // guards the warning about refused releases

	mu       sync.Mutex // protects the following fields, and the fields of attempts and holds
	attempts map[string]*attempt
	holds    map[holdKey]*hold        // by the driver's key
	leaving  map[holdKey]*cleanup.Job // holds that are being released
	owned    map[ownedKey]*hold
	finished recent[struct{}] // requests that are done, by attempt.key
	past     recent[ended]    // holds that have ended, by pastKey
	waits    share
	watches  share
	held     share // holds and attempts of this replica
	sessions sessions
	feeds    map[feedKey]*feed
}

// New returns a gateway. It does no I/O.
func New(o Options) (*Gateway, error) {
	if o.Driver == nil {
		return nil, errors.New("gateway: New: driver is nil")
	}
	if o.Key == nil {
		o.Key = make([]byte, 32)
		rand.Read(o.Key) // never fails
	}
	if o.Identity == nil {
		o.Identity = o.Key
	}
	sealer, err := NewSealer(o.Identity, append([][]byte{o.Key}, o.OldKeys...)...)
	if err != nil {
		return nil, fmt.Errorf("gateway: %w", err)
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	o.Limits = o.Limits.withDefaults()
	l := &o.Limits
	about := o.Driver.Describe()
	g := &Gateway{
		o: o, driver: o.Driver, sealer: sealer, keeps: about.KeepsHolds,
		wanders: SharesHolds(o.Driver), clock: about.Clock, refused: rate.Sometimes{Interval: time.Minute},
		attempts: map[string]*attempt{}, holds: map[holdKey]*hold{}, leaving: map[holdKey]*cleanup.Job{},
		owned: map[ownedKey]*hold{}, feeds: map[feedKey]*feed{}, rates: newRates(l), works: newWork(lateness()), sessions: sessions{most: l.ClientSessions},
		waits: newShare("waits", l.Waits, l.ClientWaits), watches: newShare("watches", l.Watches, l.ClientWatches),
		held: newShare("holds", l.Holds, l.ClientHolds),
	}
	g.multi, _ = backend.As[backend.MultiAcquirer](o.Driver)
	g.expirer, _ = backend.As[backend.Expirer](o.Driver)
	if g.clock == nil {
		g.clock = backend.SystemClock()
	}
	g.closing, g.close = context.WithCancel(context.Background())
	// Without a bound, since a driver may keep alive a hold that Expire was not called for.
	g.cleaner.Init(math.MaxInt, g.clock, g.drop, g.unreleased)
	g.hosts = hosts{o.Certificate, x509.Certificate{DNSNames: o.Hosts}}
	g.bodies.of = map[string]int64{}
	g.handler = g.logged(g.guarded(g.routes()))
	return g, nil
}

// SharesHolds reports whether every replica in front of the driver's service can renew the holds of the others: holds
// expire in the service, or the driver takes holds over.
func SharesHolds(d backend.Driver) bool {
	_, expires := backend.As[backend.Expirer](d)
	return expires || !d.Describe().KeepsHolds
}

// ReplicaLock is the lock that a replica holds while it serves, if replicas do not share holds. A group of replicas
// adds a space and the name of the group. Clients cannot acquire these names.
const ReplicaLock = "fencelock gateway"

func reserved(name string) bool {
	return name == ReplicaLock || strings.HasPrefix(name, ReplicaLock+" ")
}

// mayGrant returns the reason why this replica grants no locks at present; nil if it grants them.
func (g *Gateway) mayGrant() error {
	if g.o.Grants == nil {
		return nil
	}
	if err := g.o.Grants(); err != nil {
		return problem(codeUnavailable, err.Error()).retry(comeAgain)
	}
	return nil
}

// meets reports whether the same request through another replica gets the same hold. That requires an Expirer: with
// another driver a replica's late request, or its release for a client that disconnected, could end a hold that another
// replica has acquired since.
func (g *Gateway) meets() bool { return g.expirer != nil }

// SetKeys replaces Options.Key and Options.OldKeys.
func (g *Gateway) SetKeys(key []byte, old ...[]byte) error {
	return g.sealer.SetKeys(append([][]byte{key}, old...)...)
}

// Handler serves all paths.
func (g *Gateway) Handler() http.Handler { return g.handler }

// End ends waits and watches with an answer, so that a server can shut down. The gateway refuses new ones.
func (g *Gateway) End() { g.close() }

// Close ends the gateway. It releases grants that no client received, as far as ctx allows. Other holds stay: another
// replica renews them, or they expire. Close returns the number of holds that the driver still keeps alive; closing the
// driver would end them.
func (g *Gateway) Close(ctx context.Context) (held int) {
	g.mu.Lock() // no feed begins after g.close
	g.close()
	g.mu.Unlock()
	g.work.Wait()
	g.cleaner.Close(ctx)
	g.cleaner.Wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, h := range g.holds {
		h.ended = true
		h.timer.Stop()
	}
	if !g.keeps {
		return 0
	}
	return len(g.holds)
}

// maxBody bounds the body of a request, in bytes.
const maxBody = 64 << 10

// bodyTime is the maximum for receiving a body, and answerTime for sending an answer.
const (
	bodyTime   = 10 * time.Second
	answerTime = 20 * time.Second
)

var origins = http.NewCrossOriginProtection()

// guarded enforces limits and checks the credential and the form of a request before its route handles it.
func (g *Gateway) guarded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			if x := recover(); x != nil {
				if x == http.ErrAbortHandler { //nolint:errorlint // the value itself has the meaning
					panic(x)
				}
				g.o.Log.Error("a request panicked", "method", r.Method, "path", r.URL.Path, "panic", fmt.Sprint(x))
				write(w, problem(codeInternal, internalSentence))
			}
		}()
		control := http.NewResponseController(w)
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		hasBody := r.Body != nil && r.Body != http.NoBody
		if hasBody { // the server reads the body of a refused request too
			_ = control.SetReadDeadline(time.Now().Add(bodyTime)) // not every writer supports it
		}
		if p := g.ofBrowser(r); p != nil {
			write(w, p)
			return
		}
		if r.URL.Path != livePath && r.URL.Path != readyPath {
			if p := g.rates.enter(principalOf(r)); p != nil {
				write(w, p)
				return
			}
			leave, p := g.works.enter(r.Context(), principalOf(r))
			if p != nil {
				write(w, p)
				return
			}
			defer leave()
			incomingOf(r.Context()).leaveWork = leave
		}
		if p := g.credential(r); p != nil {
			write(w, p)
			return
		}
		var body []byte
		if hasBody {
			out, p := g.bodies.enter(r)
			if p == nil {
				body, p = readBody(w, r)
				out()
			}
			if p != nil {
				write(w, p)
				return
			}
			_ = control.SetReadDeadline(time.Time{})
			r.Body = http.NoBody
		}
		if p := misread(r, body); p != nil {
			write(w, p)
			return
		}
		incomingOf(r.Context()).body = body
		_ = control.SetWriteDeadline(time.Now().Add(pollMost + answerTime))
		next.ServeHTTP(w, r)
	})
}

// ofBrowser refuses requests that a browser sends for a page of another origin: such a page must not use locks.
func (g *Gateway) ofBrowser(r *http.Request) *Problem {
	if !g.hosts.permits(r) {
		g.named.Do(func() {
			g.o.Log.Warn("requests without a credential are refused that name a host which --http-host does not permit",
				logID(r.Context()), "host", r.Host, "client", principalOf(r))
		})
		return problem(codeMisdirected, "requests without a credential are answered at an address, at localhost, "+
			"at the names of the certificate and at those of the option --http-host, which "+strconv.Quote(r.Host)+
			" is none of")
	}
	if err := origins.Check(r); err != nil {
		return problem(codeDenied, err.Error())
	}
	if crossSite(r) {
		return problem(codeDenied, "a browser sent the request for a page of another origin; "+docsPath+" alone is "+
			"open to those")
	}
	return nil
}

// write sends a problem as the answer.
func write(w http.ResponseWriter, p *Problem) {
	refusing(w, "request", p)
	for name, values := range p.headers {
		w.Header()[name] = values
	}
	w.Header().Set("Content-Type", contentProblem)
	w.WriteHeader(p.Status)
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(p) // an error means that the client has disconnected
}

// admit counts a long request until the caller calls the returned function, or returns the exhausted quota.
func (g *Gateway) admit(s *share, principal string) (func(), error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if p := s.enter(principal, 1); p != nil {
		return nil, p
	}
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		s.leave(principal, 1)
	}, nil
}
