package lead

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// sharedLog is one log of two members, in simulated time: an entry commits in the current term when it arrives, even if
// an earlier term decided it.
type sharedLog struct {
	term     uint64
	index    uint64
	replicas []*replica.FSM
	forge    bool // the mutant: an entry claims the term in which it commits
}

// sharedTerm is the log for the leader of one term. If stall is not nil, each entry waits until stall is closed.
type sharedTerm struct {
	log   *sharedLog
	term  uint64
	stall <-chan struct{}
}

// Propose implements journal.
func (s sharedTerm) Propose(b *machine.Batch) func() (*replica.Applied, error) {
	if s.stall != nil {
		<-s.stall
	}
	l, decided := s.log, s.term
	if l.forge {
		decided = l.term
	}
	l.index++
	var response any
	for _, f := range l.replicas {
		response = f.Apply(&raft.Log{Index: l.index, Term: l.term, Data: replica.EncodeBatch(decided, b)})
	}
	return landed(response)
}

// landed returns a function that returns response without waiting.
func landed(response any) func() (*replica.Applied, error) {
	return func() (*replica.Applied, error) {
		out := response.(*replica.Applied)
		if out.Stale {
			return nil, replica.ErrNotLeader
		}
		return out, nil
	}
}

// lead begins the next term. It returns the term's timekeeper and proposer, and a function that ends the term. If stall
// is not nil, each entry waits until stall is closed.
func (l *sharedLog) lead(stall <-chan struct{}) (k *Timekeeper, p *proposer, end func()) {
	l.term++
	p = newProposer(sharedTerm{l, l.term, stall}, time.Now)
	k = newTimekeeper(time.Now, func(c machine.Command, done func(error)) error {
		return p.submit(Proposal{Command: c, Done: func(_ Outcome, err error) { done(err) }})
	})
	k.inherit(l.replicas[0].Machine)
	ctx, cancel := context.WithCancelCause(context.Background())
	ended := make(chan struct{}, 2)
	go func() { p.run(ctx); ended <- struct{}{} }()
	go func() { k.run(ctx); ended <- struct{}{} }()
	return k, p, func() { cancel(replica.ErrNotLeader); <-ended; <-ended }
}

// The leadership moves from A to B and back to A while A's proposer stalls with the end of a session. In the meantime B
// renews the session, and A, which leads again, has applied that: the end must not take effect.
func TestEndOfASessionFromAnEarlierTerm(t *testing.T) {
	for name, forge := range map[string]bool{"as it is": false, "mutant: entries of every term count": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := &sharedLog{forge: forge}
				for range 2 {
					l.replicas = append(l.replicas,
						replica.NewFSM(machine.New(1), func() {}, func(err error) { t.Error(err) }))
				}
				id := machine.SessionID{1}
				const ttl = 3 * time.Second
				ask := func(p *proposer, c machine.Command) (machine.Result, error) {
					type answer struct {
						machine.Result
						err error
					}
					answered := make(chan answer, 1)
					if err := p.submit(Proposal{
						Command: c, Done: func(o Outcome, err error) { answered <- answer{o.Result, err} },
					}); err != nil {
						return machine.Result{}, err
					}
					a := <-answered
					return a.Result, a.err
				}

				// A leads, and opens the session.
				k, p, end := l.lead(nil)
				if _, err := ask(p, machine.Command{Op: machine.OpOpenSession, Session: id, TTL: ttl}); err != nil {
					t.Fatal(err)
				}
				k.Opened(id, ttl, time.Now())
				end()

				// A leads, finds that the session is over, and stalls just before it proposes the end.
				goesOn := make(chan struct{})
				_, stalled, endOfA := l.lead(goesOn)
				time.Sleep(ttl + 2*grace)
				synctest.Wait()
				// A command of a client follows it.
				late := make(chan error, 1)
				release := machine.Command{Op: machine.OpRelease, Name: "x", RequestID: "0123456789abcdef", Session: id}
				if err := stalled.submit(Proposal{
					Command: release, Done: func(_ Outcome, err error) { late <- err },
				}); err != nil {
					t.Fatal(err)
				}

				// B leads, renews the session and grants a lock, then A leads again.
				k, p, end = l.lead(nil)
				if !k.Renew(id, time.Now()) {
					t.Fatal("B does not know the session")
				}
				granted, err := ask(p, machine.Command{Op: machine.OpAcquire, Session: id, Requests: []machine.Request{{
					Name: "x", ID: "0123456789abcdef",
				}}})
				if err != nil || granted.Code != machine.CodeGranted {
					t.Fatalf("B grants: %+v, %v", granted, err)
				}
				end()
				_, _, end = l.lead(nil)
				close(goesOn)
				endOfA()
				synctest.Wait()
				end()

				for i, f := range l.replicas {
					if open := f.Machine.SessionOpen(id); open == forge {
						t.Errorf("replica %d: session is open: %v; entries of every term count: %v", i, open, forge)
					}
					if held := len(f.Machine.Holder("x").Holders) > 0; held == forge {
						t.Errorf("replica %d: the lock is held: %v", i, held)
					}
				}
				if err := <-late; !forge && !errors.Is(err, replica.ErrNotLeader) {
					t.Errorf("a command that waited behind it is answered %v, want %v", err, replica.ErrNotLeader)
				}
			})
		})
	}
}
