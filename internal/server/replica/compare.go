package replica

import (
	"cmp"
	"context"
	"encoding/hex"
	"log/slog"
	"sync"
	"time"

	"github.com/fencelock/fencelock/internal/notify"
)

// Members that carried out the same log have the same state. A fault of memory, or of this code, can silently change
// that, and each later grant spreads the difference. So from time to time the leader proposes an entry at which every
// member takes the hash of its state, and then one with its own hash, with which the others compare theirs. A member
// that differs logs that. It goes on: people have to find out which of the two is wrong, and a cluster whose members
// stopped because the leader is wrong would be no better.

// compareEvery is the interval at which states are compared. Without writes they are not.
const compareEvery = time.Minute

// stateHash is the hash of the state after the log entry with an index.
type stateHash struct {
	Index uint64 `json:"index"`
	Hash  string `json:"hash"`
	// Version is the version of the member that made it: another version may encode the same state differently.
	Version string `json:"version,omitempty"`
}

// comparison has the hashes of a member's state and of the leader's.
type comparison struct {
	version string
	log     *slog.Logger // nil: no log

	mu      sync.Mutex
	busy    bool          // a hash is being made
	own     stateHash     // the last one
	leaders stateHash     // the leader's last one
	agreed  uint64        // the last index at which both were the same; zero: never
	differs uint64        // the last index at which they differed; zero: never since the state came from a snapshot
	made    notify.Signal // a hash was made
}

// mark takes the hash of the present state, which is the state after the entry with index, in the background. While a
// hash is being made, for example while a member reads its log at the start, no other begins.
func (c *comparison) mark(index uint64, freeze func() (*Frozen, error)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.busy || c.log == nil {
		return
	}
	state, err := freeze()
	if err != nil {
		return // the member stops
	}
	c.busy = true
	go func() {
		hash := state.machine.Hash()
		c.mu.Lock()
		defer c.mu.Unlock()
		c.busy = false
		c.own = stateHash{index, hex.EncodeToString(hash[:]), c.version}
		c.compare()
		c.made.Notify()
	}()
}

// told notes the leader's hash.
func (c *comparison) told(h stateHash) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leaders = h
	c.compare()
}

// compare compares, if both are of one entry. The caller holds c.mu.
func (c *comparison) compare() {
	switch {
	case c.log == nil || c.own.Index == 0 || c.own.Index != c.leaders.Index || c.own.Version != c.leaders.Version:
	case c.own.Hash == c.leaders.Hash:
		c.agreed = c.own.Index
	default:
		if c.differs == 0 {
			c.log.Error("this member's state differs from the leader's: one of them is corrupt",
				"after entry", c.own.Index, "here", c.own.Hash, "leader", c.leaders.Hash,
				"agreed after entry", c.agreed)
		}
		c.differs = c.own.Index
	}
}

// anew resets the comparison: the state has come from a snapshot.
func (c *comparison) anew() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.own, c.leaders, c.agreed, c.differs = stateHash{}, stateHash{}, 0, 0
}

// result returns the last index at which the states agreed, and the last at which they differed.
func (c *comparison) result() (agreed, differs uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.agreed, c.differs
}

// CompareStates makes the members compare their states now and then, unless there is only one voter, until ctx ends.
// every is the interval; 0: once a minute.
func (t *Term) CompareStates(ctx context.Context, every time.Duration) {
	r := t.replica
	c := &r.State.comparison
	every = cmp.Or(every, compareEvery)
	tick := time.NewTicker(every)
	defer tick.Stop()
	for last := uint64(0); ; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if r.Voters() == 1 || r.State.Machine.Revision() == last {
			continue
		}
		select {
		case <-c.made: // of an earlier one
		default:
		}
		before := r.State.Machine.Revision()
		if !t.tell(ctx, fact{Mark: true}) {
			return
		}
		select {
		case <-c.made:
		case <-time.After(every): // it was not begun, because another one was being made
			continue
		case <-ctx.Done():
			return
		}
		c.mu.Lock()
		own := c.own
		c.mu.Unlock()
		if !t.tell(ctx, fact{Hash: &own}) {
			return
		}
		last = before
	}
}
