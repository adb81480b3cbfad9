package replica

// The greatest TTL that a session may have. It also determines the time for which a cluster that was restored from a
// backup or from one disk does not serve clients. A client that got a lock shortly before the old cluster was lost
// relies on it for its TTL, and may have got it after the backup was made. So the greatest permitted TTL counts, not
// the TTLs in use in the backup. It is in the log before any session may have it.

import (
	"cmp"
	"context"
	"time"
)

const (
	// DefaultMaxTTL is the greatest TTL of a session in a cluster that this version created, unless configured.
	DefaultMaxTTL = time.Hour
	// earlierMaxTTL is the default of clusters that an earlier version created.
	earlierMaxTTL = 24 * time.Hour
)

// permitted are the facts about TTLs. They are zero in a cluster that an earlier version created, which did not record
// them.
type permitted struct {
	// MaxTTL is at least the greatest TTL that a leader permits now, or has permitted within the last MaxTTL.
	MaxTTL time.Duration `json:"maxTTL,omitempty"`
	// DefaultMaxTTL is the MaxTTL of a leader without a configured one.
	DefaultMaxTTL time.Duration `json:"defaultMaxTTL,omitempty"`
}

func (p permitted) max() time.Duration { return cmp.Or(p.MaxTTL, earlierMaxTTL) }

// MaxTTL returns the greatest TTL of a session that this member grants when it leads.
func (r *Replica) MaxTTL() time.Duration {
	f := r.State
	f.mu.RLock()
	defer f.mu.RUnlock()
	return r.maxTTL(&f.facts)
}

// maxTTL is like MaxTTL, for the facts x. The caller holds their lock.
func (r *Replica) maxTTL(x *facts) time.Duration {
	byDefault := DefaultMaxTTL
	if x.Cluster != "" {
		byDefault = cmp.Or(x.DefaultMaxTTL, earlierMaxTTL)
	}
	return cmp.Or(r.config.MaxTTL, byDefault)
}

// PermitTTL records that sessions may have a TTL of up to MaxTTL, before any session has. It returns false if ctx ends
// earlier.
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

// LowerTTL lowers the TTL that PermitTTL recorded to MaxTTL, once no client can rely on a longer TTL. Until then it
// does nothing. The conditions: this member has led since begin, and for at least the recorded TTL; no session has a
// TTL longer than MaxTTL; and no other member would grant such a TTL.
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
