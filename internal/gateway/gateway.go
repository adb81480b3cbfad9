// Package gateway is the HTTP door to a lock service: JSON over the calls of a backend.Driver, for every language.
// docs/HTTP.md is its documentation, openapi.json its specification, which is generated from the types here.
//
// A gateway keeps no locks. A lock token is the driver's grant, encrypted with a key that all replicas share, so that
// any replica renews and releases what another one was granted, as far as the driver allows it:
//
//   - Where holds end by themselves in the service (Redis, Redlock) a replica that dies takes nothing with it. If the
//     driver is a backend.Expirer (Redis), the same request gets the same hold through every replica.
//   - Where the driver keeps holds alive on sessions and is a backend.Expirer (the bundled server), a renewal through
//     another replica brings the hold there. Until then it lives for one TTL after its replica died.
//   - Where it is not an Expirer (etcd, ZooKeeper, PostgreSQL), only the replica that was granted a hold renews it
//     (HELD_ELSEWHERE from the others), and any releases it.
//
// In both latter cases the replica itself ends a hold that its client has not renewed for one TTL.
//
// Time. What a client may rely on is validForMillis, which counts from the instant at which it sent the request:
// earlier than any instant that the service counts from. No wall clock decides anything.
package gateway

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/history"
)

// Options configure a Gateway. All but Driver have defaults.
type Options struct {
	// Driver is what the gateway stands before. Its owner closes it, after the gateway.
	Driver backend.Driver

	// Key is what all replicas share, at least MinKeyBytes. Nil: random, so that the tokens are this replica's alone.
	Key []byte

	// Authorizer decides who may force-release. Default TrustListener.
	Authorizer Authorizer

	// Waits bounds the requests that wait at one time; WaitsPerPrincipal those of one principal: a client certificate,
	// or else an address. Defaults 10,000 and 1,000.
	Waits, WaitsPerPrincipal int

	// Metrics writes those of the process, in the text format of Prometheus, at /metrics. Nil: there are none.
	Metrics func(io.Writer) error

	// Version is told in the specification.
	Version string

	// Log is told what went wrong. Default slog.Default.
	Log *slog.Logger
}

// Authorizer decides who may do what not everybody may.
type Authorizer interface {
	// ForceRelease returns nil if the sender of r may take the lock name away from its holder.
	ForceRelease(r *http.Request, name string) error
}

// TrustListener trusts those whom only the listener's owner can have let in: clients on this machine, and those with a
// certificate that was verified.
type TrustListener struct{}

// ForceRelease implements Authorizer.
func (TrustListener) ForceRelease(r *http.Request, _ string) error {
	if certificateOf(r) != "" {
		return nil
	}
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if ip := net.ParseIP(host); err == nil && ip != nil && ip.IsLoopback() {
		return nil
	}
	return errors.New("force-release takes a client on the same machine, or one with a certificate")
}

// certificateOf names the client's verified certificate; empty if it has none.
func certificateOf(r *http.Request) string {
	if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 {
		return ""
	}
	leaf := r.TLS.VerifiedChains[0][0]
	sum := sha256.Sum256(leaf.RawSubject)
	return "certificate " + hex.EncodeToString(sum[:])
}

// principalOf is who sent r, as far as the connection tells.
func principalOf(r *http.Request) string {
	if c := certificateOf(r); c != "" {
		return c
	}
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return r.RemoteAddr
	}
	return "address " + host
}

// Gateway serves the calls of docs/HTTP.md. Make it with New; its Handler, or Serve, is safe for concurrent use.
type Gateway struct {
	o       Options
	driver  backend.Driver
	multi   backend.MultiAcquirer // nil if the driver is none
	expirer backend.Expirer       // nil if the driver is none
	keeps   bool                  // Description.KeepsHolds
	clock   backend.Clock
	sealer  *Sealer
	handler http.Handler
	history history.Tokens // what the service has acknowledged to this replica

	closing  context.Context // ends when Close begins: waits and watches
	close    context.CancelFunc
	stopping context.Context // ends with Close: what is given back
	stop     context.CancelFunc
	work     sync.WaitGroup

	mu       sync.Mutex // protects the following fields, and those of attempts and holds
	attempts map[string]*attempt
	holds    map[holdKey]*hold         // by what the driver was granted
	leaving  map[holdKey]chan struct{} // what is being given back, each closed when that is done
	finished recent
	waits    int
	waiting  map[string]int // by principal
}

