package lead

// A leadership from the election to its end, and who hears of its sessions. Each election makes a new one, and the last
// one has ended as a whole before: two of them would time the same sessions.

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// Config says what leads, and who hears of it.
type Config struct {
	Replica *replica.Replica
	// Limits are those of the cluster while this member leads.
	Limits machine.Limits
	// Now is the clock that times sessions.
	Now func() time.Time
	// Open lets clients use a leadership, and Shut ends that, also where it did not begin. Dismiss sends those away who
	// are connected. None of them may block.
	Open    func(*Leadership)
	Shut    func()
	Dismiss func()
	// CompareEvery is how often the members compare their states. 0: the default of package replica.
	CompareEvery time.Duration
	Log          *slog.Logger
}

// Listener hears of what befalls the sessions that are attached to it: a connection. What one sends waits in a lane of
// its own. It is compared by identity.
type Listener interface {
	// Hear is called for a grant, a loss and the end of a session. It must not block.
	Hear(*Leadership, *machine.Notice)
}

// Leadership is one term in which this member leads: all that a leader knows and a follower does not. It is made anew
// for each term, so that nothing of an earlier one is believed.
type Leadership struct {
	// Term is the log's view of it: the proof of leadership, and the members.
	Term *replica.Term
	// Time is when sessions and minimum holds end.
	Time *Timekeeper

	config   Config
	proposer *proposer
	end      context.CancelCauseFunc
	tasks    sync.WaitGroup

	mu       sync.Mutex
	attached map[machine.SessionID]Listener // who hears of the session's grants and losses
}

// Watch leads whenever this member is elected, until ctx ends.
func Watch(ctx context.Context, c Config) {
	var present *Leadership
	for {
		term, leads := c.Replica.LeadingTerm()
		if present != nil && (!leads || present.Term.Number() != term || ctx.Err() != nil) {
			present.stop()
			present = nil
		}
		if ctx.Err() != nil {
			return
		}
		if leads && present == nil {
			present = begin(c, term)
		}
		select {
		case <-c.Replica.Elections():
		case <-ctx.Done():
		}
	}
}

// begin begins to lead in term. It serves as soon as everything of earlier terms is applied, the limits are settled and
// the sessions have their time: before that it could tell a client that a session lives of which the log has the end.
func begin(c Config, term uint64) *Leadership {
	ctx, cancel := context.WithCancelCause(context.Background())
	r := &Leadership{Term: c.Replica.Lead(term), config: c, end: cancel, attached: map[machine.SessionID]Listener{}}
	r.proposer = newProposer(r.Term, c.Now)
	r.Time = newTimekeeper(c.Now, r.Propose)
	ready := make(chan struct{})
	r.tasks.Go(func() { r.Term.Run(ctx) })
	r.tasks.Go(func() { r.proposer.run(ctx) })
	r.tasks.Go(func() { r.serve(ctx, ready) })
	r.tasks.Go(func() {
		if !r.Term.Begin(ctx) {
			return
		}
		r.Time.clock = c.Replica.State.ClusterClock() // before this leader sets it
		if !r.settleLimits(ctx) || !r.stayClosed(ctx) {
			return
		}
		r.Time.alone.Store(c.Replica.Voters() == 1)
		r.Time.inherit(c.Replica.State.Machine)
		r.useLevel(ctx)
		r.tasks.Go(func() { r.Time.run(ctx) })
		r.tasks.Go(func() { r.keepMembers(ctx) })
		r.tasks.Go(func() { r.Term.CompareStates(ctx, c.CompareEvery) })
		c.Log.Info("leading", "term", term, "node", c.Replica.ID())
		close(ready)
	})
	return r
}

// silentEvery is how often a leader asks whether this member keeps silent.
const silentEvery = 100 * time.Millisecond

// serve lets connections use the leadership once it is ready, until ctx ends, except while this member keeps silent
// towards the others. They elect another leader then, but raft does not notice here before what stands still goes on,
// and clients would wait for nothing.
func (r *Leadership) serve(ctx context.Context, ready <-chan struct{}) {
	c := &r.config
	tick := time.NewTicker(silentEvery)
	defer tick.Stop()
	for began, serving, told := false, false, false; ; {
		why, alone := c.Replica.Silent(), c.Replica.Voters() == 1
		if why != nil && !told {
			c.Log.Error("this leader stands still", "error", why, "silent, so that another member leads", !alone)
		}
		told = why != nil
		r.Time.alone.Store(alone)
		serve := began && (why == nil || alone)
		switch {
		case serve && !serving:
			r.open()
		case !serve && serving:
			r.shut()
			c.Dismiss()
		}
		serving = serve
		select {
		case <-tick.C:
		case <-ready:
			began, ready = true, nil
		case <-ctx.Done():
			r.shut()
			return
		}
	}
}

