package server

// Rules. What changes a lock is decided in the state machine, at its place in the log, by the principal of the session.
// Here is decided what nobody logs: who sees what.

import (
	"context"
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/principal"
	"github.com/fencelock/fencelock/internal/rules"
	"github.com/fencelock/fencelock/internal/server/lead"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// Ruled reports whether the cluster has rules, as far as this member knows.
func (s *Server) Ruled() bool { return s.rules().Parsed() != nil }

func (s *Server) rules() *machine.Rules { return s.replica.State.Machine.Rules() }

// asker is who asks: the client of a connection for itself, or for another principal, as a gateway does.
type asker struct {
	client principal.Principal
	other  principal.Principal // empty: the client asks for itself
}

// asker returns who asks by a request.
func (c *conn) asker(q *lockpb.Request) (asker, error) {
	by := asker{client: c.principal}
	if q.GetOnBehalfOf() == "" {
		return by, nil
	}
	var err error
	if by.other, err = principal.ParseSent(q.GetOnBehalfOf()); err != nil {
		return by, invalid("on_behalf_of", "%v", err)
	}
	return by, nil
}

// mayAsk refuses the door of a member, which may do everything, to do something for itself under rules: it would do it
// for a client whose principal it has not named.
func (x *call) mayAsk() error {
	if !x.door || x.by.other != "" || !x.server.Ruled() {
		return nil
	}
	switch x.request.Call.(type) {
	case *lockpb.Request_Acquire, *lockpb.Request_AcquireAll, *lockpb.Request_ForceRelease, *lockpb.Request_GetHolder,
		*lockpb.Request_List, *lockpb.Request_Watch:
		return refused(lockpb.Code_CODE_DENIED, "on_behalf_of", "a member's HTTP server asks for its clients alone")
	}
	return nil
}

// mayRead refuses to show a name that may not be read by the one who asks.
func (s *Server) mayRead(by asker, name string) *lockpb.Error {
	if why := s.rules().RefusalFor(by.client, by.other, rules.Read, name, false); why != "" {
		return &lockpb.Error{Code: lockpb.Code_CODE_DENIED, Field: "name", Message: why}
	}
	return nil
}

// reads reports whether a name may be read by the one who asks, by the rules of the moment of the call.
func (s *Server) reads(by asker) func(name string) bool {
	all := s.rules()
	return func(name string) bool { return all.RefusalFor(by.client, by.other, rules.Read, name, false) == "" }
}

// hide removes from an answer to an acquire who is in the way, unless every name that it is about may be read by the one
// who asks.
func (x *call) hide(e *lockpb.Error) {
	if e.GetHolder() == "" && e.GetHoldId() == "" && len(e.GetCycle()) == 0 {
		return
	}
	reads := x.server.reads(x.by)
	all := e.GetName() == "" || reads(e.GetName())
	for _, b := range e.Cycle {
		all = all && reads(b.Name)
	}
	if !all {
		e.Holder, e.HoldId, e.Cycle, e.Kind, e.Limit = "", "", nil, 0, 0
	}
}

// showCalls are those of readCalls that show all names.
var showCalls = map[string]bool{
	lockpb.AdminService_LookStale_FullMethodName: true, lockpb.AdminService_ListSessions_FullMethodName: true,
	lockpb.AdminService_Explain_FullMethodName: true,
}

// refuseReaders refuses at the socket for clients a call that shows all names to a client that may not read them.
func (s *Server) refuseReaders(ctx context.Context, method string) error {
	if !showCalls[method] {
		return nil
	}
	return denied(s.rules().Refusal(principalOf(ctx), rules.Read, "", true))
}

// refuseOperators refuses a call at the listener for operators by a certificate without the right admin. Who opens the
// socket of the data directory may do everything: so rules shut nobody out for good.
func (s *Server) refuseOperators(ctx context.Context) error {
	who := principalOf(ctx)
	if who == "" { // no TLS: the socket
		return nil
	}
	return denied(s.rules().Refusal(who, rules.Admin, "", false))
}

func denied(why string) error {
	if why == "" {
		return nil
	}
	return status.Error(codes.PermissionDenied, why)
}

// GetRules implements lockpb.AdminServiceServer.
func (a *admin) GetRules(context.Context, *lockpb.GetRulesRequest) (*lockpb.Rules, error) {
	if !a.server.Leads() {
		return nil, a.server.notLeading()
	}
	return a.server.rulesOut(), nil
}

func (s *Server) rulesOut() *lockpb.Rules {
	all := s.rules()
	return &lockpb.Rules{Text: all.Text, Version: all.Version}
}

// SetRules implements lockpb.AdminServiceServer.
func (a *admin) SetRules(ctx context.Context, q *lockpb.SetRulesRequest) (*lockpb.Rules, error) {
	s := a.server
	if err := s.setFile(ctx, machine.OpSetRules, q.GetText()); err != nil {
		return nil, err
	}
	out := s.rulesOut()
	s.log.Info("the rules changed", "version", out.Version, "bytes", len(out.Text))
	return out, nil
}

// GetPolicies implements lockpb.AdminServiceServer.
func (a *admin) GetPolicies(context.Context, *lockpb.GetPoliciesRequest) (*lockpb.Policies, error) {
	if !a.server.Leads() {
		return nil, a.server.notLeading()
	}
	return a.server.policiesOut(), nil
}

func (s *Server) policiesOut() *lockpb.Policies {
	return &lockpb.Policies{Text: s.replica.State.Machine.Policies().Text}
}

// SetPolicies implements lockpb.AdminServiceServer.
func (a *admin) SetPolicies(ctx context.Context, q *lockpb.SetPoliciesRequest) (*lockpb.Policies, error) {
	s := a.server
	if err := s.setFile(ctx, machine.OpSetPolicies, q.GetText()); err != nil {
		return nil, err
	}
	out := s.policiesOut()
	s.log.Info("the policies changed", "bytes", len(out.Text))
	return out, nil
}

// setFile has the cluster use a file of rules or policies, and waits until it is in force.
func (s *Server) setFile(ctx context.Context, op machine.Op, text string) error {
	r := s.leadership.Load()
	switch {
	case r == nil:
		return s.notLeading()
	case s.replica.State.Machine.Level() < machine.LevelRules:
		return status.Error(codes.FailedPrecondition, "a member of the cluster runs a version without rules and "+
			"policies")
	}
	type answer struct {
		result machine.Result
		err    error
	}
	landed := make(chan answer, 1)
	err := r.Submit(lead.Proposal{
		Command: machine.Command{Op: op, Rules: text},
		Done: func(o lead.Outcome, err error) {
			if err == nil { // waits may end, and permits may be free
				r.Deliver(nil, o.Notices)
			}
			landed <- answer{o.Result, err}
		},
	})
	if err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	select {
	case is := <-landed:
		switch {
		case errors.Is(is.err, replica.ErrNotLeader):
			return s.notLeading()
		case is.err != nil:
			return status.Error(codes.Unknown, is.err.Error())
		case is.result.Code != machine.CodeOK:
			return status.Error(codes.InvalidArgument, is.result.Detail)
		}
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
	return nil
}
