package replica

import (
	"io"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/bell"
)

// transport is what raft needs of the network.
type transport interface {
	raft.Transport
	raft.WithPreVote
	raft.WithClose
}

// proof is a transport that remembers which of its requests the others have acknowledged. It is what Confirm is made
// of.
//
// raft.VerifyLeader is not used for that: it takes any acknowledgement that arrives after the call for an answer, also
// one to a heartbeat that was sent before it. A leader that was deposed meanwhile then believes that it still leads.
type proof struct {
	transport
	silence  *silence
	refrains atomic.Pointer[func() bool] // whether this member asks for no votes; nil: it asks

	mu    sync.Mutex
	sent  uint64 // requests are numbered from 1 in the order in which they were sent
	term  uint64 // of what follows
	peers map[raft.ServerID]progress

	changed bell.Bell // something was acknowledged
}

// progress is what one follower has acknowledged in the present term.
type progress struct {
	request uint64 // the highest number among its acknowledged requests
	index   uint64 // its log is the same as ours up to here
}

func newProof(t transport, s *silence) *proof {
	return &proof{transport: t, silence: s, changed: bell.New()}
}

// AppendEntries implements raft.Transport.
func (p *proof) AppendEntries(
	id raft.ServerID, to raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) error {
	if err := p.silence.reason(); err != nil {
		return err
	}
	number := p.next()
	if err := p.transport.AppendEntries(id, to, req, resp); err != nil {
		return err
	}
	// The follower had this term when it answered, whether or not its log fits. So nobody of a later term had its vote.
	if resp.Term == req.Term {
		ack := progress{request: number}
		if last := len(req.Entries); resp.Success && last > 0 {
			ack.index = req.Entries[last-1].Index
		}
		p.acknowledge(id, req.Term, ack)
	}
	return nil
}

// InstallSnapshot implements raft.Transport. A silent leader sends no snapshots either: they would count as a sign of
// life.
func (p *proof) InstallSnapshot(
	id raft.ServerID, to raft.ServerAddress, req *raft.InstallSnapshotRequest, resp *raft.InstallSnapshotResponse,
	r io.Reader,
) error {
	if err := p.silence.reason(); err != nil {
		return err
	}
	return p.transport.InstallSnapshot(id, to, req, resp, r)
}

// mayStand is why this member asks for no votes.
func (p *proof) mayStand() error {
	if err := p.silence.reason(); err != nil {
		return err
	}
	if refrains := p.refrains.Load(); refrains != nil && (*refrains)() {
		return errMaintenance
	}
	return nil
}

// RequestVote implements raft.Transport.
func (p *proof) RequestVote(
	id raft.ServerID, to raft.ServerAddress, req *raft.RequestVoteRequest, resp *raft.RequestVoteResponse,
) error {
	if err := p.mayStand(); err != nil {
		return err
	}
	return p.transport.RequestVote(id, to, req, resp)
}

// RequestPreVote implements raft.WithPreVote.
func (p *proof) RequestPreVote(
	id raft.ServerID, to raft.ServerAddress, req *raft.RequestPreVoteRequest, resp *raft.RequestPreVoteResponse,
) error {
	if err := p.mayStand(); err != nil {
		return err
	}
	return p.transport.RequestPreVote(id, to, req, resp)
}

// AppendEntriesPipeline implements raft.Transport. Raft does without pipelines then: with them, entries can be left
// lying until the next write, and replication to a follower can stop for good. Batches cost no throughput instead.
func (p *proof) AppendEntriesPipeline(raft.ServerID, raft.ServerAddress) (raft.AppendPipeline, error) {
	return nil, raft.ErrPipelineReplicationNotSupported
}

// SetHeartbeatHandler implements raft.Transport, by ignoring it: heartbeats go through raft's main loop like all else,
// and nobody acknowledges a leader while it is about to vote for another.
func (p *proof) SetHeartbeatHandler(func(raft.RPC)) {}

func (p *proof) next() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sent++
	return p.sent
}

// acknowledge keeps what belongs to the latest term only: what was acknowledged in an earlier one proves nothing for
// it.
func (p *proof) acknowledge(id raft.ServerID, term uint64, ack progress) {
	p.mu.Lock()
	if term > p.term {
		p.term, p.peers = term, map[raft.ServerID]progress{}
	}
	if term == p.term {
		old := p.peers[id]
		p.peers[id] = progress{max(old.request, ack.request), max(old.index, ack.index)}
	}
	p.mu.Unlock()
	p.changed.Ring()
}

// mark returns the number of the last request that was sent. Later ones have greater numbers.
func (p *proof) mark() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sent
}

// quorum reports whether, with self, most of the voters acknowledged in this term a request that was sent after mark.
func (p *proof) quorum(servers []raft.Server, self raft.ServerID, term, mark uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	voters, acks := 0, 0
	for _, s := range servers {
		if s.Suffrage != raft.Voter {
			continue
		}
		voters++
		if s.ID == self || p.term == term && p.peers[s.ID].request > mark {
			acks++
		}
	}
	return acks > voters/2
}

// heardOf reports whether a follower acknowledged in this term a request that was sent after mark.
func (p *proof) heardOf(id raft.ServerID, term, mark uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.term == term && p.peers[id].request > mark
}

// indexOf is up to where the log of a follower is known to be the same as ours.
func (p *proof) indexOf(id raft.ServerID) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.peers[id].index
}

// caughtUp reports whether the log of a follower is the same as ours up to index.
func (p *proof) caughtUp(id raft.ServerID, index uint64) bool { return p.indexOf(id) >= index }
