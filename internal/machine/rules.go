package machine

import (
	"errors"
	"strconv"

	"github.com/fencelock/fencelock/internal/principal"
	"github.com/fencelock/fencelock/internal/rules"
)

// MaxRulesBytes bounds the text of Rules.
const MaxRulesBytes = 1 << 20

// Rules define the rights of principals: see package rules. With the zero value every principal may do everything.
// Rules never change, so all methods are safe for concurrent use.
type Rules struct {
	// Text is the file of rules. Empty: there are no rules.
	Text string
	// Version counts the changes of the cluster's rules.
	Version uint64

	parsed *rules.Rules // nil without rules
}

// newRules parses text. The error is a *rules.SyntaxError, or reports that the text is too long.
func newRules(text string, version uint64) (*Rules, error) {
	if len(text) > MaxRulesBytes {
		return nil, errors.New("the rules are too long")
	}
	r := &Rules{Text: text, Version: version}
	if text == "" {
		return r, nil
	}
	var err error
	r.parsed, err = rules.Parse([]byte(text))
	return r, err
}

// Revision names the rules in the audit log: their version; empty without rules.
func (r *Rules) Revision() string {
	if r.parsed == nil {
		return ""
	}
	return strconv.FormatUint(r.Version, 10)
}

// Parsed returns the rules themselves; nil without rules.
func (r *Rules) Parsed() *rules.Rules { return r.parsed }

// Refusal returns the reason why p may not do v with a name, or with everything under it; empty if p may. The process
// of a member may do everything: it decides for its own clients.
func (r *Rules) Refusal(p principal.Principal, v rules.Verb, name string, subtree bool) string {
	if r.parsed == nil || p == principal.Process {
		return ""
	}
	return r.parsed.Refusal(p, v, name, subtree)
}

// RefusalFor is Refusal if p may ask for another principal, as a gateway does for its clients: then p needs the right
// to proxy the name, and other the right to do v, which must be to acquire or to read. If other is empty, p asks for
// itself.
func (r *Rules) RefusalFor(p, other principal.Principal, v rules.Verb, name string, subtree bool) string {
	switch {
	case r.parsed == nil:
		return ""
	case other == "":
		return r.Refusal(p, v, name, subtree)
	case v != rules.Acquire && v != rules.Read:
		return rules.Sentence(p, "may not "+v.String()+" for others", rules.Decision{})
	case p == principal.Nobody:
		return "a client without a credential asks for nobody else"
	}
	if why := r.Refusal(p, rules.Proxy, name, subtree); why != "" {
		return why
	}
	return r.parsed.Refusal(other, v, name, subtree)
}

// AnyFor reports whether there is a name with which p may do v, or may do it for another principal: see RefusalFor.
func (r *Rules) AnyFor(p, other principal.Principal, v rules.Verb) bool {
	may := func(p principal.Principal, v rules.Verb) bool { return p == principal.Process || r.parsed.Any(p, v) }
	switch {
	case r.parsed == nil:
		return true
	case other == "":
		return may(p, v)
	}
	return p != principal.Nobody && may(p, rules.Proxy) && r.parsed.Any(other, v)
}

// Rules returns the rules in force. It never returns nil.
func (m *Machine) Rules() *Rules {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.rules
}

func (m *Machine) setRules(c *Command) *Result {
	if m.level < LevelRules {
		return invalid("Op", "the level is %d", m.level)
	}
	fresh, err := newRules(c.Rules, m.rules.Version+1)
	if err != nil {
		return invalid("Rules", "%v", err)
	}
	m.rules = fresh
	m.endDeniedWaits()
	return done
}

// endDeniedWaits ends the waits that the rules now deny, in the order of their tickets. Their clients repeat the
// requests, and are denied.
func (m *Machine) endDeniedWaits() {
	for _, w := range sorted(m.waits) {
		bad := m.mayAcquire(m.sessions[w.session], w.requests)
		if bad == nil {
			continue
		}
		m.endWait(w, &w.requests[0], CauseDenied, bad.Detail)
	}
}

// refusedBy is the answer to a request that the rules deny.
func refusedBy(why string) *Result { return &Result{Code: CodeDenied, Field: "Name", Detail: why} }

// mayAcquire refuses requests that the rules deny to the principal of s, or to the principal for which it asks. It
// needs the right to every name, and to everything under each hierarchical name.
func (m *Machine) mayAcquire(s *session, requests []Request) *Result {
	for i := range requests {
		r := &requests[i]
		if why := m.rules.RefusalFor(s.principal, r.For, rules.Acquire, r.Name, r.Hierarchical); why != "" {
			return refusedBy(why)
		}
	}
	return nil
}
