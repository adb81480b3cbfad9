package gateway

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/listeners"
	"github.com/fencelock/fencelock/internal/principal"
	"github.com/fencelock/fencelock/internal/rules"
)

// Access contains the rules and the identities. The gateway calls its functions for each request: their results may
// change.
type Access struct {
	// Proofs returns the identities of tokens and certificates. Nil: the gateway refuses every token, and ignores an
	// Authorization header without a token.
	Proofs func() *principal.Proofs
	// Certificate returns the identity of a verified certificate. Nil: the gateway uses Proofs.
	Certificate func(*x509.Certificate) principal.Principal
	// Rules returns the rights of principals. Nil: the lock service has the rules, and each call to it names the principal
	// that makes it: see principal.For.
	Rules func() *rules.Rules
	// Ruled reports whether the lock service has rules at present. Only then is a lock token bound to its principal. Nil:
	// always.
	Ruled func() bool
}

// decides reports whether the gateway itself decides by rules.
func (g *Gateway) decides() bool { return g.o.Access != nil && g.o.Access.Rules != nil }

// sends reports whether the gateway sends the principal of each call to the lock service.
func (g *Gateway) sends() bool { return g.o.Access != nil && g.o.Access.Rules == nil }

// tokenGrace is the time for which a watch outlives its token, so that the client can start a watch with a new token.
const tokenGrace = 30 * time.Second

// caller is the sender of a request. It is empty unless Options.Access is set.
type caller struct {
	who principal.Principal
	err error // the reason why the gateway refuses the token of the request
}

// incoming is a request, with the facts that the gateway establishes before the call.
type incoming struct {
	*http.Request
	id        string // for the log
	caller    caller
	scope     string // scopeOf
	principal string // principalOf
	body      []byte // nil once it is parsed
	leaveWork func() // called when the request begins to wait; see work
}

// incomingKey is the context key for a request.
type incomingKey struct{}

func incomingOf(ctx context.Context) *incoming {
	in, _ := ctx.Value(incomingKey{}).(*incoming)
	return in
}

func requestOf(ctx context.Context) *http.Request { return incomingOf(ctx).Request }

func callerOf(r *http.Request) caller { return incomingOf(r.Context()).caller }

// scopeOf returns the scope of request ids and holds: the principal of the sender, or else its certificate. It is empty
// for other senders.
func scopeOf(r *http.Request) string { return incomingOf(r.Context()).scope }

// principalOf returns scopeOf(r), or else the address of the sender.
func principalOf(r *http.Request) string { return incomingOf(r.Context()).principal }

// identified returns r with an incoming that identifies its sender.
func (g *Gateway) identified(r *http.Request, id string) *http.Request {
	in := &incoming{id: id}
	ctx := context.WithValue(r.Context(), incomingKey{}, in)
	if g.o.Access != nil {
		in.caller = g.identify(r, time.Now())
		in.scope = string(in.caller.who)
		if g.sends() {
			ctx = principal.For(ctx, cmp.Or(in.caller.who, addressOf(r)))
		}
	}
	if in.caller.who == principal.Nobody {
		in.scope = certificateOf(r)
	}
	if in.principal = in.scope; in.scope == "" {
		in.principal = "address " + listeners.ClientOf(listeners.HostOf(r.RemoteAddr))
	}
	in.Request = r.WithContext(ctx)
	return in.Request
}

// addressOf returns the principal of a sender without a credential, for people.
func addressOf(r *http.Request) principal.Principal {
	return principal.Address(listeners.ClientOf(listeners.HostOf(r.RemoteAddr)))
}

// identify returns the sender of r: by its token, or else by its certificate. The token must be valid at the time at.
func (g *Gateway) identify(r *http.Request, at time.Time) (c caller) {
	var proofs *principal.Proofs
	if g.o.Access.Proofs != nil {
		proofs = g.o.Access.Proofs()
	}
	given := r.Header.Values("Authorization")
	if proofs == nil { // the header may be meant for a proxy in front
		given = slices.DeleteFunc(slices.Clone(given), func(text string) bool { return !hasToken(text) })
	}
	switch {
	case len(given) > 0 && proofs == nil:
		c.err = errors.New("this server accepts no tokens: see --principals")
	case len(given) > 1:
		c.err = errors.New("the request has several Authorization headers")
	case len(given) == 1:
		scheme, token, _ := strings.Cut(given[0], " ")
		if !strings.EqualFold(scheme, "Bearer") {
			c.err = errors.New("want Authorization: Bearer TOKEN")
			break
		}
		c.who, c.err = proofs.Token(strings.TrimSpace(token), at)
	case r.TLS != nil && len(r.TLS.VerifiedChains) > 0:
		leaf := r.TLS.VerifiedChains[0][0]
		if g.o.Access.Certificate != nil {
			c.who = g.o.Access.Certificate(leaf)
		} else if proofs != nil {
			c.who = proofs.Certificate(leaf)
		}
	}
	return c
}

// hasToken reports whether an Authorization header has a token for a gateway.
func hasToken(given string) bool {
	_, token, _ := strings.Cut(given, " ")
	return principal.CheckToken(strings.TrimSpace(token)) == nil
}

