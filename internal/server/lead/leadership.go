package lead

// A leadership from the election to its end, and the listeners of its sessions. Each election creates a new leadership
// after the previous one has ended completely: two leaderships would time the same sessions.

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/fencelock/fencelock/internal/audit"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// Config configures leaderships and their listeners.
type Config struct {
	Replica *replica.Replica
	// Limits are the cluster's limits while this member leads.
	Limits machine.Limits
	// Rules are the first rules of a cluster that never had rules. Empty: no rules.
	Rules string
	// Identified reports that clients have principals, so that rules can distinguish them.
	Identified bool
	// Now is the clock that times sessions.
	Now func() time.Time
	// Open lets clients use a leadership. Shut ends that, and may be called without Open. Dismiss disconnects clients.
	// They must not block.
	Open    func(*Leadership)
	Shut    func()
	Dismiss func()
	// Closed is called with a leadership that does not serve clients yet, and with nil when that ends. It must not block.
	Closed func(*Closed)
	// Meter gets the counts. Nil: no counting.
	Meter Meter
	// Audit gets the effects of the leader's entries. Nil: no audit log.
	Audit *audit.Log
	// CompareEvery is the interval at which the members compare their states. 0: the default of package replica.
	CompareEvery time.Duration
	Log          *slog.Logger
}

// Listener is a connection. It receives the notices of the sessions that are attached to it, and its commands wait in a
// lane of their own. Listeners are compared by identity.
type Listener interface {
	// Hear is called for a grant, a loss and the end of a session. secret is the id by which the client knows the session.
	// It must not block.
	Hear(r *Leadership, secret machine.SessionID, n *machine.Notice)
}

// attachment is the listener of a session, and the id by which the client knows the session.
type attachment struct {
	to     Listener
	secret machine.SessionID
}

// Leadership is one term in which this member leads: the state that only a leader has. Each term has a new Leadership,
// so that it cannot use state of an earlier term.
type Leadership struct {
	// Term is the part of package replica: the log of the term, the proof of leadership, and the members.
	Term *replica.Term
	// Time times sessions, minimum holds and maximum holds.
	Time *Timekeeper
	// HidesIDs reports that the state has hashes of the ids of sessions and requests. It is set before clients use the
	// leadership, and never changes.
	HidesIDs bool

	config   Config
	proposer *proposer
	account  *account
	end      context.CancelCauseFunc
	tasks    sync.WaitGroup

	mu       sync.Mutex
	attached map[machine.SessionID]attachment // the listeners of sessions

	rise chan uint32 // the level of the leadership that must replace this one; see raiseLevel
}

// Watch leads whenever this member is elected, until ctx ends.
func Watch(ctx context.Context, c Config) {
	var present *Leadership
	for level := uint32(0); ; {
		term, leads := c.Replica.LeadingTerm()
		if present != nil && (!leads || present.Term.Number() != term || ctx.Err() != nil) {
			present.stop()
			present = nil
		}
		if ctx.Err() != nil {
			return
		}
		if leads && present == nil {
			present = begin(c, term, level)
		}
		var rise chan uint32 // nil without a leadership
		if level = 0; present != nil {
			rise = present.rise
		}
		select {
		case <-c.Replica.Elections():
		case level = <-rise:
			present.stop()
			present = nil
		case <-ctx.Done():
		}
	}
}

// begin starts a leadership in term. It serves once all entries of earlier terms are applied, the limits are in the log
// and the sessions are timed: earlier, it could confirm a session whose end is in the log. If level is not zero, the
// leadership raises the feature level to it before it serves.
func begin(c Config, term uint64, level uint32) *Leadership {
	ctx, cancel := context.WithCancelCause(context.Background())
	r := &Leadership{
		Term: c.Replica.Lead(term), config: c, end: cancel,
		attached: map[machine.SessionID]attachment{}, rise: make(chan uint32, 1),
	}
	r.account = newAccount(&c)
	r.proposer = newProposer(r.Term, c.Now)
	r.proposer.account = r.account
	r.Time = newTimekeeper(c.Now, r.Propose)
	ready := make(chan struct{})
	r.tasks.Go(func() { r.Term.Run(ctx) })
	r.tasks.Go(func() { r.proposer.run(ctx) })
	r.tasks.Go(func() { r.serve(ctx, ready) })
	r.tasks.Go(func() {
		if !r.Term.Begin(ctx) {
			return
		}
		r.Time.clock = c.Replica.State.ClusterClock() // read before this leader sets the clock
		if !r.settleLimits(ctx) || !r.unrivalled(ctx) || !r.stayClosed(ctx) || !r.Term.PermitTTL(ctx) {
			return
		}
		r.Time.alone.Store(c.Replica.Voters() == 1)
		if err := r.levelUp(ctx, level); err != nil && ctx.Err() == nil {
			c.Log.Debug("the feature level stays", "error", err)
		}
		r.HidesIDs = c.Replica.State.Machine.Level() >= machine.LevelHiddenIDs
		r.Time.inherit(c.Replica.State.Machine)
		r.account.inherit(c.Replica.State.Machine, time.Now())
		r.useLevel(ctx)
		r.tasks.Go(func() { r.Time.run(ctx) })
		r.tasks.Go(func() { r.keepMembers(ctx) })
		r.tasks.Go(func() { r.Term.CompareStates(ctx, c.CompareEvery) })
		r.tasks.Go(func() { r.Term.KeepHealth(ctx) })
		c.Log.Info("leading", "term", term, "node", c.Replica.ID())
		close(ready)
	})
	return r
}

// silentEvery is the interval at which a leader checks whether this member has stopped sending to the other members.
const silentEvery = 100 * time.Millisecond

