package lead

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/replica"
)

var deadlineSeeds = flag.Int("deadline.seeds", 20, "how many times of changing leaders TestLeasesAcrossLeaders draws")

// relay is a log of three members in simulated time. The leader has an entry immediately, the others later.
type relay struct {
	mu      sync.Mutex
	term    uint64
	leader  int
	entries []raft.Log
	members []*relayMember
	rand    *rand.Rand
	mutant  string
	ended   func(machine.SessionID)
}

type relayMember struct {
	fsm     *replica.FSM
	clock   replica.Clock // the clock of fsm, unless a mutant changes it
	applied int
}

// start returns an empty member.
func (l *relay) start(t *testing.T) *relayMember {
	m := &relayMember{fsm: replica.NewFSM(machine.New(1), func() {}, func(err error) { t.Error(err) })}
	m.clock = m.fsm.ClusterClock()
	return m
}

// catchUp applies the entries that m has not applied. The caller holds l.mu.
func (l *relay) catchUp(m *relayMember) (response any) {
	for ; m.applied < len(l.entries); m.applied++ {
		before := m.fsm.ClusterClock()
		response = m.fsm.Apply(&l.entries[m.applied])
		set := m.fsm.ClusterClock()
		if set == before {
			continue
		}
		now := time.Now()
		switch {
		case l.mutant == "a clock is never set back" && set.At(now) < m.clock.At(now):
		case l.mutant == "a clock is fast":
			m.clock = replica.NewClock(set.At(now)+300*time.Millisecond, now)
		default:
			m.clock = set
		}
	}
	return response
}

// relayTerm is the log for the leader of one term.
type relayTerm struct {
	log  *relay
	term uint64
}

// Propose implements journal.
func (r relayTerm) Propose(b *machine.Batch) func() (*replica.Applied, error) {
	l := r.log
	l.mu.Lock()
	defer l.mu.Unlock()
	data := replica.EncodeBatch(r.term, b)
	l.entries = append(l.entries, raft.Log{Index: uint64(len(l.entries) + 1), Term: l.term, Data: data})
	response := l.catchUp(l.members[l.leader])
	if out, ok := response.(*replica.Applied); ok && !out.Stale {
		for _, notices := range out.Notices {
			for _, n := range notices {
				if n.Type == machine.NoticeSessionEnded {
					l.ended(n.Session)
				}
			}
		}
	}
	for i, m := range l.members {
		if i != l.leader {
			lag := time.Duration(l.rand.Int64N(int64(100 * time.Millisecond)))
			time.AfterFunc(lag, func() {
				l.mu.Lock()
				defer l.mu.Unlock()
				l.catchUp(m)
			})
		}
	}
	return landed(response)
}

// relayLeader has the parts of a leadership that deal with time.
type relayLeader struct {
	term uint64
	time *Timekeeper
	log  *proposer
	end  func()
}

// lead makes a member the leader of the next term.
func (l *relay) lead(i int) *relayLeader {
	l.mu.Lock()
	l.term++
	l.leader = i
	l.catchUp(l.members[i])
	r, m := &relayLeader{term: l.term}, l.members[i]
	clock := m.clock
	l.mu.Unlock()
	r.log = newProposer(relayTerm{l, r.term}, time.Now)
	r.time = newTimekeeper(time.Now, func(c machine.Command, done func(error)) error {
		return r.log.submit(Proposal{Command: c, Done: func(_ Outcome, err error) { done(err) }})
	})
	ctx, cancel := context.WithCancelCause(context.Background())
	var tasks sync.WaitGroup
	tasks.Go(func() { r.log.run(ctx) })
	r.time.clock = clock
	r.time.inherit(m.fsm.Machine)
	r.time.keep(ctx)
	tasks.Go(func() { r.time.run(ctx) })
	r.end = func() { cancel(replica.ErrNotLeader); tasks.Wait() }
	return r
}

// ask sends a command through the log and waits.
func (r *relayLeader) ask(c machine.Command, then func(Outcome)) error {
	over := make(chan error, 1)
	err := r.log.submit(Proposal{Command: c, Done: func(o Outcome, err error) {
		if err == nil {
			then(o)
		}
		over <- err
	}})
	if err != nil {
		return err
	}
	return <-over
}

