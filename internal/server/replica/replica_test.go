package replica

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/serverfault"
)

// gate is a replica's transport to the others. It can cut connections to some of them, and hold answers.
type gate struct {
	*raft.InmemTransport

	mu      sync.Mutex
	cut     map[raft.ServerAddress]bool
	holding bool
	held    int           // the number of held answers
	release chan struct{} // closed to release them
}

func (g *gate) toward(to raft.ServerAddress) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.cut[to] {
		return errors.New("the way is cut")
	}
	return nil
}

func (g *gate) AppendEntries(
	id raft.ServerID, to raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) error {
	if err := g.toward(to); err != nil {
		return err
	}
	err := g.InmemTransport.AppendEntries(id, to, req, resp)
	g.mu.Lock()
	holding, release := g.holding, g.release
	if holding {
		g.held++
	}
	g.mu.Unlock()
	if holding {
		<-release
	}
	return err
}

func (g *gate) RequestVote(
	id raft.ServerID, to raft.ServerAddress, req *raft.RequestVoteRequest, resp *raft.RequestVoteResponse,
) error {
	if err := g.toward(to); err != nil {
		return err
	}
	return g.InmemTransport.RequestVote(id, to, req, resp)
}

func (g *gate) RequestPreVote(
	id raft.ServerID, to raft.ServerAddress, req *raft.RequestPreVoteRequest, resp *raft.RequestPreVoteResponse,
) error {
	if err := g.toward(to); err != nil {
		return err
	}
	return g.InmemTransport.RequestPreVote(id, to, req, resp)
}

func (g *gate) hold() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.holding, g.held, g.release = true, 0, make(chan struct{})
}

func (g *gate) heldAnswers() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.held
}

// letGo releases the held answers. If again is set, it holds later answers.
func (g *gate) letGo(again bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.holding {
		close(g.release)
	}
	g.holding, g.release = again, make(chan struct{})
}

func (g *gate) cutTo(to raft.ServerAddress) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.cut[to] = true
}

// peer is a replica for tests. Its connections to others can be cut.
type peer struct {
	*Replica
	gate *gate
	log  *serverfault.SlowLog
}