// serve lets connections use the leadership once it is ready, until ctx ends, except while this member has stopped
// sending to the other members. They then elect another leader, but raft here notices that only when the blocked part
// continues. Until then, clients would wait for answers that do not come.
func (r *Leadership) serve(ctx context.Context, ready <-chan struct{}) {
	c := &r.config
	tick := time.NewTicker(silentEvery)
	defer tick.Stop()
	for began, serving, told := false, false, false; ; {
		why, alone := c.Replica.Silent(), c.Replica.Voters() == 1
		if why != nil && !told {
			c.Log.Error("this leader makes no progress", "error", why, "silent, so that another member leads", !alone)
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

// shut ends the effect of open.
func (r *Leadership) shut() {
	r.config.Shut()
	r.Term.Serve(false)
}

// membersEvery is the interval of keepMembers.
const membersEvery = time.Second

// keepMembers periodically gives votes to members that have caught up, records the addresses of members for clients,
// lowers the greatest TTL and raises the feature level. If this member is in maintenance, it transfers the leadership.
func (r *Leadership) keepMembers(ctx context.Context) {
	c := &r.config
	tick := time.NewTicker(membersEvery)
	defer tick.Stop()
	for began := c.Now(); ; {
		r.Term.KeepMembers(ctx)
		if err := r.Term.LowerTTL(ctx, began); err != nil && ctx.Err() == nil {
			c.Log.Debug("the greatest TTL stays", "error", err)
		}
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

// unrivalled waits until this member has looked for other generations of its cluster, and may serve. It returns false
// if ctx ends earlier. If the member must not serve because of another generation, it stops, which ends ctx.
func (r *Leadership) unrivalled(ctx context.Context) bool {
	select {
	case <-r.config.Replica.Unrivalled():
		return true
	case <-ctx.Done():
		return false
	}
}

// stop ends the term. It waits until pending commands are answered, and then dismisses the clients. If this member has
// stopped sending to the other members, stop dismisses the clients immediately, because no answer comes before the
// blocked part continues.
func (r *Leadership) stop() {
	r.end(replica.ErrNotLeader)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		r.tasks.Wait()
	}()
	tick := time.NewTicker(silentEvery)
	defer tick.Stop()
	for dismissed, waiting := false, true; waiting; {
		select {
		case <-ended:
			waiting = false
		case <-tick.C:
			if !dismissed && r.config.Replica.Silent() != nil {
				dismissed = true
				r.config.Dismiss()
			}
		}
	}
	r.config.Replica.State.Machine.Unfollow()
	r.Term.End()
	r.config.Dismiss()
}

// Standing returns the current counts, for operators.
func (r *Leadership) Standing() Standing {
	s, m := r.account.standing(), r.config.Replica.State.Machine
	s.Sessions, s.Limits = m.Total().Sessions, m.Limits()
	return s
}

// Submit accepts a command of a client, or refuses it with ErrBusy or with the cause of the term's end.
func (r *Leadership) Submit(x Proposal) error { return r.proposer.submit(x) }

// Propose sends a command of the server itself through the log and then calls done. If it returns an error, it does not
// call done.
func (r *Leadership) Propose(c machine.Command, done func(error)) error {
	return r.Submit(Proposal{Command: c, Done: func(o Outcome, err error) {
		done(err)
		r.Deliver(nil, o.Notices)
	}})
}

// Attach makes l the listener of the session. secret is the id by which the client knows the session.
func (r *Leadership) Attach(id, secret machine.SessionID, l Listener) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.attached[id] = attachment{l, secret}
}

// Claim makes l the listener of a session that is about to be opened, unless the session has a listener. The client may
// use the session before it has the answer.
func (r *Leadership) Claim(id, secret machine.SessionID, l Listener) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, there := r.attached[id]; !there {
		r.attached[id] = attachment{l, secret}
	}
}

// AttachedTo returns the sessions of a listener.
func (r *Leadership) AttachedTo(l Listener) (all []machine.SessionID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, a := range r.attached {
		if a.to == l {
			all = append(all, id)
		}
	}
	return all
}

// Detach removes a listener from all of its sessions, which live until their deadlines: the client may reconnect.
func (r *Leadership) Detach(l Listener) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, a := range r.attached {
		if a.to == l {
			delete(r.attached, id)
		}
	}
}

// Listener returns the listener of a session, or nil.
func (r *Leadership) Listener(id machine.SessionID) Listener { return r.attachment(id).to }

func (r *Leadership) attachment(id machine.SessionID) attachment {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.attached[id]
}

// Forget removes the listener of a session.
func (r *Leadership) Forget(id machine.SessionID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.attached, id)
}

// Deliver notifies the listeners of the effects of a command on their sessions, and times these effects. by is the
// listener that sent the command and gets its answer; nil if the server itself sent it.
func (r *Leadership) Deliver(by Listener, notices []machine.Notice) {
	for i := range notices {
		n := &notices[i]
		a := r.attachment(n.Session)
		hears := a.to
		switch n.Type {
		case machine.NoticeGranted:
			for _, g := range n.Grants {
				r.Time.Granted(g.Name, g.Token, g.MinHold)
			}
		case machine.NoticeSessionEnded:
			r.Time.Ended(n.Session)
			r.Forget(n.Session)
			if hears == by { // it gets the answer to its command
				hears = nil
			}
		case machine.NoticeLingering:
			r.Time.linger(n.Name, n.Token)
			continue
		case machine.NoticeUntimed:
			r.Time.untimed(n.Token)
			continue
		case machine.NoticeLost:
		}
		if hears != nil {
			hears.Hear(r, a.secret, n)
		}
		for _, g := range n.Grants {
			r.Time.Bounded(g.Name, g.Token, g.MaxHold)
		}
	}
}
