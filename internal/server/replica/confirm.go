package replica

import (
	"context"
	"sync"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/notify"
)

// confirmer proves, for one term, that this node led at an instant after a question. One round of heartbeats answers
// all questions that were asked before the round began.
//
// Renewals and reads rely on it, and need no log entry. It relies on the order of events only, not on a clock: a voter
// that acknowledges, in term T, a request that was sent after the question has not yet voted in a later term. If that
// holds for most of the voters, no member led in a later term at the time of the question.
type confirmer struct {
	raft  *raft.Raft
	proof *proof
	self  raft.ServerID
	term  uint64

	mu      sync.Mutex
	waiting []func(error)
	ended   error         // set once run has returned
	wake    notify.Signal // notified when a question waits
	rounds  uint64        // the number of rounds
	nudges  notify.Signal // notified when a round needs heartbeats
}

func newConfirmer(r *raft.Raft, p *proof, self raft.ServerID, term uint64) *confirmer {
	return &confirmer{
		raft: r, proof: p, self: self, term: term, wake: notify.New(), nudges: notify.New(),
	}
}

// ask makes the confirmer call then with nil once it has proven that this node led at an instant after the call of ask,
// or with the cause of run's end. One goroutine calls the functions of all questions, so then must not block.
func (c *confirmer) ask(then func(error)) {
	c.mu.Lock()
	if c.ended != nil {
		c.mu.Unlock()
		then(c.ended)
		return
	}
	c.waiting = append(c.waiting, then)
	c.mu.Unlock()
	c.wake.Notify()
}

// run answers questions until ctx ends. It answers the remaining questions with the cause.
func (c *confirmer) run(ctx context.Context) {
	go c.nudge(ctx)
	for {
		select {
		case <-ctx.Done():
			c.end(context.Cause(ctx))
			return
		case <-c.wake:
		}
		round := c.take()
		if !c.prove(ctx) {
			<-ctx.Done() // lead.Watch ends the term
			for _, then := range round {
				then(context.Cause(ctx))
			}
			continue
		}
		for _, then := range round {
			then(nil)
		}
	}
}

func (c *confirmer) take() []func(error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	round := c.waiting
	c.waiting = nil
	return round
}

func (c *confirmer) end(err error) {
	c.mu.Lock()
	c.ended = err
	c.mu.Unlock()
	for _, then := range c.take() {
		then(err)
	}
}

// prove returns true once most voters have acknowledged a request that was sent after the call of prove. It returns
// false if the term is over or ctx ends.
func (c *confirmer) prove(ctx context.Context) bool {
	mark := c.proof.mark()
	c.mu.Lock()
	c.rounds++
	c.mu.Unlock()
	for nudged := false; ; {
		if !c.leads() {
			return false
		}
		if c.proof.quorum(c.raft.GetConfiguration().Configuration().Servers, c.self, c.term, mark) {
			return c.leads()
		}
		if !nudged {
			nudged = true
			c.nudges.Notify()
		}
		select {
		case <-c.proof.changed:
		case <-ctx.Done():
			return false
		}
	}
}

// nudge makes raft send heartbeats whenever a round needs them, until ctx ends. It ignores the result of VerifyLeader.
// It blocks while raft's main loop blocks, so it needs a goroutine of its own.
func (c *confirmer) nudge(ctx context.Context) {
	for {
		select {
		case <-c.nudges:
			c.raft.VerifyLeader()
		case <-ctx.Done():
			return
		}
	}
}

// leads reports whether this node leads in this term, as far as it knows.
func (c *confirmer) leads() bool {
	return c.raft.State() == raft.Leader && c.raft.CurrentTerm() == c.term
}
