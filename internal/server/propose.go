package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/machine"
)

const (
	// entriesInFlight is how many log entries are on their way at a time. With one, the disk rests while answers are
	// written; with more, the commands that could share an entry are spread over several.
	entriesInFlight = 2
	// maxBatch bounds the commands of one log entry, and maxBatchBytes what they weigh. One command alone may weigh
	// more.
	maxBatch      = 4096
	maxBatchBytes = 1 << 20
	// maxQueued bounds the commands that wait for an entry, where one connection has more than fewQueued of them.
	maxQueued = 64 << 10
	fewQueued = 16
)

// Why a command was not carried out, or may not have been.
var (
	errBusy      = errors.New("too many requests wait for the log")
	errNotLeader = errors.New("this member does not lead")
	errUnknown   = errors.New("leadership was lost before the outcome was known")
)

// proposal is one command on its way into the log.
type proposal struct {
	command machine.Command
	by      *conn // who sent it; nil: the server itself
	// obsolete tells, just before the command goes into the log, why it must not. It must not block. nil: it always may.
	obsolete func() error
	// done is called once: with the outcome, in the order of the log, from one goroutine for all, so it must not block;
	// or with an error. errUnknown leaves the outcome open; after any other error the command was not carried out.
	done func(outcome, error)
}

// outcome is what one command did.
type outcome struct {
	renewed bool // the command has renewed its session
	result  machine.Result
	notices []machine.Notice
}

// proposer puts commands into the log, many per entry: it waits for one of the places in flight first and takes all
// that has gathered meanwhile then. So there is one fsync per batch, and no timer.
type proposer struct {
	term     uint64
	apply    func(entry []byte, timeout time.Duration) raft.ApplyFuture
	dead     <-chan struct{} // closed once raft has shut down
	watchdog *watchdog
	now      func() time.Time

	mu    sync.Mutex
	queue lanes
	ended error // set once run is over

	wake   chan struct{} // has room for one: there is something in the queue
	places chan struct{}
	flying chan flight
}

type flight struct {
	batch  []proposal
	future raft.ApplyFuture
	landed <-chan error
}

// newProposer returns one for the leader of term. apply is that of raft.
func newProposer(
	term uint64, apply func([]byte, time.Duration) raft.ApplyFuture, dead <-chan struct{}, now func() time.Time,
) *proposer {
	return &proposer{
		term: term, apply: apply, dead: dead, now: now, watchdog: &watchdog{after: hangAfter}, wake: make(chan struct{}, 1),
		places: make(chan struct{}, entriesInFlight), flying: make(chan flight, entriesInFlight),
	}
}

// submit takes a command, or refuses it with errBusy or with the error of run's end.
func (p *proposer) submit(x proposal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended != nil {
		return p.ended
	}
	if !p.queue.add(x) {
		return errBusy
	}
	signal(p.wake)
	return nil
}

// run proposes until ctx ends. Commands that are still in the queue then are answered with its cause. It returns once
// all have been answered, for which raft must go on: lose the leadership or shut down.
func (p *proposer) run(ctx context.Context) {
	var answering sync.WaitGroup
	answering.Go(p.land)
	for ctx.Err() == nil {
		select {
		case p.places <- struct{}{}:
		case <-ctx.Done():
			continue
		}
		batch := p.next(ctx)
		if batch == nil {
			break
		}
		entry := encode(p.term, batch, p.now())
		p.watchdog.launch()
		future := p.apply(entry, 0)
		p.flying <- flight{batch, future, landing(future)}
	}
	p.mu.Lock()
	p.ended = context.Cause(ctx)
	left := p.queue.drain()
	p.mu.Unlock()
	close(p.flying)
	answering.Wait()
	for _, x := range left {
		x.done(outcome{}, p.ended)
	}
}

// next waits for commands and takes them out of the queue; nil once ctx has ended.
func (p *proposer) next(ctx context.Context) []proposal {
	for {
		p.mu.Lock()
		batch, obsolete := p.queue.take()
		p.mu.Unlock()
		for _, x := range obsolete {
			x.done(outcome{}, x.why)
		}
		if len(batch) > 0 {
			return batch
		}
		select {
		case <-p.wake:
		case <-ctx.Done():
			return nil
		}
	}
}

// weight is about how many bytes a command takes.
func weight(c *machine.Command) int {
	size := 64 + len(c.Client) + len(c.Name) + len(c.RequestID) + len(c.Reason) + len(c.By)
	for i := range c.Requests {
		r := &c.Requests[i]
		size += 64 + len(r.Name) + len(r.ID) + len(r.HoldID) + len(r.Owner)
		for key, value := range r.Metadata {
			size += len(key) + len(value)
		}
	}
	for _, id := range c.Under {
		size += len(id)
	}
	size += 24 * len(c.Deadlines)
	return size
}

func encode(term uint64, batch []proposal, at time.Time) []byte {
	b := machine.Batch{At: at.UnixNano(), Commands: make([]machine.Command, len(batch))}
	for i := range batch {
		b.Commands[i] = batch[i].command
	}
	return machine.AppendBatch(beginEntry(entryBatch, term), &b)
}

// land answers batches in the order of the log.
func (p *proposer) land() {
	for f := range p.flying {
		var err error
		select {
		case err = <-f.landed:
		case <-p.dead:
			err = raft.ErrRaftShutdown
		}
		p.watchdog.land(err)
		<-p.places
		if err != nil {
			err = proposalError(err)
			for _, x := range f.batch {
				x.done(outcome{}, err)
			}
			continue
		}
		out, ok := f.future.Response().(*applied)
		for i, x := range f.batch {
			switch {
			case !ok: // the replica is broken: what the others make of the entry is not known here
				x.done(outcome{}, errUnknown)
			case out.stale:
				x.done(outcome{}, errNotLeader)
			default:
				x.done(outcome{result: out.results[i], notices: out.notices[i]}, nil)
			}
		}
	}
}

// landing has the future's error, once there is one: raft forgets entries that were on their way to the state machine
// when it shut down, so nobody may wait for a future alone.
func landing(f raft.Future) <-chan error {
	landed := make(chan error, 1)
	go func() { landed <- f.Error() }()
	return landed
}

// await waits for a future, or for the end of raft.
func (n *node) await(f raft.Future) error {
	select {
	case err := <-landing(f):
		return err
	case <-n.dead:
		return raft.ErrRaftShutdown
	}
}

// proposalError tells whether the entry was certainly not proposed.
func proposalError(err error) error {
	if errors.Is(err, raft.ErrNotLeader) || errors.Is(err, raft.ErrLeadershipTransferInProgress) {
		return fmt.Errorf("%w: %w", errNotLeader, err)
	}
	return fmt.Errorf("%w: %w", errUnknown, err)
}

// proposeFact puts a fact about the cluster into the log of term and returns once it is applied here.
func (n *node) proposeFact(term uint64, x fact) error {
	body, err := json.Marshal(x)
	if err != nil {
		return err
	}
	future := n.raft.Apply(append(beginEntry(entryFact, term), body...), 0)
	if err := n.await(future); err != nil {
		return err
	}
	out, ok := future.Response().(*applied)
	switch {
	case !ok:
		return n.fsm.failure()
	case out.stale:
		return errNotLeader
	}
	return nil
}
