package server

// Rules. The state machine decides about changes of locks, at their place in the log, by the principal of the
// session. This file decides about reads, which are not logged.

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

// Ruled reports whether the cluster has rules, in the state that this member has applied.
func (s *Server) Ruled() bool { return s.rules().Parsed() != nil }

func (s *Server) rules() *machine.Rules { return s.replica.State.Machine.Rules() }

// asker is the principal behind a request: the client of a connection, or another principal for which it asks, as a
// gateway does.
type asker struct {
	client principal.Principal
	other  principal.Principal // empty: the client asks for itself
}

// asker returns the asker of a request.
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

// mayAsk refuses a request of the door of a member for itself under rules: the door may do everything, and would do
// it for a client whose principal it has not named.
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

// mayRead returns the error for a name that by may not read, or nil.
func (s *Server) mayRead(by asker, name string) *lockpb.Error {
	if why := s.rules().RefusalFor(by.client, by.other, rules.Read, name, false); why != "" {
		return &lockpb.Error{Code: lockpb.Code_CODE_DENIED, Field: "name", Message: why}
	}
	return nil
}

// reads returns a function that reports whether by may read a name, under the rules at the time of this call.
func (s *Server) reads(by asker) func(name string) bool {
	all := s.rules()
	return func(name string) bool { return all.RefusalFor(by.client, by.other, rules.Read, name, false) == "" }
}

// hide removes the blockers from an answer to an acquire, unless the asker may read every name in it.
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

// showCalls are the readCalls that show all names.
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

// refuseOperators refuses a call at the listener for operators with a certificate that lacks the right admin. A
// caller on the socket of the data directory may do everything, so rules cannot lock out every operator.
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

// setFile proposes a file of rules or policies, and waits until it is in force.
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
			if err == nil { // waits may have ended, and permits may be free
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
