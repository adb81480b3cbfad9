package server

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/machine"
)

// sharedLog is what two members have of one log, in simulated time: an entry is committed in the present term as soon
// as it comes, whoever decided it.
type sharedLog struct {
	term     uint64
	index    uint64
	replicas []*fsm
	forge    bool // the mutant: an entry says that it was decided in the term in which it lands
}

// landed is the future of an entry.
type landed struct {
	raft.ApplyFuture
	response any
}

func (l landed) Error() error  { return nil }
func (l landed) Response() any { return l.response }

func (l *sharedLog) apply(data []byte, _ time.Duration) raft.ApplyFuture {
	if l.forge {
		kind, _, body, _ := readEntry(data)
		data = append(beginEntry(kind, l.term), body...)
	}
	l.index++
	var response any
	for _, f := range l.replicas {
		response = f.Apply(&raft.Log{Index: l.index, Term: l.term, Data: data})
	}
	return landed{response: response}
}

// lead begins the next term: what times and proposes in it, and how to end it. stall, if not nil, keeps each entry
// until it is closed.
func (l *sharedLog) lead(t *testing.T, stall <-chan struct{}) (k *timekeeper, p *proposer, end func()) {
	l.term++
	apply := func(data []byte, timeout time.Duration) raft.ApplyFuture {
		if stall != nil {
			<-stall
		}
		return l.apply(data, timeout)
	}
	p = newProposer(l.term, apply, nil, time.Now)
	k = newTimekeeper(time.Now, func(c machine.Command, done func(error)) error {
		return p.submit(proposal{command: c, done: func(_ outcome, err error) { done(err) }})
	})
	k.inherit(l.replicas[0].machine)
	ctx, cancel := context.WithCancelCause(context.Background())
	ended := make(chan struct{}, 2)
	go func() { p.run(ctx); ended <- struct{}{} }()
	go func() { k.run(ctx); ended <- struct{}{} }()
	return k, p, func() { cancel(errNotLeader); <-ended; <-ended }
}

// The leadership goes from A to B and back to A while A's proposer stands still with the end of a session in its hand.
// B has renewed the session meanwhile, and A knows of it as the leader that it is again: the end must not be carried
// out.
func TestEndOfASessionFromAnEarlierTerm(t *testing.T) {
	for name, forge := range map[string]bool{"as it is": false, "mutant: entries of every term count": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := &sharedLog{forge: forge}
				for range 2 {
					l.replicas = append(l.replicas, newFSM(newMachine(), func() {}, func(err error) { t.Error(err) }))
				}
				id := machine.SessionID{1}
				const ttl = 3 * time.Second
				ask := func(p *proposer, c machine.Command) (machine.Result, error) {
					type answer struct {
						machine.Result
						err error
					}
					answered := make(chan answer, 1)
					if err := p.submit(proposal{command: c, done: func(o outcome, err error) { answered <- answer{o.result, err} }}); err != nil {
						return machine.Result{}, err
					}
					a := <-answered
					return a.Result, a.err
				}

				// A leads, and opens the session.
				k, p, end := l.lead(t, nil)
				if _, err := ask(p, machine.Command{Op: machine.OpOpenSession, Session: id, TTL: ttl}); err != nil {
					t.Fatal(err)
				}
				k.opened(id, ttl, time.Now())
				end()

				// A leads, finds that the session is over, and stands still just before it proposes that.
				goesOn := make(chan struct{})
				_, stalled, endOfA := l.lead(t, goesOn)
				time.Sleep(ttl + 2*grace)
				synctest.Wait()
				// A command of a client is behind it.
				late := make(chan error, 1)
				release := machine.Command{Op: machine.OpRelease, Name: "x", RequestID: "0123456789abcdef", Session: id}
				if err := stalled.submit(proposal{command: release, done: func(_ outcome, err error) { late <- err }}); err != nil {
					t.Fatal(err)
				}

				// B leads, renews the session and grants a lock, then A leads again.
				k, p, end = l.lead(t, nil)
				if !k.renew(id, time.Now()) {
					t.Fatal("B does not know the session")
				}
				granted, err := ask(p, machine.Command{Op: machine.OpAcquire, Session: id, Requests: []machine.Request{{
					Name: "x", ID: "0123456789abcdef",
				}}})
				if err != nil || granted.Code != machine.CodeGranted {
					t.Fatalf("B grants: %+v, %v", granted, err)
				}
				end()
				_, _, end = l.lead(t, nil)
				close(goesOn)
				endOfA()
				synctest.Wait()
				end()

				for i, f := range l.replicas {
					if _, open := f.machine.Session(id); open == forge {
						t.Errorf("replica %d: session is open: %v; entries of every term count: %v", i, open, forge)
					}
					if held := len(f.machine.Holder("x").Holders) > 0; held == forge {
						t.Errorf("replica %d: the lock is held: %v", i, held)
					}
				}
				if err := <-late; !forge && !errors.Is(err, errNotLeader) {
					t.Errorf("a command that waited behind it is answered %v, want %v", err, errNotLeader)
				}
			})
		})
	}
}