// unauthenticated returns the answer to a refused token.
func unauthenticated(err error) *Problem {
	p := problem(codeUnauthenticated, err.Error())
	p.headers = http.Header{"Www-Authenticate": {`Bearer realm="fencelock", error="invalid_token"`}}
	return p
}

// credential returns the problem with the token of the request; nil for probes.
func (g *Gateway) credential(r *http.Request) *Problem {
	if err := callerOf(r).err; err != nil && r.URL.Path != livePath && r.URL.Path != readyPath {
		return unauthenticated(err)
	}
	return nil
}

// boundTo returns the principal or certificate that alone may use the lock tokens issued to r. It is empty without
// rules: anybody with the token may then use it.
func (g *Gateway) boundTo(r *http.Request) string {
	if a := g.o.Access; a == nil || a.Ruled != nil && !a.Ruled() {
		return ""
	}
	return scopeOf(r)
}

// may returns an error if the sender of the request may not do v with the name.
func (g *Gateway) may(ctx context.Context, v rules.Verb, name string) error {
	if err := backend.ValidateName(name); err != nil {
		return problemOf(err)
	}
	if v != rules.Read && reserved(name) {
		return problem(codeName, strconv.Quote(name)+" is reserved for the replicas of gateways")
	}
	r := requestOf(ctx)
	if !g.decides() {
		return trustListener(r, v)
	}
	if p := g.decide(callerOf(r).who, v, name, false); p != nil {
		return p
	}
	return nil
}

// mayHold returns an error if the sender of the request may not have all holds. A hierarchical hold requires the right
// to every name under it.
func (g *Gateway) mayHold(ctx context.Context, wishes ...wish) error {
	for i := range wishes {
		w := &wishes[i]
		if err := g.may(ctx, rules.Acquire, w.Name); err != nil {
			return named(err, w.Name, len(wishes))
		}
		if !w.Hierarchical || !g.decides() {
			continue
		}
		if p := g.decide(callerOf(requestOf(ctx)).who, rules.Acquire, w.Name, true); p != nil {
			return named(p, w.Name, len(wishes))
		}
	}
	return nil
}

// named adds the name of the lock to a problem with a request for several names.
func named(err error, name string, of int) error {
	var p *Problem
	if of > 1 && errors.As(err, &p) {
		p.LockKey = name
	}
	return err
}

// decide returns the refusal by the gateway's rules. The caller has validated the name, and the gateway has rules.
func (g *Gateway) decide(who principal.Principal, v rules.Verb, name string, subtree bool) *Problem {
	if why := g.o.Access.Rules().Refusal(who, v, name, subtree); why != "" {
		return problem(codeDenied, why)
	}
	return nil
}

// trustListener decides for a gateway without rules: everybody may do everything, but force-release requires a client
// on this machine or a verified certificate.
func trustListener(r *http.Request, v rules.Verb) error {
	if v != rules.Force || certificateOf(r) != "" {
		return nil
	}
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if ip := net.ParseIP(host); err == nil && ip != nil && ip.IsLoopback() {
		return nil
	}
	return problem(codeDenied, "force-release needs a client on the same machine, or a client certificate")
}

// reads returns a function that reports whether the sender of the request may read a name. It fails if the sender may
// not read any name.
func (g *Gateway) reads(ctx context.Context) (func(name string) bool, error) {
	if !g.decides() {
		return func(string) bool { return true }, nil
	}
	who, all := callerOf(requestOf(ctx)).who, g.o.Access.Rules()
	if !all.Any(who, rules.Read) {
		return nil, problem(codeDenied, rules.Sentence(who, "may not read any name", rules.Decision{}))
	}
	return func(name string) bool { return all.Decide(who, rules.Read, name).Allowed }, nil
}

// hide removes the holder and the cycle from the answer to an acquire, unless the sender may read every name in the
// request and in the cycle.
func (g *Gateway) hide(ctx context.Context, p *Problem, wishes []wish) *Problem {
	if !g.decides() || p.own || p.Code != codeHeld && p.Code != codeDeadlock {
		return p
	}
	var names []string
	for i := range wishes {
		names = append(names, wishes[i].Name)
	}
	for _, e := range p.Cycle {
		names = append(names, e.Holds, e.Wants)
	}
	reads, err := g.reads(ctx)
	if err == nil && !slices.ContainsFunc(names, func(name string) bool { return !reads(name) }) {
		return p
	}
	out := *p
	out.CurrentOwner, out.SameOwner, out.Cycle = "", false, nil
	out.Detail = "the holder is shown to principals that may read the name"
	return &out
}

// still returns the reason why the sender of a watch may no longer watch the name; nil if it may.
func (g *Gateway) still(r *http.Request, name string) *Problem {
	if g.o.Access == nil {
		return nil
	}
	c := g.identify(r, time.Now().Add(-tokenGrace))
	if c.err != nil {
		return unauthenticated(c.err)
	}
	if !g.decides() {
		return nil
	}
	return g.decide(c.who, rules.Read, name, false)
}