// group starts n replicas that know each other and have no leader yet.
func group(t *testing.T, n int, configure func(*raft.Config)) []*peer {
	t.Helper()
	peers := make([]*peer, n)
	var servers []raft.Server
	for i := range peers {
		address := raft.ServerAddress(fmt.Sprintf("node-%d", i))
		_, inner := raft.NewInmemTransportWithTimeout(address, patience)
		p := &peer{
			gate: &gate{InmemTransport: inner, cut: map[raft.ServerAddress]bool{}},
			log:  &serverfault.SlowLog{LogStore: raft.NewInmemStore()},
		}
		s := memoryStores()
		s.log = &watchedLog{p.log, s.silence}
		config := raftConfig(s.nodeID, &Config{Log: quiet(t), Rig: &serverfault.Rig{}})
		configure(config)
		if config.CommitTimeout > patience {
			s.silence.writeAfter = config.CommitTimeout // raft does not send a refused entry again in time
		}
		f := NewFSM(newMachine(), func() {}, func(err error) { t.Errorf("replica %d: %v", i, err) })
		p.Replica = &Replica{
			State: f, id: s.nodeID, stores: s, config: Config{Log: quiet(t)}, dead: make(chan struct{}),
		}
		if err := p.openRaft(p.gate, config); err != nil {
			t.Fatal(err)
		}
		peers[i] = p
		servers = append(servers, raft.Server{ID: p.id, Address: address})
	}
	for _, p := range peers {
		for _, q := range peers {
			p.gate.Connect(q.gate.LocalAddr(), q.gate.InmemTransport)
		}
	}
	for _, p := range peers {
		if err := p.bootstrap(servers); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		for _, p := range peers {
			p.gate.letGo(false)
		}
		for _, p := range peers {
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return peers
}

// onlyOnDemand disables spontaneous elections and heartbeats.
func onlyOnDemand(c *raft.Config) {
	c.HeartbeatTimeout, c.ElectionTimeout, c.LeaderLeaseTimeout = time.Hour, time.Hour, time.Hour
}

// elect makes p stand for election immediately, and waits until it leads.
func (p *peer) elect(t *testing.T, by *peer) uint64 {
	t.Helper()
	err := by.gate.TimeoutNow(p.id, p.gate.LocalAddr(), &raft.TimeoutNowRequest{RPCHeader: raft.RPCHeader{
		ProtocolVersion: raft.ProtocolVersionMax, ID: []byte(by.id), Addr: []byte(by.gate.LocalAddr()),
	}}, &raft.TimeoutNowResponse{})
	if err != nil {
		t.Fatal(err)
	}
	var term uint64
	eventually(t, "the candidate leads", func() (leads bool) {
		term, leads = p.LeadingTerm()
		return leads
	})
	return term
}

// expireEntry returns an entry with a command that every state machine supports.
func expireEntry() []byte {
	return EncodeBatch(1,
		&machine.Batch{Commands: []machine.Command{{Op: machine.OpExpire, Session: machine.SessionID{1}}}})
}

// confirming runs a confirmer for p's term until p no longer leads.
func confirming(t *testing.T, p *peer, term uint64) *confirmer {
	c := newConfirmer(p.raft, p.proof, p.id, term)
	ctx, cancel := context.WithCancelCause(context.Background())
	var tasks sync.WaitGroup
	tasks.Go(func() { c.run(ctx) })
	tasks.Go(func() {
		for ctx.Err() == nil {
			if now, leads := p.LeadingTerm(); !leads || now != term {
				cancel(ErrNotLeader)
			}
			select {
			case <-p.raft.LeaderCh():
			case <-ctx.Done():
			}
		}
	})
	t.Cleanup(func() { cancel(ErrNotLeader); tasks.Wait() })
	return c
}

func (c *confirmer) answer() <-chan error {
	answer := make(chan error, 1)
	c.ask(func(err error) { answer <- err })
	return answer
}

// soon waits for an answer.
func soon(t *testing.T, answer <-chan error) error {
	t.Helper()
	select {
	case err := <-answer:
		return err
	case <-time.After(patience):
		t.Fatal("no answer")
		return nil
	}
}

// applyOne puts one entry into the log of a leader.
func (p *peer) applyOne(t *testing.T) error {
	t.Helper()
	return soon(t, landing(p.raft.Apply(expireEntry(), 0)))
}

func TestConfirmAnswersALeader(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 3, 5} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			peers := group(t, n, onlyOnDemand)
			term := peers[0].elect(t, peers[n-1])
			c := confirming(t, peers[0], term)
			for range 100 {
				if err := soon(t, c.answer()); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// The answers to a leader's heartbeats are in transit when another leader is elected and acknowledges a write. Raft's
// own check then accepts them as a proof that the first leader still leads.
func TestConfirmIsNotFooledByOldAnswers(t *testing.T) {
	t.Parallel()
	peers := group(t, 3, onlyOnDemand)
	old, next, third := peers[0], peers[1], peers[2]
	term := old.elect(t, third)
	if err := old.applyOne(t); err != nil {
		t.Fatal(err)
	}
	c := confirming(t, old, term)
	if err := soon(t, c.answer()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the candidate has what the others have", func() bool {
		return next.raft.LastIndex() == old.raft.LastIndex()
	})

	// Each of the two senders to each of the two other members waits for an answer, so raft sends nothing more.
	old.gate.hold()
	old.raft.VerifyLeader()
	eventually(t, "four answers are on their way", func() bool { return old.gate.heldAnswers() == 4 })
	next.gate.cutTo(old.gate.LocalAddr())
	next.elect(t, third)
	if err := next.applyOne(t); err != nil {
		t.Fatal(err)
	}
	if now, leads := old.LeadingTerm(); !leads || now != term {
		t.Fatal("the old leader has heard of the new one: nothing is reproduced")
	}

	ours := c.answer()
	var theirs []<-chan error
	for range 70 { // more than raft queues: the first call is certainly in progress
		theirs = append(theirs, landing(old.raft.VerifyLeader()))
	}
	old.gate.letGo(true)
	if err := soon(t, theirs[0]); err != nil {
		t.Fatalf("raft's own check was not fooled (%v): nothing is reproduced", err)
	}
	select {
	case err := <-ours:
		t.Fatalf("the old leader is confirmed (%v)", err)
	default:
	}
	old.gate.letGo(false) // now it gets the new term
	if err := soon(t, ours); !errors.Is(err, ErrNotLeader) {
		t.Errorf("the old leader gets %v", err)
	}
	for _, answer := range theirs[1:] { // raft cannot shut down while they are pending
		_ = soon(t, answer)
	}
}

// With raft's pipelines, if a burst has more entries than fit in one message, the last entries stay unsent until the
// next write.
func TestBurstIsNotLeftLying(t *testing.T) {
	t.Parallel()
	peers := group(t, 3, func(c *raft.Config) {
		onlyOnDemand(c)
		c.CommitTimeout = time.Hour // a shorter time would hide the fault
	})
	peers[0].elect(t, peers[1])
	if err := peers[0].applyOne(t); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		var all []raft.Future
		var mu sync.Mutex
		var callers sync.WaitGroup
		for range 130 {
			callers.Go(func() {
				f := peers[0].raft.Apply(expireEntry(), 0)
				mu.Lock()
				defer mu.Unlock()
				all = append(all, f)
			})
		}
		callers.Wait()
		for _, f := range all {
			if err := soon(t, landing(f)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestStalledDiskOfALeader(t *testing.T) {
	t.Parallel()
	peers := group(t, 3, func(c *raft.Config) { // the leader must stay, even on a busy machine
		c.HeartbeatTimeout, c.ElectionTimeout, c.LeaderLeaseTimeout = 2*time.Second, 2*time.Second, 2*time.Second
	})
	leaderAmong := func(peers []*peer) *peer {
		for _, p := range peers {
			if _, leads := p.LeadingTerm(); leads {
				return p
			}
		}
		return nil
	}
	eventually(t, "somebody leads", func() bool { return leaderAmong(peers) != nil })
	old := leaderAmong(peers)
	if err := old.applyOne(t); err != nil {
		t.Fatal(err)
	}
	goOn := old.log.Hang()
	defer goOn()
	stuck := landing(old.raft.Apply(expireEntry(), 0))
	var others []*peer
	for _, p := range peers {
		if p != old {
			others = append(others, p)
		}
	}
	var next *peer
	eventually(t, "another leads", func() bool { next = leaderAmong(others); return next != nil })
	if err := next.applyOne(t); err != nil {
		t.Errorf("the new leader: %v", err)
	}
	goOn()
	if soon(t, stuck) == nil {
		t.Error("the old leader acknowledged an entry that the new one does not have")
	}
	eventually(t, "the old leader follows", func() bool {
		_, leads := old.LeadingTerm()
		return !leads && old.raft.AppliedIndex() == next.raft.AppliedIndex()
	})
}