// New returns a gateway. It does no I/O.
func New(o Options) (*Gateway, error) {
	if o.Driver == nil {
		return nil, errors.New("gateway: New without a driver")
	}
	if o.Key == nil {
		o.Key = make([]byte, 32)
		rand.Read(o.Key) // never fails
	}
	sealer, err := NewSealer(o.Key)
	if err != nil {
		return nil, fmt.Errorf("gateway: %w", err)
	}
	if o.Authorizer == nil {
		o.Authorizer = TrustListener{}
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.Waits == 0 {
		o.Waits = 10_000
	}
	if o.WaitsPerPrincipal == 0 {
		o.WaitsPerPrincipal = 1_000
	}
	about := o.Driver.Describe()
	g := &Gateway{
		o: o, driver: o.Driver, sealer: sealer, keeps: about.KeepsHolds, clock: about.Clock,
		attempts: map[string]*attempt{}, holds: map[holdKey]*hold{}, leaving: map[holdKey]chan struct{}{},
		waiting: map[string]int{},
	}
	g.multi, _ = backend.As[backend.MultiAcquirer](o.Driver)
	g.expirer, _ = backend.As[backend.Expirer](o.Driver)
	if g.clock == nil {
		g.clock = backend.SystemClock()
	}
	g.closing, g.close = context.WithCancel(context.Background())
	g.stopping, g.stop = context.WithCancel(context.Background())
	g.handler = g.guarded(g.routes())
	return g, nil
}

// wanders reports whether another replica can renew what this one was granted.
func (g *Gateway) wanders() bool { return !g.keeps || g.expirer != nil }

// meets reports whether the same request through another replica gets the same hold. It takes an Expirer: without one,
// what a replica sends late, or gives back for a client that has gone, would end what another one was granted since.
func (g *Gateway) meets() bool { return g.expirer != nil }

// Handler serves all paths.
func (g *Gateway) Handler() http.Handler { return g.handler }

// End ends waits and watches with an answer, so that a server can be shut down. New ones are refused.
func (g *Gateway) End() { g.close() }

// Close ends the gateway. Holds stay: other replicas renew them, or they end with their TTL. It gives back what was
// granted and never delivered, as far as ctx allows. It returns how many holds the driver still keeps alive: if there
// are any, closing the driver would end them.
func (g *Gateway) Close(ctx context.Context) (held int) {
	g.close()
	defer g.stop()
	defer context.AfterFunc(ctx, g.stop)()
	g.work.Wait()
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

// maxBody bounds the body of a request.
const maxBody = 64 << 10

// bodyTime bounds how long a body takes to arrive, and answerTime how long an answer takes to leave.
const (
	bodyTime   = 10 * time.Second
	answerTime = 20 * time.Second
)

var origins = http.NewCrossOriginProtection()

// guarded bounds what a client can cost before its request is understood.
func (g *Gateway) guarded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			if x := recover(); x != nil {
				if x == http.ErrAbortHandler { //nolint:errorlint // the value itself is the protocol
					panic(x)
				}
				g.o.Log.Error("a request panicked", "method", r.Method, "path", r.URL.Path, "panic", fmt.Sprint(x))
				write(w, problem(codeInternal, internalSentence))
			}
		}()
		control := http.NewResponseController(w)
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		if err := origins.Check(r); err != nil { // pages in a browser on this machine must not break locks
			write(w, problem(codeDenied, err.Error()))
			return
		}
		if r.Body != nil && r.Body != http.NoBody {
			_ = control.SetReadDeadline(time.Now().Add(bodyTime)) // not all writers have it
			body, p := readBody(w, r)
			if p != nil {
				write(w, p)
				return
			}
			_ = control.SetReadDeadline(time.Time{})
			r.Body = body
		}
		_ = control.SetWriteDeadline(time.Now().Add(pollMost + answerTime))
		next.ServeHTTP(w, r)
	})
}

// write answers with a problem.
func write(w http.ResponseWriter, p *Problem) {
	for name, values := range p.headers {
		w.Header()[name] = values
	}
	w.Header().Set("Content-Type", contentProblem)
	w.WriteHeader(p.Status)
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(p) // nobody is left to tell
}

// admit counts a waiting request in. The returned function counts it out.
func (g *Gateway) admit(principal string) (func(), error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.waits >= g.o.Waits || g.waiting[principal] >= g.o.WaitsPerPrincipal {
		return nil, problem(codeQuota,
			"at most "+strconv.Itoa(g.o.WaitsPerPrincipal)+" requests of one principal wait, and "+
				strconv.Itoa(g.o.Waits)+" in all").retry(comeAgain)
	}
	g.waits++
	g.waiting[principal]++
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.waits--
		if g.waiting[principal]--; g.waiting[principal] == 0 {
			delete(g.waiting, principal)
		}
	}, nil
}
