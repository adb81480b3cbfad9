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

// Access has the rules and the identities. Its functions are called for each request: their results may change.
type Access struct {
	// Proofs returns the identities of tokens and certificates. Nil: no token is known, and a header Authorization without
	// one is ignored.
	Proofs func() *principal.Proofs
	// Certificate returns the identity of a verified certificate, in place of Proofs. Nil: Proofs does.
	Certificate func(*x509.Certificate) principal.Principal
	// Rules returns the rights of principals. Nil: the lock service has the rules, and gets with each call the principal
	// for whom it is: see principal.For.
	Rules func() *rules.Rules
	// Ruled reports whether the lock service has rules at present: only then is a lock token for its principal alone. Nil:
	// always.
	Ruled func() bool
}

// decides reports whether the gateway itself decides by rules.
func (g *Gateway) decides() bool { return g.o.Access != nil && g.o.Access.Rules != nil }

// sends reports whether the lock service gets the principal of each call.
func (g *Gateway) sends() bool { return g.o.Access != nil && g.o.Access.Rules == nil }

// tokenGrace is the time by which a watch outlasts its token. The client has that time to start a watch with a fresh
// token.
const tokenGrace = 30 * time.Second

// caller is the sender of a request, where Options.Access is set.
type caller struct {
	who principal.Principal
	err error // why the token of the request is refused
}

// incoming is a request, and the facts that the gateway establishes before the call.
type incoming struct {
	*http.Request
	id        string // for the log
	caller    caller
	scope     string // scopeOf
	principal string // principalOf
	body      []byte // until it is parsed
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

// scopeOf returns the owner of request ids and holds: a principal, or else a certificate. It is empty for other
// senders.
func scopeOf(r *http.Request) string { return incomingOf(r.Context()).scope }

// principalOf returns the sender of r, as far as its token and the connection show.
func principalOf(r *http.Request) string { return incomingOf(r.Context()).principal }

// identified returns r with what is known about its sender.
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

// addressOf is the principal of a sender without a credential, for people.
func addressOf(r *http.Request) principal.Principal {
	return principal.Address(listeners.ClientOf(listeners.HostOf(r.RemoteAddr)))
}

// identify returns the sender of r: by its token, or else by its certificate. A token must be valid at an instant.
func (g *Gateway) identify(r *http.Request, at time.Time) (c caller) {
	var proofs *principal.Proofs
	if g.o.Access.Proofs != nil {
		proofs = g.o.Access.Proofs()
	}
	given := r.Header.Values("Authorization")
	if proofs == nil { // it may be for a proxy in front
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

// hasToken reports whether a header Authorization has a token for a gateway.
func hasToken(given string) bool {
	_, token, _ := strings.Cut(given, " ")
	return principal.CheckToken(strings.TrimSpace(token)) == nil
}

// unauthenticated is the answer to a refused token.
func unauthenticated(err error) *Problem {
	p := problem(codeUnauthenticated, err.Error())
	p.headers = http.Header{"Www-Authenticate": {`Bearer realm="fencelock", error="invalid_token"`}}
	return p
}

// credential returns the problem with the request's token, but for probes.
func (g *Gateway) credential(r *http.Request) *Problem {
	if err := callerOf(r).err; err != nil && r.URL.Path != livePath && r.URL.Path != readyPath {
		return unauthenticated(err)
	}
	return nil
}

// boundTo returns who may use the lock tokens that r gets, where there are rules; else everybody with the token may.
func (g *Gateway) boundTo(r *http.Request) string {
	if a := g.o.Access; a == nil || a.Ruled != nil && !a.Ruled() {
		return ""
	}
	return scopeOf(r)
}

// may returns an error if the sender of the request may not use a name that way.
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

// mayHold refuses holds that the sender of the request may not have. It needs the right to all of them, and to
// everything under a hierarchical name.
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

// named adds the name of the problem, in a request for several.
func named(err error, name string, of int) error {
	var p *Problem
	if of > 1 && errors.As(err, &p) {
		p.LockKey = name
	}
	return err
}

// decide asks the rules, where the gateway has them. The caller has checked the name.
func (g *Gateway) decide(who principal.Principal, v rules.Verb, name string, subtree bool) *Problem {
	if why := g.o.Access.Rules().Refusal(who, v, name, subtree); why != "" {
		return problem(codeDenied, why)
	}
	return nil
}

// trustListener decides without rules of the gateway: everybody may do everything, but force-release requires a client
// on this machine, or a verified certificate.
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

// reads returns the filter for names that the sender of the request may see. It fails if the sender may not see any
// name.
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

// hide removes the blocker from the answer to an acquire, unless the sender of the request may read every name of the
// request.
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
	out.Detail = "who is in the way is shown to principals that may read the name"
	return &out
}

// still returns the reason why the sender of a watch may not follow a name any more.
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
