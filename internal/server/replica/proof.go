package replica

import (
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/notify"
)

// transport is the network interface that raft needs.
type transport interface {
	raft.Transport
	raft.WithPreVote
	raft.WithClose
}

// proof is a transport that remembers which of its requests the others have acknowledged. Confirm relies on it.
//
// raft.VerifyLeader does not serve: it takes any acknowledgement that arrives after the call for an answer, even one
// to a heartbeat that was sent before it. A leader that was deposed meanwhile then believes that it still leads.
type proof struct {
	transport
	silence  *silence
	known    *known                                      // nil: not used
	last     atomic.Pointer[func() (index, term uint64)] // the last index of this member's log, then its term; nil: unknown yet
	forgot   func(raft.ServerID)                         // is called for a member that has lost entries
	fatal    func(error)                                 // is called when this member cannot go on
	log      *slog.Logger
	refrains atomic.Pointer[func() bool] // whether this member asks for no votes; nil: it asks

	mu    sync.Mutex
	sent  uint64 // requests are numbered from 1 in the order in which they were sent
	term  uint64 // of what follows
	peers map[raft.ServerID]progress
	told  map[raft.ServerID]bool // members that have lost entries, as logged

	changed notify.Signal // something was acknowledged
}

// progress is a follower's acknowledgements in the present term.
type progress struct {
	request uint64 // the highest number among its acknowledged requests
	index   uint64 // its log is the same as ours up to here
	own     bool   // it has an entry of this term, so its log is no longer than ours
}

func newProof(t transport, s *silence) *proof {
	return &proof{transport: t, silence: s, changed: notify.New()}
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
	// The follower had this term when it answered, whether or not its log fits. So no member of a later term had its
	// vote.
	if resp.Term == req.Term {
		if err := p.ahead(id, req.Term, resp.LastLog); err != nil {
			return err
		}
		ack := progress{request: number}
		if last := len(req.Entries); resp.Success && last > 0 {
			ack.index, ack.own = req.Entries[last-1].Index, req.Entries[last-1].Term == req.Term
		}
		p.acknowledge(id, req.Term, ack)
		if !resp.Success && p.known != nil && resp.LastLog < p.known.of(id) {
			return p.forgetful(id, resp.LastLog)
		}
	}
	return nil
}

// ahead is the error of a leader that cannot go on: a follower has entries of this term that only this member can
// have written, and has forgotten. Its memory and its disk went back in time together, as those of a virtual machine
// that is reverted live. Raft compares terms and indexes alone, and would mistake other entries for the same.
func (p *proof) ahead(id raft.ServerID, term, follower uint64) error {
	last := p.last.Load()
	p.mu.Lock()
	own := p.term == term && p.peers[id].own
	p.mu.Unlock()
	if last == nil || !own {
		return nil
	}
	here, now := (*last)()
	if follower <= here || now != term { // in a later term its end may have been replaced
		return nil
	}
	err := fmt.Errorf("member %s has entries of this term up to %d, which this member, the leader, wrote and has only up "+
		"to %d: it went back in time while it ran. Start it again", id, follower, here)
	p.fatal(err)
	return err
}

// forgetful is the error of a follower that gets no more entries because its log ends before its acknowledgements:
// its disk went back in time while it ran, or it started when nobody objected. When it restarts, this member objects.
func (p *proof) forgetful(id raft.ServerID, last uint64) error {
	p.mu.Lock()
	told := p.told[id]
	if p.told == nil {
		p.told = map[raft.ServerID]bool{}
	}
	p.told[id] = true
	p.mu.Unlock()
	if !told {
		p.log.Error("a member has lost entries that it had acknowledged: it gets no more before it is started again",
			"id", id, "last", last, "acknowledged", p.known.of(id))
		p.forgot(id)
	}
	return fmt.Errorf("member %s has lost entries that it had acknowledged", id)
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

// mayStand returns the reason why this member asks for no votes, or nil.
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

// AppendEntriesPipeline implements raft.Transport. It is unsupported, so raft does not pipeline: with pipelines,
// entries can be left lying until the next write, and replication to a follower can stop for good. Batches keep the
// throughput.
func (p *proof) AppendEntriesPipeline(raft.ServerID, raft.ServerAddress) (raft.AppendPipeline, error) {
	return nil, raft.ErrPipelineReplicationNotSupported
}

// SetHeartbeatHandler implements raft.Transport, by ignoring it: heartbeats go through raft's main loop like all
// messages, and no member acknowledges a leader while it is about to vote for another.
func (p *proof) SetHeartbeatHandler(func(raft.RPC)) {}

func (p *proof) next() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sent++
	return p.sent
}

// acknowledge keeps only the latest term: acknowledgements of an earlier one do not count for it.
func (p *proof) acknowledge(id raft.ServerID, term uint64, ack progress) {
	p.mu.Lock()
	if term > p.term {
		p.term, p.peers = term, map[raft.ServerID]progress{}
	}
	if term == p.term {
		old := p.peers[id]
		p.peers[id] = progress{max(old.request, ack.request), max(old.index, ack.index), old.own || ack.own}
	}
	p.mu.Unlock()
	p.changed.Notify()
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

// indexOf returns the index up to which the log of a follower is known to match ours.
func (p *proof) indexOf(id raft.ServerID) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.peers[id].index
}

// indexes returns the indexes of all followers, in a term.
func (p *proof) indexes(term uint64) map[raft.ServerID]uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := map[raft.ServerID]uint64{}
	if p.term == term {
		for id, x := range p.peers {
			all[id] = x.index
		}
	}
	return all
}

// caughtUp reports whether the log of a follower matches ours up to index.
func (p *proof) caughtUp(id raft.ServerID, index uint64) bool { return p.indexOf(id) >= index }
