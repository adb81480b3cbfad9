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

// Members that have applied the same log have the same state. A memory fault or a bug can change the state of one
// member unnoticed, and later grants spread the difference. So the leader periodically proposes an entry at which every
// member computes the hash of its state, and then an entry with its own hash, with which the other members compare
// theirs. A member whose hash differs logs the difference and continues: operators have to find out which of the two
// states is wrong, and if the leader is wrong, stopping all other members would not help.

// compareEvery is the interval at which members compare their states. Without writes they do not compare them.
const compareEvery = time.Minute

// stateHash is the hash of the state after the log entry Index.
type stateHash struct {
	Index uint64 `json:"index"`
	Hash  string `json:"hash"`
	// Version is the version of the member that computed it: another version may encode the same state differently.
	Version string `json:"version,omitempty"`
}

// comparison has the hashes of this member's state and of the leader's state.
type comparison struct {
	version string
	log     *slog.Logger // nil: no log

	mu      sync.Mutex
	busy    bool          // a hash is being computed
	own     stateHash     // the last own hash
	leaders stateHash     // the last hash of the leader
	agreed  uint64        // the last index at which both were equal; zero: never
	differs uint64        // the last index at which they differed; zero: never since the state came from a snapshot
	made    notify.Signal // a hash was computed
}

// mark computes the hash of the current state, which is the state after the entry index, in the background. It does
// nothing while another hash is being computed, for example while a starting member applies its log.
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

// told records the leader's hash.
func (c *comparison) told(h stateHash) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leaders = h
	c.compare()
}

// compare compares the hashes if both are of the same entry and version. The caller holds c.mu.
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

// anew resets the comparison, because the state now comes from a snapshot.
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

// CompareStates makes the members compare their states periodically until ctx ends, unless there is only one voter.
// every is the interval; 0: compareEvery.
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
		case <-c.made: // from an earlier mark
		default:
		}
		before := r.State.Machine.Revision()
		if !t.tell(ctx, fact{Mark: true}) {
			return
		}
		select {
		case <-c.made:
		case <-time.After(every): // this hash was skipped, because another one was in progress
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
