package server

// The ids that clients know, and the state machine's ids for them: see machine.Seal.

import (
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/lead"
)

// clientIDs are the ids of one session, and of the requests on it.
type clientIDs struct {
	secret  machine.SessionID // as the client knows the session; zero: no session
	session machine.SessionID // as the state machine knows it
	hidden  bool              // the state machine has no ids of clients
	seal    machine.Seal      // if hidden
}

func idsOf(r *lead.Leadership, secret machine.SessionID) clientIDs {
	ids := clientIDs{secret: secret, session: sessionIn(r, secret), hidden: r.HidesIDs}
	if ids.hidden && secret != (machine.SessionID{}) {
		ids.seal = machine.NewSeal(secret)
	}
	return ids
}

// sessionIn returns the session's id in the state machine.
func sessionIn(r *lead.Leadership, secret machine.SessionID) machine.SessionID {
	if r.HidesIDs {
		return secret.Hidden()
	}
	return secret
}

// hide prepares a command for the state machine. It returns the error in its ids, or nil.
func (ids *clientIDs) hide(c *machine.Command, leads *lead.Leadership) *machine.Result {
	c.Session = ids.session
	if !leads.HidesIDs {
		return nil
	}
	return c.HideRequests(ids.seal)
}

// request returns the id of a request as the client of the session knows it; empty if it is not sealed for this
// session.
func (ids *clientIDs) request(id, sealed string) string {
	switch {
	case !ids.hidden:
		return id
	case sealed == "":
		return ""
	}
	return ids.seal.Open(id, sealed)
}

// nameGrants puts the ids of q into the grants of its answer: the grants of an acquire are in its order.
func nameGrants(q *lockpb.Request, grants []*lockpb.Grant) {
	for i, g := range grants {
		switch c := q.Call.(type) {
		case *lockpb.Request_Acquire:
			g.RequestId = c.Acquire.GetRequestId()
		case *lockpb.Request_AcquireAll:
			g.RequestId = c.AcquireAll.GetRequests()[i].GetRequestId()
		case *lockpb.Request_CancelWait:
			g.RequestId = c.CancelWait.GetRequestId()
		case *lockpb.Request_Move:
			g.RequestId = c.Move.GetRequestId()
		}
	}
}
