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

// proof is a transport that records the acknowledgements of its requests. Confirm relies on it.
//
// raft.VerifyLeader is not a proof: it accepts any acknowledgement that arrives after the call, even of a heartbeat
// that was sent before the call. A leader that was deposed in the meantime could then assume that it still leads.
type proof struct {
	transport
	silence  *silence
	known    *known                                      // may be nil
	last     atomic.Pointer[func() (index, term uint64)] // the last index of this log, and the term; nil at first
	forgot   func(raft.ServerID)                         // called for a member that has lost entries
	fatal    func(error)                                 // called when this member cannot continue
	log      *slog.Logger
	refrains atomic.Pointer[func() bool] // reports that this member does not ask for votes; nil: it asks

	mu    sync.Mutex
	sent  uint64 // requests are numbered from 1 in the order in which they were sent
	term  uint64 // the term of peers
	peers map[raft.ServerID]progress
	told  map[raft.ServerID]bool // members whose lost entries were logged

	changed notify.Signal // notified when a request was acknowledged
}

// progress is a follower's acknowledgements in the current term.
type progress struct {
	request uint64 // the highest number among its acknowledged requests
	index   uint64 // its log matches ours up to here
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
	// The follower had this term when it answered, even if its log does not match. So no member of a later term had its
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

// ahead returns an error, and stops this leader, if a follower has entries of this term that only this leader can have
// written, and that it has lost. Memory and disk of this leader went back in time together, as in a virtual machine
// that is reverted to a snapshot. Raft compares only terms and indexes, and would treat different entries as the same.
func (p *proof) ahead(id raft.ServerID, term, follower uint64) error {
	last := p.last.Load()
	p.mu.Lock()
	own := p.term == term && p.peers[id].own
	p.mu.Unlock()
	if last == nil || !own {
		return nil
	}
	here, now := (*last)()
	if follower <= here || now != term { // in a later term its end may differ
		return nil
	}
	err := fmt.Errorf("member %s has entries of this term up to %d, which this member, the leader, wrote and has only up "+
		"to %d: it went back in time while it ran. Start it again, and if it stops again, see Two histories in "+
		"docs/SERVER.md", id, follower, here)
	p.fatal(err)
	return err
}

// forgetful logs and returns the error for a follower whose log ends before its acknowledgements. The follower gets no
// further entries. Its disk went back in time while it ran, or it started when no member objected. When it restarts,
// this member objects.
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

// InstallSnapshot implements raft.Transport. A leader that has stopped sending sends no snapshots either: followers
// would count them as contact.
func (p *proof) InstallSnapshot(
	id raft.ServerID, to raft.ServerAddress, req *raft.InstallSnapshotRequest, resp *raft.InstallSnapshotResponse,
	r io.Reader,
) error {
	if err := p.silence.reason(); err != nil {
		return err
	}
	return p.transport.InstallSnapshot(id, to, req, resp, r)
}

// mayStand returns the reason why this member must not ask for votes, or nil.
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

// AppendEntriesPipeline implements raft.Transport. It returns an error, so that raft does not use pipelines. With
// pipelines, entries can stay unsent until the next write, and replication to a follower can stop permanently. Batches
// provide the throughput.
func (p *proof) AppendEntriesPipeline(raft.ServerID, raft.ServerAddress) (raft.AppendPipeline, error) {
	return nil, raft.ErrPipelineReplicationNotSupported
}

// SetHeartbeatHandler implements raft.Transport. It ignores the handler, so that heartbeats go through raft's main loop
// like all messages: a member never acknowledges a leader while it is about to vote for another.
func (p *proof) SetHeartbeatHandler(func(raft.RPC)) {}

func (p *proof) next() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sent++
	return p.sent
}

// acknowledge records an acknowledgement. It keeps only the latest term, and ignores earlier terms.
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

// mark returns the number of the last request that was sent. Later requests have greater numbers.
func (p *proof) mark() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sent
}

// quorum reports whether most of the voters, including self, acknowledged a request in this term that was sent after
// mark.
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

// heardOf reports whether a follower acknowledged a request in this term that was sent after mark.
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

// indexes returns the known matching indexes of all followers in a term.
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
