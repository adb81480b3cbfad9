package server

import (
	"context"
	"sync"
	"time"

	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// leadership is one term in which this member leads: all that a leader knows and a follower does not. It is made anew
// for each term, so that nothing of an earlier one is believed.
type leadership struct {
	server   *Server
	log      *replica.Term
	proposer *proposer
	time     *timekeeper

	end   context.CancelCauseFunc
	tasks sync.WaitGroup

	mu       sync.Mutex
	attached map[machine.SessionID]*conn // who hears of the session's grants and losses
}

// watchLeadership begins and ends leaderships until ctx ends.
func (s *Server) watchLeadership(ctx context.Context) {
	var present *leadership
	for {
		term, leads := s.replica.LeadingTerm()
		if present != nil && (!leads || present.log.Number() != term || ctx.Err() != nil) {
			present.stop()
			present = nil
		}
		if ctx.Err() != nil {
			return
		}
		if leads && present == nil {
			present = s.newLeadership(term)
		}
		select {
		case <-s.replica.Elections():
		case <-ctx.Done():
		}
	}
}

// newLeadership begins to lead in term. It serves as soon as everything of earlier terms is applied.
func (s *Server) newLeadership(term uint64) *leadership {
	ctx, cancel := context.WithCancelCause(context.Background())
	r := &leadership{server: s, log: s.replica.Lead(term), end: cancel, attached: map[machine.SessionID]*conn{}}
	r.proposer = newProposer(r.log, s.config.now)
	r.time = newTimekeeper(s.config.now, r.propose)
	ready := make(chan struct{})
	r.tasks.Go(func() { r.log.Run(ctx) })
	r.tasks.Go(func() { r.proposer.run(ctx) })
	r.tasks.Go(func() { r.serve(ctx, ready) })
	r.tasks.Go(func() {
		if !r.log.Begin(ctx) {
			return
		}
		r.time.clock = s.replica.State.ClusterClock() // before this leader sets it
		if !r.settleLimits(ctx) || !r.stayClosed(ctx) {
			return
		}
		r.time.alone.Store(s.replica.Voters() == 1)
		r.time.inherit(s.replica.State.Machine)
		r.useLevel(ctx)
		r.tasks.Go(func() { r.time.run(ctx) })
		r.tasks.Go(func() { r.keepMembers(ctx) })
		r.tasks.Go(func() { r.log.CompareStates(ctx, s.config.compareEvery) })
		s.log.Info("leading", "term", term, "node", s.replica.ID())
		close(ready)
	})
	return r
}

// silentEvery is how often a leader asks whether this member keeps silent.
const silentEvery = 100 * time.Millisecond

// serve lets connections use the leadership once it is ready, until ctx ends, except while this member keeps silent
// towards the others. They elect another leader then, but raft does not notice here before what stands still goes on, and
// clients would wait for nothing.
func (r *leadership) serve(ctx context.Context, ready <-chan struct{}) {
	s := r.server
	tick := time.NewTicker(silentEvery)
	defer tick.Stop()
	for began, serving, told := false, false, false; ; {
		why, alone := s.replica.Silent(), s.replica.Voters() == 1
		if why != nil && !told {
			s.log.Error("this leader stands still", "error", why, "silent, so that another member leads", !alone)
		}
		told = why != nil
		r.time.alone.Store(alone)
		serve := began && (why == nil || alone)
		switch {
		case serve && !serving:
			s.open(r)
		case !serve && serving:
			s.shut(r)
			s.dismiss()
		}
		serving = serve
		select {
		case <-tick.C:
		case <-ready:
			began, ready = true, nil
		case <-ctx.Done():
			s.shut(r)
			return
		}
	}
}

// membersEvery is how often a leader looks after the members.
const membersEvery = time.Second

// keepMembers gives votes to those who have caught up, learns where clients find each member, raises the level, and
// hands the leadership over if this member is in maintenance.
func (r *leadership) keepMembers(ctx context.Context) {
	s := r.server
	tick := time.NewTicker(membersEvery)
	defer tick.Stop()
	for {
		r.log.KeepMembers(ctx)
		if err := r.raiseLevel(ctx); err != nil && ctx.Err() == nil {
			s.log.Debug("the feature level stays", "error", err)
		}
		if s.replica.InMaintenance() {
			if err := s.replica.HandOver(ctx); err != nil && ctx.Err() == nil {
				s.log.Debug("in maintenance, and still leading", "error", err)
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// stayClosed serves nobody for a while, if the cluster was restored and has served nobody since: whoever held something
// before, of which the backup knows nothing, is to know by then that it has not.
func (r *leadership) stayClosed(ctx context.Context) bool {
	s := r.server
	wait := s.replica.State.ClosedFor()
	if wait == 0 {
		return true
	}
	s.log.Info("restored from a backup: nobody is served until every earlier hold is over", "for", wait)
	select {
	case <-time.After(wait):
		return r.log.Reopen(ctx)
	case <-ctx.Done():
		return false
	}
}

// open lets connections use r.
func (s *Server) open(r *leadership) {
	r.log.Serve(true)
	s.leadership.Store(r)
	if s.front != nil {
		s.front.leads(true)
	}
}

// shut ends that.
func (s *Server) shut(r *leadership) {
	s.leadership.Store(nil)
	r.log.Serve(false)
	if s.front != nil {
		s.front.leads(false)
	}
}

// stop ends the term. What is on its way is answered, then those who are connected learn to look elsewhere.
func (r *leadership) stop() {
	r.end(replica.ErrNotLeader)
	r.tasks.Wait()
	r.log.End()
	r.server.dismiss()
}

// propose sends a command of the timekeeper through the log.
func (r *leadership) propose(c machine.Command, done func(error)) error {
	return r.proposer.submit(proposal{command: c, done: func(o outcome, err error) {
		done(err)
		r.deliver(nil, o.notices)
	}})
}

// attach directs what happens to the session to c.
func (r *leadership) attach(id machine.SessionID, c *conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.attached[id] = c
}

// claim is attach for a session that is about to be opened: the client may send more for it before it has the answer.
func (r *leadership) claim(id machine.SessionID, c *conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.attached[id] == nil {
		r.attached[id] = c
	}
}

// attachedTo are the sessions of which the connection hears.
func (r *leadership) attachedTo(c *conn) (all []machine.SessionID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, other := range r.attached {
		if other == c {
			all = append(all, id)
		}
	}
	return all
}

// detach forgets the connection, which has ended.
func (r *leadership) detach(c *conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, other := range r.attached {
		if other == c {
			delete(r.attached, id)
		}
	}
}

func (r *leadership) connOf(id machine.SessionID) *conn {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.attached[id]
}

// deliver tells those whom it concerns what a command did to others. by is the connection that sent the command, if
// any.
func (r *leadership) deliver(by *conn, notices []machine.Notice) {
	for i := range notices {
		n := &notices[i]
		switch n.Type {
		case machine.NoticeGranted:
			for _, g := range n.Grants {
				r.time.granted(g.Name, g.Token, g.MinHold)
			}
			if c := r.connOf(n.Session); c != nil {
				c.push(grantedPush(n, r.time))
			}
		case machine.NoticeLost:
			if c := r.connOf(n.Session); c != nil {
				c.push(lostPush(n))
			}
		case machine.NoticeSessionEnded:
			r.time.ended(n.Session)
			if c := r.connOf(n.Session); c != nil {
				r.forget(n.Session)
				if c != by {
					c.push(lostPush(n))
				}
			}
		case machine.NoticeLingering:
			r.time.linger(n.Name, n.Token)
		}
	}
}

func (r *leadership) forget(id machine.SessionID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.attached, id)
}
