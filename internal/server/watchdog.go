package server

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

const (
	// hangAfter is how long an entry may be on its way into the log and through the state machine before the leader
	// gives up, and how long raft may refuse entries because it hands the leadership over. Both are far beyond what a
	// slow disk, a slow follower or a hand-over takes: raft gives up a hand-over after an election timeout and one
	// message.
	hangAfter = 5 * time.Second
	// watchdogEvery is how often a leader looks.
	watchdogEvery = 100 * time.Millisecond
)

// watchdog knows, for one term, whether the log goes on.
//
// A leader of which a part stands still (the main loop of raft, the state machine, a hand-over of the leadership that
// never ends) can go on to send heartbeats, and then nobody succeeds it and nobody is served. So it falls silent
// towards the others, as one whose disk hangs: they elect another leader, and raft steps down here when it hears
// nothing of them. Nothing is timed while nobody writes: who renews and who looks is served rightly meanwhile, and the
// end of a session is a write.
type watchdog struct {
	after time.Duration

	mu      sync.Mutex
	flying  []time.Time // when each entry was proposed that has not landed, in their order
	refused time.Time   // since when raft hands over; zero: it does not
}

// launch notes that an entry is about to be proposed.
func (p *watchdog) launch() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.flying = append(p.flying, time.Now())
}

// land notes that the first of the entries on their way has landed.
func (p *watchdog) land(err error) {
	p.mu.Lock()
	p.flying = p.flying[1:]
	p.mu.Unlock()
	p.answer(err)
}

// answer notes what raft said to an entry, in its own words.
func (p *watchdog) answer(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case !errors.Is(err, raft.ErrLeadershipTransferInProgress):
		p.refused = time.Time{}
	case p.refused.IsZero():
		p.refused = time.Now()
	}
}

// hangs returns why the term should end; nil if it need not.
func (p *watchdog) hangs() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.flying) > 0 {
		if since := time.Since(p.flying[0]); since > p.after {
			return fmt.Errorf("a log entry has been on its way for %v", since.Round(time.Millisecond))
		}
	}
	if !p.refused.IsZero() {
		if since := time.Since(p.refused); since > p.after {
			return fmt.Errorf("the leadership has been handed over for %v, and nobody took it", since.Round(time.Millisecond))
		}
	}
	return nil
}

// runWatchdog has this member fall silent while the log does not go on, until ctx ends.
func (r *leadership) runWatchdog(ctx context.Context) {
	node := r.server.node
	defer node.stores.watch.hung.Store(false)
	tick := time.NewTicker(watchdogEvery)
	defer tick.Stop()
	for told := false; ; {
		err := r.proposer.watchdog.hangs()
		others := voters(node.servers()) > 1
		node.stores.watch.hung.Store(err != nil && others)
		if err != nil && !told {
			r.server.log.Error("the log does not go on", "error", err, "silent, so that another member leads", others)
		}
		told = err != nil
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