// renew sends a keepalive. It reports whether the leader confirms the renewal to the client.
func (l *relay) renew(r *relayLeader, id machine.SessionID) (renewed bool) {
	receipt := time.Now()
	if r.time.IsKept(id) && l.mutant != "kept sessions are renewed in memory" {
		_ = r.ask(machine.Command{Op: machine.OpRenew, Session: id}, func(o Outcome) {
			renewed = o.Result.Code == machine.CodeOK && r.time.Logged(id, receipt)
		})
		return renewed
	}
	renewed = r.time.Renew(id, receipt)
	if l.mutant == "kept sessions are renewed in memory" {
		renewed = true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return renewed && l.term == r.term // the majority confirms it
}

// leases runs clients with one TTL for two minutes while the leader changes every few seconds. It returns a broken
// promise to a client, and the longest time for which the session of a dead client lived.
func leases(t *testing.T, seed uint64, restarts bool, mutant string) (broken string, longest time.Duration) {
	const ttl, clients = 6 * time.Second, 12
	l := &relay{rand: rand.New(rand.NewPCG(seed, 7)), mutant: mutant}
	for range 3 {
		l.members = append(l.members, l.start(t))
	}
	within := func(most time.Duration) time.Duration {
		l.mu.Lock()
		defer l.mu.Unlock()
		return time.Duration(l.rand.Int64N(int64(most)))
	}
	until, died := map[machine.SessionID]time.Time{}, map[machine.SessionID]time.Time{} // under l.mu
	over := map[machine.SessionID]bool{}
	l.ended = func(id machine.SessionID) {
		if left := time.Until(until[id]); left > 0 && broken == "" {
			broken = fmt.Sprintf("session %x ended %v before its time, in term %d", id[:1], left, l.term)
		}
		over[id] = true
		if at, dead := died[id]; dead {
			longest = max(longest, time.Since(at))
			delete(died, id)
		}
	}
	var present *relayLeader // under l.mu
	leader := func() *relayLeader {
		l.mu.Lock()
		defer l.mu.Unlock()
		return present
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	var running sync.WaitGroup
	serial := byte(0)
	live := func() { // one client after the other
		for ctx.Err() == nil {
			l.mu.Lock()
			serial++
			id := machine.SessionID{serial, 1}
			l.mu.Unlock()
			believe := func(sent time.Time) {
				l.mu.Lock()
				defer l.mu.Unlock()
				if until[id] = sent.Add(ttl); died[id] != (time.Time{}) {
					t.Error("a dead client renews")
				}
			}
			for opened := false; !opened && ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
				if r := leader(); r != nil {
					sent := time.Now()
					_ = r.ask(machine.Command{Op: machine.OpOpenSession, Session: id, TTL: ttl}, func(Outcome) {
						opened = r.time.Opened(id, ttl, sent)
					})
					if opened {
						believe(sent)
					}
				}
			}
			for dies := time.Now().Add(within(40 * time.Second)); time.Now().Before(dies) && ctx.Err() == nil; {
				time.Sleep([]time.Duration{within(time.Second), 2 * time.Second, within(6 * time.Second)}[within(3)])
				sent := time.Now()
				time.Sleep(within(20 * time.Millisecond))
				if r := leader(); r != nil && l.renew(r, id) {
					time.Sleep(within(20 * time.Millisecond)) // the answer is on its way
					believe(sent)
				}
			}
			l.mu.Lock()
			if !over[id] {
				died[id] = time.Now()
			}
			l.mu.Unlock()
		}
	}
	first := l.lead(0)
	if err := first.ask(
		machine.Command{Op: machine.OpRaiseLevel, Level: machine.MaxLevel}, func(Outcome) {},
	); err != nil {
		t.Fatal(err)
	}
	first.end()
	for range clients {
		running.Go(live)
	}
	for at := 0; ctx.Err() == nil; {
		if at = int(within(3)); restarts && within(4) == 0 { // it has just restarted, and has read the log
			l.mu.Lock()
			l.members[at] = l.start(t)
			l.catchUp(l.members[at])
			l.mu.Unlock()
		}
		r := l.lead(at)
		l.mu.Lock()
		present = r
		l.mu.Unlock()
		time.Sleep(reconnect + 200*time.Millisecond + within(3*time.Second))
		r.end()
		l.mu.Lock()
		present = nil
		l.mu.Unlock()
		time.Sleep(within(time.Second)) // the election
	}
	l.mu.Lock()
	for _, at := range died {
		longest = max(longest, time.Since(at))
	}
	l.mu.Unlock()
	running.Wait()
	time.Sleep(time.Second) // until the followers have all entries
	return broken, longest
}

// However often the leader changes, a session lives for the time that its client expects. The session of a dead client
// ends after its TTL and one election.
func TestLeasesAcrossLeaders(t *testing.T) {
	t.Parallel()
	var longest, restarted time.Duration
	for seed := range uint64(*deadlineSeeds) {
		restarts := seed%2 == 1
		synctest.Test(t, func(t *testing.T) {
			broken, dead := leases(t, seed, restarts, "")
			switch {
			case broken != "":
				t.Errorf("seed %d: %s", seed, broken)
			case restarts:
				restarted = max(restarted, dead)
			default:
				longest = max(longest, dead)
			}
		})
	}
	// An election takes up to a second here. keepPace bounds the time in which a leader keeps the sessions of 12 clients
	// and a few dead ones. Each of up to ten leaders gets a checkpoint up to 100 ms late. If a session expires during an
	// election, a live client gets time to find the new leader.
	const bound = 6*time.Second + grace + time.Second + 30*keepPace + 10*100*time.Millisecond + reconnect
	t.Logf("the sessions of dead clients lived for up to %v; with members that start anew, %v", longest, restarted)
	if longest > bound {
		t.Errorf("the session of a dead client lived for %v, longer than %v", longest, bound)
	}
}

func TestLeasesAcrossLeadersMutants(t *testing.T) {
	t.Parallel()
	for _, mutant := range []string{
		"kept sessions are renewed in memory", "a clock is never set back", "a clock is fast",
	} {
		t.Run(mutant, func(t *testing.T) {
			for seed := range uint64(10 * *deadlineSeeds) {
				broken := ""
				synctest.Test(t, func(t *testing.T) { broken, _ = leases(t, seed, true, mutant) })
				if broken != "" {
					t.Logf("seed %d: %s", seed, broken)
					return
				}
			}
			t.Error("nobody notices it")
		})
	}
}
