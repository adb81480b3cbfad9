package machine

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/fencelock/fencelock/internal/rules"
)

// ReasonMaxHold is the reason in the event of a hold that OpFree ended because its maximum was over.
const ReasonMaxHold = "max-hold"

// Policies bound the use of names by all principals: see rules.Policy. The zero value has no policies. They never
// change, so all methods are safe for concurrent use.
type Policies struct {
	// Text is the file of policies. Empty: there are no policies.
	Text string

	parsed *rules.Policies // nil without policies
}

// newPolicies parses text. The error is a *rules.SyntaxError, or reports that the text is too long.
func newPolicies(text string) (*Policies, error) {
	if len(text) > MaxRulesBytes {
		return nil, errors.New("the policies are too long")
	}
	p := &Policies{Text: text}
	if text == "" {
		return p, nil
	}
	var err error
	p.parsed, err = rules.ParsePolicies([]byte(text))
	return p, err
}

func (p *Policies) of(name string) rules.Policy { return p.parsed.Of(name) }

// Policies returns the policies in force. It never returns nil.
func (m *Machine) Policies() *Policies {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.policies
}

func (m *Machine) setPolicies(c *Command) *Result {
	if m.level < LevelRules {
		return invalid("Op", "the level is %d", m.level)
	}
	fresh, err := newPolicies(c.Rules)
	if err != nil {
		return invalid("Rules", "%v", err)
	}
	m.policies = fresh
	var changed []*entry
	m.sorted.Ascend(func(e *entry) bool {
		if limit := fresh.limit(e.name, e.limit); limit != e.limit {
			changed = append(changed, e)
		}
		return true
	})
	for _, e := range changed {
		m.relimit(e, fresh.limit(e.name, e.limit))
	}
	return done
}

// limit returns the limit of permits of a name, given the limit in a request; zero for other kinds.
func (p *Policies) limit(name string, asked uint32) uint32 {
	if asked == 0 {
		return 0
	}
	return cmp.Or(p.of(name).Permits, asked)
}

// relimit gives a name that is in use with permits another limit. All holders and waiters get the same limit, so that
// a restored state is the same.
func (m *Machine) relimit(e *entry, limit uint32) {
	e.limit = limit
	for _, h := range slices.Collect(e.holds.all) {
		next := *h
		next.Limit = limit
		m.replaceHold(h, &next)
	}
	for _, p := range slices.Clone(e.waits().queue) {
		w := p.wait
		next := *w
		next.requests, next.claims = slices.Clone(w.requests), slices.Clone(w.claims)
		for i := range next.claims {
			if c := &next.claims[i]; c.name == e.name {
				c.limit = limit
			}
		}
		for i := range next.requests {
			r := &next.requests[i]
			if r.Name != e.name {
				continue
			}
			if r.Limit = limit; r.Permits > limit { // it would wait indefinitely, and so would all later waiters
				m.endWait(w, r, CauseGivenBack, "")
			} else {
				m.replaceWait(w, &next)
			}
		}
	}
	e.stirred = true
	if !e.touched {
		e.touched = true
		m.touched = append(m.touched, e)
	}
}

// underPolicies applies the policies to requests, or refuses them: permits get the limit of the policy, and a maximum
// hold time needs a client that heeds it and a TTL that is no longer.
func (m *Machine) underPolicies(s *session, requests []Request) ([]Request, *Result) {
	if m.policies.parsed == nil {
		return requests, nil
	}
	own := false // requests is a copy
	for i := range requests {
		r := &requests[i]
		p := m.policies.of(r.Name)
		switch limit := m.policies.limit(r.Name, r.Limit); {
		case p.MaxHold > 0 && !r.HeedsMaxHold:
			return nil, invalid("HeedsMaxHold", "the policy of %q has a maximum hold time, of which the client's version "+
				"does not know", r.Name)
		case p.MaxHold > 0 && s.ttl > p.MaxHold:
			return nil, invalid("TTL", "%v is longer than the maximum hold time of %q, %v", s.ttl, r.Name, p.MaxHold)
		case limit == r.Limit:
		case r.Permits > limit:
			return nil, invalid("Permits", "%d of %q, of which the policy has %d", r.Permits, r.Name, limit)
		default:
			if !own {
				requests, own = slices.Clone(requests), true
			}
			requests[i].Limit = limit
		}
	}
	return requests, nil
}

// maxHold returns the maximum time of a hold that is granted now for r: at least the TTL of its session, for which
// its client relies on the hold from the start. A request that waited since before the policy may not heed it.
func (m *Machine) maxHold(s SessionID, r *Request) time.Duration {
	p := m.policies.of(r.Name)
	if p.MaxHold == 0 || !r.HeedsMaxHold {
		return 0
	}
	return max(p.MaxHold, m.sessions[s].ttl)
}
