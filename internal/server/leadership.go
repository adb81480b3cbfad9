package server

import (
	"cmp"
	"context"
	"sync"
	"time"

	"github.com/fencelock/fencelock/internal/machine"
)

// leadership is one term in which this member leads: all that a leader knows and a follower does not. It is made anew
// for each term, so that nothing of an earlier one is believed.
type leadership struct {
	server    *Server
	term      uint64
	confirmer *confirmer
	proposer  *proposer
	time      *timekeeper

	end   context.CancelCauseFunc
	tasks sync.WaitGroup

	mu       sync.Mutex
	attached map[machine.SessionID]*conn // who hears of the session's grants and losses
}

// watchLeadership begins and ends leaderships until ctx ends.
func (s *Server) watchLeadership(ctx context.Context) {
	var present *leadership
	for {
		term, leads := s.node.leadingTerm()
		if present != nil && (!leads || present.term != term || ctx.Err() != nil) {
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
		// The channel keeps the last change only: losing the leadership and winning it again looks like winning it.
		case <-s.node.raft.LeaderCh():
		case <-ctx.Done():
		}
	}
}

// newLeadership begins to lead in term. It serves as soon as everything of earlier terms is applied.
func (s *Server) newLeadership(term uint64) *leadership {
	ctx, cancel := context.WithCancelCause(context.Background())
	r := &leadership{
		server: s, term: term, end: cancel, attached: map[machine.SessionID]*conn{},
		confirmer: newConfirmer(s.node.raft, s.node.proof, s.node.id, term),
		proposer:  newProposer(term, s.node.raft.Apply, s.node.dead, s.config.now),
	}
	r.time = newTimekeeper(s.config.now, r.propose)
	r.tasks.Go(func() { r.confirmer.run(ctx) })
	if s.config.hangAfter != 0 {
		r.proposer.watchdog.after = s.config.hangAfter
	}
	r.tasks.Go(func() { r.proposer.run(ctx) })
	r.tasks.Go(func() { r.runWatchdog(ctx) })
	r.tasks.Go(func() {
		if !r.awaitApplied(ctx) {
			return
		}
		r.time.clock = s.node.fsm.clusterClock() // before this leader sets it
		if !r.settleLimits(ctx) || !r.stayClosed(ctx) {
			return
		}
		r.time.alone.Store(voters(s.node.servers()) == 1)
		r.time.inherit(s.node.fsm.machine)
		r.useLevel(ctx)
		r.tasks.Go(func() { r.time.run(ctx) })
		r.tasks.Go(func() { r.keepMembers(ctx) })
		r.tasks.Go(func() { r.compareStates(ctx, cmp.Or(s.config.compareEvery, compareEvery)) })
		s.log.Info("leading", "term", term, "node", s.node.id)
		r.serve(ctx)
	})
	return r
}

// serve lets connections use the leadership until ctx ends, except while the disk or the log stands still. The other
// members elect another leader then, but raft does not notice here before the disk goes on, and clients would wait for
// nothing.
func (r *leadership) serve(ctx context.Context) {
	s := r.server
	tick := time.NewTicker(stallAfter / 5)
	defer tick.Stop()
	for serving := false; ; {
		alone := voters(s.node.servers()) == 1
		r.time.alone.Store(alone)
		stalled := s.node.stores.watch.stalled() && !alone
		switch {
		case !serving && !stalled:
			serving = true
			s.open(r)
		case serving && stalled:
			serving = false
			s.log.Warn("not serving: the disk or the log stands still")
			s.shut()
			s.dismiss()
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			s.shut()
			return
		}
	}
}

// awaitApplied returns once everything of earlier terms is applied: an entry of this term has gone through the log.
// The ends of sessions among it must be known before anybody is told that a session lives.
func (r *leadership) awaitApplied(ctx context.Context) bool {
	s := r.server
	own := fact{Member: s.node.id, Client: s.advertise}
	if s.node.fsm.cluster() == "" {
		own.Cluster = newClusterID()
	}
	return r.tell(ctx, own)
}

// stayClosed serves nobody for a while, if the cluster was restored and has served nobody since: whoever held something
// before, of which the backup knows nothing, is to know by then that it has not.
func (r *leadership) stayClosed(ctx context.Context) bool {
	s := r.server
	wait := s.node.fsm.closedFor()
	if wait == 0 {
		return true
	}
	s.log.Info("restored from a backup: nobody is served until every earlier hold is over", "for", wait)
	select {
	case <-time.After(wait):
		return r.tell(ctx, fact{Opened: true})
	case <-ctx.Done():
		return false
	}
}

// tell puts a fact into the log of this term. It reports false if ctx ended before.
func (r *leadership) tell(ctx context.Context, x fact) bool {
	s := r.server
	for ctx.Err() == nil {
		err := s.node.proposeFact(r.term, x)
		r.proposer.watchdog.answer(err) // it takes as long as it takes to apply all that was there
		if err == nil {
			return true
		}
		s.log.Debug("an entry about the cluster failed", "term", r.term, "error", err)
		select {
		case <-time.After(retryAfter):
		case <-ctx.Done():
		}
	}
	return false
}

// open lets connections use r.
func (s *Server) open(r *leadership) {
	s.leadership.Store(r)
	if s.front != nil {
		s.front.leads(true)
	}
}

// shut ends that.
func (s *Server) shut() {
	s.leadership.Store(nil)
	if s.front != nil {
		s.front.leads(false)
	}
}

// stop ends the term. What is on its way is answered, then those who are connected learn to look elsewhere.
func (r *leadership) stop() {
	r.end(errNotLeader)
	r.tasks.Wait()
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
