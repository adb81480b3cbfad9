package replica

// The greatest TTL that a session may have, and the time for which a cluster that is made of a backup or of one disk
// serves nobody. A client that got a lock when the old cluster was lost relies on it for its TTL, and may have got it
// after the backup was made. So the greatest permitted TTL counts, and not those in use. It is in the log before a
// session may have it.

import (
	"cmp"
	"context"
	"time"
)

const (
	// DefaultMaxTTL is the greatest TTL of a session in a cluster that this version made, unless configured.
	DefaultMaxTTL = time.Hour
	// earlierMaxTTL is the default of clusters that an earlier version made.
	earlierMaxTTL = 24 * time.Hour
)

// permitted are the facts about TTLs. Zeros are of a cluster of an earlier version, which did not record them.
type permitted struct {
	// MaxTTL is at least the greatest TTL that a leader permits, and has permitted within that time.
	MaxTTL time.Duration `json:"maxTTL,omitempty"`
	// DefaultMaxTTL is the MaxTTL of a leader without a configured one.
	DefaultMaxTTL time.Duration `json:"defaultMaxTTL,omitempty"`
}

func (p permitted) max() time.Duration { return cmp.Or(p.MaxTTL, earlierMaxTTL) }

// MaxTTL is the greatest TTL of a session that this member grants when it leads.
func (r *Replica) MaxTTL() time.Duration {
	f := r.State
	f.mu.RLock()
	defer f.mu.RUnlock()
	return r.maxTTL(&f.facts)
}

// maxTTL is MaxTTL for facts that the caller may read.
func (r *Replica) maxTTL(x *facts) time.Duration {
	byDefault := DefaultMaxTTL
	if x.Cluster != "" {
		byDefault = cmp.Or(x.DefaultMaxTTL, earlierMaxTTL)
	}
	return cmp.Or(r.config.MaxTTL, byDefault)
}

// PermitTTL notes that sessions may have a TTL up to MaxTTL, before any has. It reports false if ctx ended before.
func (t *Term) PermitTTL(ctx context.Context) bool {
	r := t.replica
	r.State.mu.RLock()
	now, want := r.State.facts.permitted, r.maxTTL(&r.State.facts)
	r.State.mu.RUnlock()
	if want = max(want, now.max(), r.State.Machine.LongestTTL()); want == now.MaxTTL {
		return true
	}
	return t.tell(ctx, fact{MaxTTL: want})
}

// LowerTTL lowers the recorded TTL of PermitTTL to MaxTTL, once no client relies on a longer TTL any more: for as
// long as the former value, from begin on, this member has led and granted no longer one, no session has one, and no
// other member would grant one.
func (t *Term) LowerTTL(ctx context.Context, begin time.Time) error {
	r := t.replica
	r.State.mu.RLock()
	before, want := r.State.facts.max(), r.maxTTL(&r.State.facts)
	r.State.mu.RUnlock()
	if want >= before || r.config.Now().Sub(begin) < before || r.State.Machine.LongestTTL() > want {
		return nil
	}
	for _, m := range r.servers() {
		if m.ID == r.id {
			continue
		}
		a, err := r.peers.ask(ctx, string(m.Address), question{})
		if err != nil {
			return err
		}
		if a.ID != m.ID || a.MaxTTL == 0 || a.MaxTTL > want {
			return nil
		}
	}
	return t.tryTell(fact{MaxTTL: want})
}