// open lets clients, and the other members, use the leadership.
func (r *Leadership) open() {
	r.Term.Serve(true)
	r.config.Open(r)
}

// shut ends that.
func (r *Leadership) shut() {
	r.config.Shut()
	r.Term.Serve(false)
}

// membersEvery is how often a leader looks after the members.
const membersEvery = time.Second

// keepMembers gives votes to those who have caught up, learns where clients find each member, raises the level, and
// hands the leadership over if this member is in maintenance.
func (r *Leadership) keepMembers(ctx context.Context) {
	c := &r.config
	tick := time.NewTicker(membersEvery)
	defer tick.Stop()
	for {
		r.Term.KeepMembers(ctx)
		if err := r.raiseLevel(ctx); err != nil && ctx.Err() == nil {
			c.Log.Debug("the feature level stays", "error", err)
		}
		if c.Replica.InMaintenance() {
			if err := c.Replica.HandOver(ctx); err != nil && ctx.Err() == nil {
				c.Log.Debug("in maintenance, and still leading", "error", err)
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// stayClosed serves nobody for a while, if the cluster was restored and has served nobody since: a client may have
// taken a lock after the backup was made, and believes in it for as long as its TTL.
func (r *Leadership) stayClosed(ctx context.Context) bool {
	c := &r.config
	wait := c.Replica.State.ClosedFor()
	if wait == 0 {
		return true
	}
	c.Log.Info("restored from a backup: nobody is served until every earlier hold is over", "for", wait)
	select {
	case <-time.After(wait):
		return r.Term.Reopen(ctx)
	case <-ctx.Done():
		return false
	}
}

// stop ends the term. What is on its way is answered, then those who are connected learn to look elsewhere.
func (r *Leadership) stop() {
	r.end(replica.ErrNotLeader)
	r.tasks.Wait()
	r.Term.End()
	r.config.Dismiss()
}

// Submit takes a command of a client, or refuses it with ErrBusy or with the cause of the term's end.
func (r *Leadership) Submit(x Proposal) error { return r.proposer.submit(x) }

// Propose sends a command of the server itself through the log and then calls done; or refuses it.
func (r *Leadership) Propose(c machine.Command, done func(error)) error {
	return r.Submit(Proposal{Command: c, Done: func(o Outcome, err error) {
		done(err)
		r.Deliver(nil, o.Notices)
	}})
}

// Attach directs what happens to the session to l.
func (r *Leadership) Attach(id machine.SessionID, l Listener) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.attached[id] = l
}

// Claim is Attach for a session that is about to be opened: the client may send more for it before it has the answer.
func (r *Leadership) Claim(id machine.SessionID, l Listener) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.attached[id] == nil {
		r.attached[id] = l
	}
}

// AttachedTo are the sessions of which l hears.
func (r *Leadership) AttachedTo(l Listener) (all []machine.SessionID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, other := range r.attached {
		if other == l {
			all = append(all, id)
		}
	}
	return all
}

// Detach forgets a listener, which hears no more. Its sessions live on until their time is over: the client may come
// back on another connection.
func (r *Leadership) Detach(l Listener) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, other := range r.attached {
		if other == l {
			delete(r.attached, id)
		}
	}
}

// Listener is who hears of the session; nil if nobody does.
func (r *Leadership) Listener(id machine.SessionID) Listener {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.attached[id]
}

// Forget forgets who hears of a session.
func (r *Leadership) Forget(id machine.SessionID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.attached, id)
}

// Deliver tells listeners what a command did to their sessions, and times it. by sent the command, and has the answer
// to it; nil: the server itself sent it.
func (r *Leadership) Deliver(by Listener, notices []machine.Notice) {
	for i := range notices {
		n := &notices[i]
		hears := r.Listener(n.Session)
		switch n.Type {
		case machine.NoticeGranted:
			for _, g := range n.Grants {
				r.Time.Granted(g.Name, g.Token, g.MinHold)
			}
		case machine.NoticeSessionEnded:
			r.Time.Ended(n.Session)
			r.Forget(n.Session)
			if hears == by { // it has the answer to its command
				hears = nil
			}
		case machine.NoticeLingering:
			r.Time.linger(n.Name, n.Token)
			continue
		case machine.NoticeLost:
		}
		if hears != nil {
			hears.Hear(r, n)
		}
	}
}
