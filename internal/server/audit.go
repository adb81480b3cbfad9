package server

// Audit. The member that answers a request writes its denial; the member that an operator asks writes the operator's
// call; the leader that proposed an entry writes its effects: see lead.trail.

import (
	"cmp"
	"context"
	"strings"
	"unicode"

	"google.golang.org/grpc/codes"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/audit"
	"github.com/fencelock/fencelock/internal/rules"
)

// socketPrincipal is the principal of calls over the socket of the data directory: the user of the server, or root.
const socketPrincipal = "socket:"

// audit writes an event of this member.
func (s *Server) audit(e audit.Event) {
	if s.config.Audit != nil {
		e.Server, e.Rules = s.replica.ID(), s.rules().Revision()
		s.config.Audit.Write(e)
	}
}

// addressFrom returns the address from which a call comes; empty within the process, and for a Unix socket.
func addressFrom(ctx context.Context) string {
	p, ok := grpcpeer.FromContext(ctx)
	if !ok || p.Addr == nil || p.Addr.Network() == "unix" {
		return ""
	}
	return p.Addr.String()
}

// pingedName is the name that clients look at to see that a leader answers: a denial is an answer, too.
const pingedName = "builtin"

// auditDenial writes that a request of a client was denied.
func (c *conn) auditDenial(q *lockpb.Request, e *lockpb.Error) {
	if c.server.config.Audit == nil || q.GetGetHolder().GetName() == pingedName {
		return
	}
	what, name, owner := c.about(q)
	event := audit.Event{
		Event: what, Outcome: audit.Denied, Principal: string(c.reported), From: c.address,
		Name: cmp.Or(e.GetName(), name), Owner: owner, By: q.GetForceRelease().GetBy(), Reason: e.GetMessage(),
	}
	if q.GetOnBehalfOf() != "" {
		event.Principal, event.Via = q.GetOnBehalfOf(), event.Principal
	}
	c.server.audit(event)
}

// about returns the operation, the name and the owner of a request. Of several names it is the name that the rules
// deny, or else the first.
func (c *conn) about(q *lockpb.Request) (what, name, owner string) {
	m := q.ProtoReflect()
	if field := m.WhichOneof(m.Descriptor().Oneofs().ByName("call")); field != nil {
		what = strings.ReplaceAll(string(field.Name()), "_", "-")
	}
	if all := q.GetAcquireAll().GetRequests(); len(all) > 0 {
		found := all[0]
		by, _ := c.asker(q)
		for _, r := range all {
			if c.server.rules().RefusalFor(by.client, by.other, rules.Acquire, r.GetName(), r.GetHierarchical()) != "" {
				found = r
				break
			}
		}
		return what, found.GetName(), found.GetOwner()
	}
	name = cmp.Or(q.GetAcquire().GetName(), q.GetCancelWait().GetName(), q.GetRelease().GetName(), q.GetMove().GetName(),
		q.GetForceRelease().GetName(), q.GetGetHolder().GetName(), q.GetWatch().GetName(), q.GetList().GetPrefix())
	return what, name, q.GetAcquire().GetOwner()
}

// auditCall writes the outcome of a call of lockpb.AdminService; in is nil if it is a stream. For calls without
// changes it writes only denials.
func (s *Server) auditCall(ctx context.Context, method string, in any, err error) {
	if s.config.Audit == nil {
		return
	}
	outcome := outcomeOf(err)
	switch {
	case outcome == audit.Denied:
	case readCalls[method], method == lockpb.AdminService_GetRules_FullMethodName,
		method == lockpb.AdminService_GetPolicies_FullMethodName:
		return
	case status.Code(err) == codes.Unavailable && !s.Leads() && method != lockpb.AdminService_Backup_FullMethodName:
		return // the client asks the leader next
	}
	e := audit.Event{
		Event: eventOf(method), Outcome: outcome, Principal: string(reportedOf(ctx)), From: addressFrom(ctx),
	}
	if p, ok := grpcpeer.FromContext(ctx); ok && p.Addr != nil && p.Addr.Network() == "unix" {
		e.Principal = socketPrincipal
	}
	if err != nil {
		e.Reason = status.Convert(err).Message()
	}
	switch q := in.(type) {
	case interface{ GetName() string }:
		e.Name = q.GetName()
	case interface{ GetNodeId() string }:
		e.Name = q.GetNodeId()
	case interface{ GetPeerAddress() string }:
		e.Name = q.GetPeerAddress()
	case *lockpb.SetMaintenanceRequest:
		e.Name = s.replica.ID()
		if err == nil && q.GetOn() {
			e.Reason = "on"
		} else if err == nil {
			e.Reason = "off"
		}
	}
	s.audit(e)
}

// outcomeOf returns the outcome of a call of lockpb.AdminService.
func outcomeOf(err error) string {
	switch status.Code(err) {
	case codes.OK:
		return audit.Done
	case codes.PermissionDenied, codes.Unauthenticated:
		return audit.Denied
	case codes.Unknown, codes.Canceled, codes.DeadlineExceeded:
		return audit.Unknown
	}
	return audit.Failed
}

// eventOf returns the name of the event for a method: add-member for AddMember.
func eventOf(method string) string {
	var b strings.Builder
	for _, r := range method[strings.LastIndexByte(method, '/')+1:] {
		if unicode.IsUpper(r) && b.Len() > 0 {
			b.WriteByte('-')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

// auditJoin writes that this member, as the leader, has admitted another member.
func (s *Server) auditJoin(id, address string, approved bool, replaced string) {
	e := audit.Event{Event: "join", Outcome: audit.Done, From: address, Name: id, Reason: "waits for approval"}
	if approved {
		e.Reason = "approved"
	}
	if replaced != "" {
		e.Reason += ", in place of " + replaced
	}
	s.audit(e)
}
