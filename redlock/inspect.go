package redlock

import (
	"context"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/rediswire"
)

// Look is engine.Inspector's: the hold with the votes of a majority, by its request, since servers may have it from
// different tries. Waiters is the length of the longest queue, as each waiter usually stands in one. So all servers that
// answer in time are waited for.
func (s *service) Look(ctx context.Context, name string) (info backend.State, err error) {
	info.Name = name
	if err := backend.ValidateName(name); err != nil {
		return info, err
	}
	if !s.seen.Load() { // an unfit set of servers shows nothing
		if err := s.Ping(ctx); err != nil {
			return info, err
		}
	}
	r := s.round(s.keys(name), s.nodeTimeout(time.Second))
	r.to(s.all(), redisscript.Inform)
	answered, votes := 0, map[string]int{}
	var holder *redisscript.State
	if !r.wait(ctx, s.nodeTimeout(time.Second), func(p *step) bool {
		state, ok := redisscript.ParseState(p.Answer)
		switch {
		case p.Err != nil:
			return false
		case !ok:
			r.fail(p.node, errAnswer)
			return false
		}
		answered++
		info.Waiters = max(info.Waiters, state.Waiters)
		if id := state.Hold.Request; state.Held {
			if votes[id]++; votes[id] == s.quorum {
				holder = &state
			}
		}
		return false
	}, nil) {
		r.silent()
	}
	switch {
	case holder != nil:
		h, err := redisconn.HolderOf(*holder)
		if err != nil {
			return info, err
		}
		info.Held, info.Holders = true, []backend.Holder{h}
	case answered < s.quorum:
		return info, redisconn.Unsent(r.undecided(false))
	}
	return info, nil
}

// Names is engine.Inspector's. No server has the votes of the others.
func (s *service) Names(context.Context, string, string) ([]backend.State, string, error) {
	return nil, "", backend.ErrUnsupported
}

// Check is engine.Checks's: one look at each queue for all waiters in it, which shows the server that they live, and
// lets it hand over. Waiters of a server that does not answer look for another leader.
func (s *service) Check(ctx context.Context, all []engine.Waiters, _ int) ([]engine.Found, error) {
	type look struct {
		queue   int
		members []int
	}
	out := make([]engine.Found, len(all))
	var looks []look
	var steps []*step
	patience := s.nodeTimeout(time.Second)
	deadline := time.Now().Add(patience)
	for q := range all {
		by := make([][]int, len(s.nodes))
		for k, e := range all[q].All {
			p := placeOf(e.Place)
			by[p.leader] = append(by[p.leader], k)
		}
		for node, members := range by {
			if len(members) == 0 {
				continue
			}
			p := &step{node: node, index: len(steps)}
			p.Step = rediswire.Step{
				Code: redisscript.Look, Keys: s.keys(all[q].Name), Args: []string{s.identity}, Deadline: deadline, Owner: p,
			}
			if len(members) > redisscript.MaxLook { // in no order: later looks carry the others
				members = members[:redisscript.MaxLook]
				out[q].Again = redisscript.FirstLook()
			}
			for _, k := range members {
				p.Args = append(p.Args, placeOf(all[q].All[k].Place).nonce)
			}
			looks, steps = append(looks, look{q, members}), append(steps, p)
		}
	}
	r := &round{s: s, deadline: deadline, sink: make(chan *step, len(steps)), open: s.all()}
	for _, p := range steps {
		p.sink = r.sink
		s.nodes[p.node].line.Submit(&p.Step)
	}
	left := len(steps)
	answered := make([]bool, len(steps))
	r.wait(ctx, patience, func(p *step) bool {
		r.open = s.all()
		left--
		of := looks[p.index]
		c := &out[of.queue]
		found, ok := redisscript.ParseLooked(p.Answer, len(of.members))
		if p.Err == nil && ok {
			answered[p.index] = true
			again := redisscript.NextLook(found.Length)
			if found.ExpiresIn >= 0 {
				again = min(again, redisscript.SettleIn(found.ExpiresIn))
			}
			if c.Again == 0 || again < c.Again {
				c.Again = again
			}
			for k, at := range found.Places {
				if at != redisscript.PlaceQueued {
					c.Turns = append(c.Turns, of.members[k])
				}
			}
		}
		return left == 0
	}, nil)
	for i, of := range looks {
		if !answered[i] && !r.ended {
			s.nodes[steps[i].node].sick.Store(true)
			out[of.queue].Turns = slices.Concat(out[of.queue].Turns, of.members)
		}
	}
	return out, nil
}
