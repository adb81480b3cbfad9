package gateway

import (
	"context"
	"errors"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/principal"
	"github.com/fencelock/fencelock/internal/rules"
)

// Access has the rules and the identities. Both functions are called for each request: their results may change.
type Access struct {
	// Proofs returns the identities of tokens and certificates.
	Proofs func() *principal.Proofs
	// Rules returns the rights of principals.
	Rules func() *rules.Rules
}

// tokenGrace is the time by which a watch outlasts its token. The client has that time to start a watch with a fresh
// token.
const tokenGrace = 30 * time.Second

// caller is the sender of a request, where Options.Access is set.
type caller struct {
	who principal.Principal
	err error // why the token of the request is refused
}

// callerKey is the context key for the caller of a request.
type callerKey struct{}

func callerOf(r *http.Request) caller {
	c, _ := r.Context().Value(callerKey{}).(caller)
	return c
}

// identified adds the caller to r.
func (g *Gateway) identified(r *http.Request) *http.Request {
	if g.o.Access == nil {
		return r
	}
	return r.WithContext(context.WithValue(r.Context(), callerKey{}, g.identify(r, time.Now())))
}

// identify returns the sender of r: by its token, or else by its certificate. A token must be valid at an instant.
func (g *Gateway) identify(r *http.Request, at time.Time) (c caller) {
	proofs := g.o.Access.Proofs()
	switch given := r.Header.Values("Authorization"); {
	case len(given) > 1:
		c.err = errors.New("the request has several headers Authorization")
	case len(given) == 1:
		scheme, token, _ := strings.Cut(given[0], " ")
		if !strings.EqualFold(scheme, "Bearer") {
			c.err = errors.New("want Authorization: Bearer TOKEN")
			break
		}
		c.who, c.err = proofs.Token(strings.TrimSpace(token), at)
	case r.TLS != nil && len(r.TLS.VerifiedChains) > 0:
		c.who = proofs.Certificate(r.TLS.VerifiedChains[0][0])
	}
	return c
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

// shut refuses everything but probes while Options.Shut returns a reason.
func (g *Gateway) shut(r *http.Request) *Problem {
	if g.o.Shut == nil || r.URL.Path == livePath || r.URL.Path == readyPath {
		return nil
	}
	if why := g.o.Shut(); why != "" {
		return problem(codeDenied, why)
	}
	return nil
}

// scopeOf returns the owner of request ids and holds: a principal, or else a certificate. It is empty for other
// senders.
func scopeOf(r *http.Request) string {
	if who := callerOf(r).who; who != principal.Nobody {
		return string(who)
	}
	return certificateOf(r)
}

// boundTo returns who may use the lock tokens that r gets, where Options.Access is set; else everybody with the token
// may.
func (g *Gateway) boundTo(r *http.Request) string {
	if g.o.Access == nil {
		return ""
	}
	return scopeOf(r)
}

// may returns an error if the sender of the request may not use a name that way.
func (g *Gateway) may(ctx context.Context, v rules.Verb, name string) error {
	if err := backend.ValidateName(name); err != nil {
		return problemOf(err)
	}
	r := requestOf(ctx)
	if g.o.Access == nil {
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
		if !w.Hierarchical || g.o.Access == nil {
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

// decide asks the rules. The caller has a name, and Options.Access is set.
func (g *Gateway) decide(who principal.Principal, v rules.Verb, name string, subtree bool) *Problem {
	if why := g.o.Access.Rules().Refusal(who, v, name, subtree); why != "" {
		return problem(codeDenied, why)
	}
	return nil
}

// trustListener decides without rules: everybody may do everything, but force-release requires a client on this
// machine, or a verified certificate.
func trustListener(r *http.Request, v rules.Verb) error {
	if v != rules.Force || certificateOf(r) != "" {
		return nil
	}
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if ip := net.ParseIP(host); err == nil && ip != nil && ip.IsLoopback() {
		return nil
	}
	return problem(codeDenied, "force-release takes a client on the same machine, or one with a certificate")
}

// reads returns the filter for names that the sender of the request may see. It fails if the sender may not see any
// name.
func (g *Gateway) reads(ctx context.Context) (func(name string) bool, error) {
	if g.o.Access == nil {
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
	if g.o.Access == nil || p.own || p.Code != codeHeld && p.Code != codeDeadlock {
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
	return g.decide(c.who, rules.Read, name, false)
}
