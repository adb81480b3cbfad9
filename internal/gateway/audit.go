package gateway

import (
	"cmp"
	"net/http"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/audit"
)

// refused records the refusal of a request, for the audit log.
type refused struct {
	problem *Problem // nil if it was not refused
	event   string   // the operation, or "request" if the request was refused before routing
	name    string   // of the lock
}

// refusing records the problem in the answer to a request. The first event counts.
func refusing(w http.ResponseWriter, event string, p *Problem) {
	if a, ok := w.(*answeredWriter); ok && p != nil {
		a.problem, a.event = p, cmp.Or(a.event, event)
	}
}

// noteRefusal records the problem in the answer to an operation, and the name of the lock.
func noteRefusal(r *http.Request, w http.ResponseWriter, operation string, p *Problem) {
	refusing(w, operation, p)
	if a, ok := w.(*answeredWriter); ok {
		a.name = cmp.Or(p.LockKey, nameOf(r))
	}
}

// audit writes an event about a request.
func (g *Gateway) audit(r *http.Request, e audit.Event) {
	if g.o.Audit == nil {
		return
	}
	e.Server, e.From = g.o.AuditAs, r.RemoteAddr
	e.Principal = cmp.Or(scopeOf(r), string(addressOf(r)))
	if g.decides() {
		e.Rules = g.o.Access.Rules().Digest()
	}
	g.o.Audit.Write(e)
}

// auditRefusal writes an event if the request was denied, unless the lock service denied it and got the principal: it
// then writes the event itself.
func (g *Gateway) auditRefusal(r *http.Request, was *refused) {
	if g.o.Audit == nil || was.problem == nil || g.sends() && was.problem.byService {
		return
	}
	if code := was.problem.Code; code != codeDenied && code != codeUnauthenticated {
		return
	}
	e := audit.Event{Event: was.event, Outcome: audit.Denied, Name: was.name, Reason: was.problem.Detail}
	if e.Event == "request" {
		e.Name = r.Method + " " + r.URL.Path
	}
	g.audit(r, e)
}

// auditHolds writes an event for each hold that a request began or ended, if the audit log includes locks.
func (g *Gateway) auditHolds(r *http.Request, event string, grants ...backend.Grant) {
	if !g.o.Audit.Locks() {
		return
	}
	for i := range grants {
		of := &grants[i]
		g.audit(r, audit.Event{
			Event: event, Outcome: audit.Done, Name: of.Name, Owner: of.Owner, Holder: scopeOf(r), Token: of.Token.Order(),
		})
	}
}
