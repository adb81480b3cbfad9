package lead

// Commands on their way into the log: queued in lanes, gathered into entries, and answered in the order of the log.

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/notify"
	"github.com/fencelock/fencelock/internal/server/replica"
)

const (
	// entriesInFlight is the number of log entries under way at a time. With one, the disk rests while answers are
	// written; with more, the commands that could share an entry are spread over several.
	entriesInFlight = 2
	// maxBatch bounds the commands of one log entry, and maxBatchBytes their weight. A single command may weigh more.
	maxBatch      = 4096
	maxBatchBytes = 1 << 20
	// maxQueued bounds the commands that wait for an entry, where one connection has more than fewQueued of them.
	maxQueued = 64 << 10
	fewQueued = 16
)

// ErrBusy means that a command was refused for lack of room.
var ErrBusy = errors.New("too many requests wait for the log")

// Proposal is one command on its way into the log.
type Proposal struct {
	Command machine.Command
	By      Listener // who sent it; nil: the server itself
	From    string   // whose connection it came on, for people; empty: the server's own, or within the process
	Address string   // from where that connection came; empty as From is
	// Obsolete tells, just before the command goes into the log, why it must not. It must not block. nil: it always
	// may.
	Obsolete func() error
	// Done is called once: with the Outcome, in the order of the log, from one goroutine for all, so it must not block;
	// or with an error. replica.ErrUnknown leaves the outcome open; after any other error the command was not carried
	// out.
	Done func(Outcome, error)

	at time.Time // of its receipt
}

// Outcome is the result of one command.
type Outcome struct {
	Result  machine.Result
	Notices []machine.Notice
}

// proposer puts commands into the log, many per entry: it waits for one of the places in flight first and then takes
// all commands that have gathered meanwhile. So there is one fsync per batch, and no timer.
type proposer struct {
	log journal
	now func() time.Time
	// account gets each entry. Nil: no counting.
	account *account

	mu    sync.Mutex
	queue lanes
	ended error // set once run is over

	wake   notify.Signal // there is something in the queue
	places chan struct{}
	flying chan flight
}

// journal is the log of one term: a replica.Term.
type journal interface {
	Propose(*machine.Batch) (wait func() (*replica.Applied, error))
}

type flight struct {
	batch []Proposal
	wait  func() (*replica.Applied, error)
}

func newProposer(log journal, now func() time.Time) *proposer {
	return &proposer{
		log: log, now: now, wake: notify.New(),
		places: make(chan struct{}, entriesInFlight), flying: make(chan flight, entriesInFlight),
	}
}

// submit accepts a command, or refuses it with ErrBusy or with the error of run's end.
func (p *proposer) submit(x Proposal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended != nil {
		return p.ended
	}
	x.at = p.now()
	if !p.queue.add(x) {
		return ErrBusy
	}
	p.wake.Notify()
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
		p.flying <- flight{batch, p.log.Propose(batchOf(batch, p.now()))}
	}
	p.mu.Lock()
	p.ended = context.Cause(ctx)
	left := p.queue.drain()
	p.mu.Unlock()
	close(p.flying)
	answering.Wait()
	for _, x := range left {
		x.Done(Outcome{}, p.ended)
	}
}

// next waits for commands and takes them out of the queue; nil once ctx has ended.
func (p *proposer) next(ctx context.Context) []Proposal {
	for {
		p.mu.Lock()
		batch, obsolete := p.queue.take()
		p.mu.Unlock()
		for _, x := range obsolete {
			x.Done(Outcome{}, x.why)
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

// Weight estimates the bytes of a command: its bounds need no exact number.
func Weight(c *machine.Command) int {
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

func batchOf(all []Proposal, at time.Time) *machine.Batch {
	b := &machine.Batch{At: at.UnixNano(), Commands: make([]machine.Command, len(all))}
	for i := range all {
		b.Commands[i] = all[i].Command
	}
	return b
}

// land answers batches in the order of the log.
func (p *proposer) land() {
	for f := range p.flying {
		out, err := f.wait()
		<-p.places
		for i, x := range f.batch {
			if err != nil {
				x.Done(Outcome{}, err)
			} else {
				x.Done(Outcome{out.Results[i], out.Notices[i]}, nil)
			}
		}
		if err == nil && p.account != nil {
			p.account.landed(f.batch, out)
		}
	}
}
