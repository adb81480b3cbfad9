package lead

// How commands get into the log: they wait in lanes, are gathered into entries, and are answered in the order of the
// log.

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
	// entriesInFlight is the maximum number of log entries in progress. With one, the disk would be idle while answers are
	// written; with more, commands that could share an entry would be spread over several.
	entriesInFlight = 2
	// maxBatch bounds the commands of one log entry, and maxBatchBytes their Weight. A single command may weigh more.
	maxBatch      = 4096
	maxBatchBytes = 1 << 20
	// maxQueued bounds the commands that wait for an entry. A connection with fewer than fewQueued commands may exceed it.
	maxQueued = 64 << 10
	fewQueued = 16
)

// ErrBusy means that too many commands wait for the log.
var ErrBusy = errors.New("too many requests wait for the log")

// Proposal is a command for the log.
type Proposal struct {
	Command machine.Command
	By      Listener // the sender; nil: the server itself
	From    string   // the client of the connection, for people; empty without a connection
	Address string   // the remote address of the connection; empty as From is
	// Obsolete is called just before the command goes into the log. It returns the reason if the command must no longer do
	// so. It must not block. Nil: the command is never obsolete.
	Obsolete func() error
	// Done is called once, with the Outcome or with an error. Calls with an Outcome come in the order of the log, from one
	// goroutine, so Done must not block. With replica.ErrUnknown the outcome is unknown; after any other error the command
	// had no effect.
	Done func(Outcome, error)

	at time.Time // the receipt
}

// Outcome is the result of one command.
type Outcome struct {
	Result  machine.Result
	Notices []machine.Notice
}

// proposer puts commands into the log, many per entry. It first waits until fewer than entriesInFlight entries are in
// progress, and then takes all commands that have gathered in the meantime. So there is one fsync per batch, without a
// timer.
type proposer struct {
	log journal
	now func() time.Time
	// account counts each entry. Nil: no counting.
	account *account

	mu    sync.Mutex
	queue lanes
	ended error // set when run ends

	wake   notify.Signal // the queue has commands
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

// run proposes commands until ctx ends. It then answers the commands in the queue with the cause, and returns once all
// commands are answered. For the entries in progress, raft must first commit them, lose the leadership or shut down.
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

// next waits for commands and removes them from the queue. It returns nil once ctx has ended.
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

// Weight estimates the size of a command in bytes. The limits that use it need no exact number.
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
