package machine

import (
	"fmt"
	"math"
	"slices"

	"github.com/fencelock/fencelock/fencing"
)

func (m *Machine) acquire(s *session, c *Command) *Result {
	if bad := m.checkRequests(c.Requests); bad != nil {
		return bad
	}
	if bad := checkUnder(c.Under); bad != nil {
		return bad
	}
	if r := m.known(s.id, c.Requests); r != nil {
		return r
	}
	if r := m.mayAcquire(s, c.Requests); r != nil {
		return r
	}
	requests, bad := m.underPolicies(s, c.Requests)
	if bad != nil {
		return bad
	}
	claims, ok := mergeClaims(m.wanted[:0], requests)
	m.wanted = claims[:0]
	if !ok {
		return invalid("Requests", "they exclude each other")
	}
	if r := m.admit(requests, claims); r != nil {
		return r
	}
	if r := m.overShare(s.client, Usage{Holds: len(requests)}); r != nil {
		return r
	}
	if m.available(claims) {
		return &Result{Code: CodeGranted, Grants: m.grant(s.id, requests, 0)}
	}
	if !c.Wait {
		return &Result{Code: CodeHeld, Holder: m.firstBlocker(claims)}
	}
	if r := m.admitWait(claims); r != nil {
		return r
	}
	if r := m.overShare(s.client, Usage{Waits: 1}); r != nil {
		return r
	}
	if cycle := m.cycle(s.id, c, claims); cycle != nil {
		return &Result{Code: CodeDeadlock, Cycle: cycle}
	}
	return &Result{Code: CodeQueued, Ticket: m.enqueue(s.id, c, requests, claims)}
}

// known returns the hold or the place in the queue that the requests have already, or nil.
func (m *Machine) known(s SessionID, requests []Request) *Result {
	var (
		holds   []*hold
		waiting *wait
		waits   int
	)
	for i := range requests {
		h, w := m.find(requests[i].Name, requests[i].ID)
		switch {
		case h != nil && h.session != s, w != nil && w.session != s:
			return &Result{Code: CodeConflict, Field: "RequestID", Detail: "another session has it"}
		case h != nil:
			holds = append(holds, h)
		case w != nil && (waiting == nil || w == waiting):
			waiting = w
			waits++
		case w != nil:
			return otherCompany()
		}
	}
	switch {
	case len(holds) == 0 && waits == 0:
		return nil
	case len(holds) == len(requests):
		return &Result{Code: CodeGranted, Grants: grantsOf(holds)}
	case waits == len(requests) && waits == len(waiting.requests):
		return &Result{Code: CodeQueued, Ticket: waiting.ticket}
	}
	return otherCompany()
}

func otherCompany() *Result {
	return &Result{Code: CodeConflict, Field: "RequestID", Detail: "it was sent before, together with other requests"}
}

func grantsOf(holds []*hold) []Grant {
	grants := make([]Grant, len(holds))
	for i, h := range holds {
		grants[i] = h.grant()
	}
	return grants
}

func (h *hold) grant() Grant {
	return Grant{Name: h.Name, RequestID: h.ID, Sealed: h.Sealed, Token: h.token, Nonce: h.Nonce, MinHold: h.MinHold, MaxHold: h.max}
}

// admit refuses requests beyond the limits, and requests that do not mix with the use of their names.
func (m *Machine) admit(requests []Request, claims []claim) *Result {
	for _, c := range claims {
		if e := m.names[c.name]; e != nil && !e.mixes(c) {
			return &Result{Code: CodeMismatch, Field: "Name", Detail: c.name}
		}
	}
	switch {
	case len(m.holds)+len(requests) > m.limits.Holds:
		return limited("Holds")
	case m.revision >= maxRevision:
		return limited("Revision")
	}
	return nil
}

func (m *Machine) admitWait(claims []claim) *Result {
	if len(m.waits) >= m.limits.Waits {
		return limited("Waits")
	}
	for _, c := range claims {
		e := m.names[c.name]
		if e == nil {
			continue
		}
		waiting := len(e.waits().queue)
		if waiting >= m.limits.WaitersPerName {
			return limited("WaitersPerName")
		}
		if most := m.policies.of(c.name).MaxQueue; most > 0 && waiting >= most {
			return &Result{
				Code: CodeLimit, Field: "WaitersPerName", Detail: fmt.Sprintf("the policy of %q lets %d wait", c.name, most),
			}
		}
	}
	return nil
}

// available reports whether a newcomer may have all of claims: the result of fits for a ticket after all others, in
// constant time per claim.
func (m *Machine) available(claims []claim) bool {
	for _, c := range claims {
		e := m.names[c.name]
		if e != nil && !(compatible(e.holders(), c) && compatible(e.waiters(), c)) {
			return false
		}
	}
	return true
}

// grant turns requests into holds.
//
// ticket is the ticket of the wait that the grant ends; zero: there was no wait.
func (m *Machine) grant(s SessionID, requests []Request, ticket uint64) []Grant {
	grants := make([]Grant, len(requests))
	for i := range requests {
		h := &hold{Request: requests[i], session: s, since: m.now, max: m.maxHold(s, &requests[i])}
		m.shareOwner(h)
		h.token = fencing.Token(m.revision + 1)
		if h.Kind != Exclusive {
			h.token = h.token.NotExclusive()
		}
		e := eventOf(EventAcquired, h)
		e.Ticket = ticket
		m.record(e)
		m.addHold(h)
		grants[i] = h.grant()
	}
	return grants
}

func (m *Machine) enqueue(s SessionID, c *Command, requests []Request, claims []claim) uint64 {
	w := &wait{session: s, requests: requests, under: c.Under, since: m.now, claims: slices.Clone(claims)}
	w.ticket = m.record(waitEvent(EventQueued, w))
	m.addWait(w)
	return w.ticket
}

// mostLooks bounds the search for a blocker.
const mostLooks = 10_000

// firstBlocker returns a blocker of claims; nil if the search would take too long.
func (m *Machine) firstBlocker(claims []claim) (first *Blocker) {
	steps := mostLooks
	m.blockers(claims, math.MaxUint64, &steps, func(name string, h *hold, w *wait) bool {
		b := blockerOf(name, h, w)
		first = &b
		return false
	})
	return first
}

func blockerOf(name string, h *hold, w *wait) Blocker {
	if h != nil {
		return Blocker{Name: name, Session: h.session, Owner: h.Owner, HoldID: h.HoldID}
	}
	r := &w.requests[0]
	return Blocker{Name: name, Session: w.session, Owner: r.Owner, HoldID: r.HoldID, Waits: true}
}
