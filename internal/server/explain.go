package server

import (
	"context"
	"time"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/machine"
)

// Explain implements lockpb.AdminServiceServer.
func (a *admin) Explain(_ context.Context, q *lockpb.ExplainRequest) (*lockpb.ExplainReply, error) {
	r := a.server.leadership.Load()
	if r == nil {
		return nil, a.server.notLeading()
	}
	all, more := a.server.replica.State.Machine.Explain(q.GetName())
	reply := &lockpb.ExplainReply{More: more}
	now := time.Now()
	age := func(since int64) int64 { return max(0, now.UnixNano()-since) }
	for i := range all {
		x := &all[i]
		name := &lockpb.ExplainedName{Name: x.Name, Waiters: uint32(x.Waiters), Forced: forcedOut(x.Forced, age)}
		for j := range x.Holders {
			h := &x.Holders[j]
			name.Holders = append(name.Holders, &lockpb.ExplainedClaim{
				Owner: h.Owner, HoldId: h.HoldID, Client: h.Client, Kind: uint32(h.Kind), Permits: h.Permits,
				Limit: h.Limit, AgeNanos: age(h.Since), LeftNanos: int64(r.Time.Left(h.Session)), Token: uint64(h.Token),
				Metadata: h.Metadata, WaitsFor: h.WaitsFor, Lingering: h.Lingering,
			})
		}
		for j := range x.Queue {
			w := &x.Queue[j]
			name.Queue = append(name.Queue, &lockpb.ExplainedClaim{
				Owner: w.Owner, HoldId: w.HoldID, Client: w.Client, Kind: uint32(w.Kind), Permits: w.Permits,
				Limit: w.Limit, AgeNanos: age(w.Since), LeftNanos: int64(r.Time.Left(w.Session)), WaitsFor: w.Names,
				Under: w.Under,
			})
		}
		reply.Names = append(reply.Names, name)
	}
	return reply, nil
}

// forcedOut converts a forced release to the wire's type; nil without a forced release.
func forcedOut(e *machine.Event, age func(int64) int64) *lockpb.ForcedRelease {
	if e == nil {
		return nil
	}
	return &lockpb.ForcedRelease{
		Owner: e.Owner, By: e.By, Principal: e.Principal, Reason: e.Reason, AgoNanos: age(e.At),
	}
}
