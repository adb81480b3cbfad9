package machine

import (
	"errors"
	"strconv"

	"github.com/fencelock/fencelock/internal/principal"
	"github.com/fencelock/fencelock/internal/rules"
)

// MaxRulesBytes bounds the text of Rules.
const MaxRulesBytes = 1 << 20

// Rules say which principal may do what: see package rules. The zero value is no rules, and everybody may do everything.
// They never change, so all methods are safe for concurrent use.
type Rules struct {
	// Text is the file of rules. Empty: there are no rules.
	Text string
	// Version counts how often the cluster has been given rules.
	Version uint64

	parsed *rules.Rules // nil without rules
}

// newRules parses text. The error is a *rules.SyntaxError, or says that the text is too long.
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

// Refusal says why p may not do v with a name, or with everything under it. It is empty if p may. The program of a
// member may do everything: it decides for its own clients.
func (r *Rules) Refusal(p principal.Principal, v rules.Verb, name string, subtree bool) string {
	if r.parsed == nil || p == principal.Process {
		return ""
	}
	return r.parsed.Refusal(p, v, name, subtree)
}

// Any reports whether there is a name with which p may do v.
func (r *Rules) Any(p principal.Principal, v rules.Verb) bool {
	return r.parsed == nil || p == principal.Process || r.parsed.Any(p, v)
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

// endDeniedWaits ends the waits that the rules do not allow any more, in the order of their tickets. Their clients ask
// again, and are denied.
func (m *Machine) endDeniedWaits() {
	for _, w := range sorted(m.waits) {
		bad := m.mayAcquire(m.sessions[w.session], w.requests)
		if bad == nil {
			continue
		}
		m.cancel(w)
		r := &w.requests[0]
		m.notices = append(m.notices, Notice{
			Type: NoticeLost, Session: w.session, Ticket: w.ticket, Name: r.Name, RequestID: r.ID, Sealed: r.Sealed,
			Cause: CauseDenied, Detail: bad.Detail,
		})
	}
}

// refuse returns the answer to a request that the rules deny; nil if they allow it.
func (m *Machine) refuse(p principal.Principal, v rules.Verb, name string, subtree bool) *Result {
	if why := m.rules.Refusal(p, v, name, subtree); why != "" {
		return &Result{Code: CodeDenied, Field: "Name", Detail: why}
	}
	return nil
}

// mayAcquire refuses locks that the principal of s may not hold: it needs the right to all names, and to everything
// under those that are hierarchical.
func (m *Machine) mayAcquire(s *session, requests []Request) *Result {
	for i := range requests {
		r := &requests[i]
		if bad := m.refuse(s.principal, rules.Acquire, r.Name, r.Hierarchical); bad != nil {
			return bad
		}
	}
	return nil
}
