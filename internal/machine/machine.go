// Package machine is the lock state machine of the bundled server: the meaning of a replicated log of commands. It is
// pure. It reads no clock, does no I/O, starts no goroutine and does not know Raft or connections, so that the same
// commands in the same order leave every replica in the same state, with the same tokens, in all versions.
//
//	leader:   requests ─► Command ─► AppendBatch ─► log entry
//	replicas: log entry ─► DecodeBatch ─► Machine.Apply ─► Result for the sender, Notices for others
//
// # Sessions and names
//
// A session is the unit that the leader times; all holds and waits of a client belong to a session and end with it. A
// name exists only while a request holds it or waits for it. The state of a machine lives in three maps: sessions by
// their id, holds by their token, waits by their ticket; the queues of the names are computed from them.
//
// # One number
//
// Machine.Revision counts events, from 1. The revision of the event that grants is the token of the hold; the
// revision of the event that queues is the ticket of the wait; a revision is also the cursor of a client that follows
// the events. Revisions and tokens therefore increase strictly, over all names together. They stay below 1<<63;
// tokens of holds that are not exclusive carry the mark of fencing.Token.NotExclusive on top. The counter is part of
// the snapshot and never decreases; RestoreBackup advances it far.
//
// # Who gets a name
//
// A request is granted immediately if it is compatible with every holder and with every earlier waiter of each of its
// names; otherwise it is refused, or takes one ticket in all of its queues. Whenever a hold or a wait ends, the
// waiters of its names are checked by the same rule, in the order of their tickets. Hence no request barges, not even
// a request that does not wait, and a waiting exclusive request blocks later shared requests. Requests for permits
// never overtake each other, even if the later and smaller one would fit.
//
// Kinds. Exclusive and shared requests of a name mix. Permits mix only with permits of the same limit, and
// hierarchical requests only with hierarchical requests. Any other request is CodeMismatch, judged against the
// present holders and waiters of the name.
//
// # Hierarchy
//
// A hierarchical request (Request.Hierarchical) claims "a/b/c" in its own kind and leaves an intention on "a" and
// "a/b". An exclusive hold of "a/b" excludes hierarchical holds of "a" and of "a/b/c"; a shared hold excludes
// exclusive holds there. Holds of "a/b" and "a/c" do not conflict. The ancestors of a name are its nonempty prefixes
// before each "/". Permits cannot be hierarchical.
//
// A flat request concerns its own name only. A name in use by flat requests refuses hierarchical requests, and vice
// versa, ancestors included: while "a/b" is held flatly, a hierarchical request for "a/b/c" is CodeMismatch. But a
// hierarchical request for "a" does not see a flat hold of "a/b": a client that wants a hierarchy must send only
// hierarchical requests.
//
// # Deadlocks
//
// A client library runs many independent callers in one session, so a session that waits for itself is no deadlock.
// Instead, Command.Under lists the holds that are kept while the request waits, in any session, by their request ids.
// A request that would have to wait is refused with CodeDeadlock if it would close a cycle. The search starts from
// the newcomer's blockers: from a waiter it goes on to the waiter's blockers, from a hold to the blockers of every
// waiter under that hold; a hold in the newcomer's Under closes the cycle. A request without Under closes no cycle,
// and no hold leads to it. Two requests under one hold that want the same name just queue. Lingering holds have no
// owner.
//
// A search visits at most Limits.DeadlockSteps names, holders and waiters; it does not find cycles beyond. A holder
// of permits is a link only if the request would not fit even if all other holders released theirs: otherwise one of
// them may make room.
//
// # Repetition
//
// Every command may be repeated after a lost answer. Two mechanisms make that harmless:
//
// By request id. An acquire with the same request id for the same name, from the same session, returns its hold or
// its ticket, and makes no change. From another session it is CodeConflict; OpMove takes the hold or the ticket over.
//
// By sequence. A command with Session and Seq is carried out once. Its result is remembered until Command.Acked of a
// later command reaches its number; a number up to there is CodeStale, without an effect. A repeated command that was
// granted or queued is not carried out again, and returns the present state of its requests: CodeGranted with the
// same tokens, CodeQueued, or CodeNotHeld if one of the holds ended for any reason. Every other result stays as it
// was. So CodeGranted always describes the present state.
//
// A caller that abandons an acquire sends Release without a token, with Target set to the Seq of that acquire: its
// hold or wait ends, and should the acquire arrive only later, it is answered CodeCancelled and has no effect.
//
// # Concurrency
//
// Apply, Restore and RestoreBackup are called by one goroutine at a time. All reading methods, Freeze and Hash
// included, may be called from any goroutine at any time. Their results share memory with the machine and must not be
// changed.
package machine

import (
	"sync"
	"time"

	"github.com/google/btree"
)

// Machine is the state of one replica. New makes one.
type Machine struct {
	mu sync.RWMutex // protects the following fields; reads take it for reading

	revision uint64
	now      int64 // the highest stamp seen, Unix nanoseconds
	clock    time.Duration
	limits   Limits
	level    uint32
	rules    *Rules    // never nil
	policies *Policies // never nil
	sessions map[SessionID]*session
	holds    map[uint64]*hold // by the order of their tokens
	waits    map[uint64]*wait // by ticket

	// Computed from holds and waits.
	names     map[string]*entry
	sorted    *btree.BTreeG[*entry]   // the same, by name
	claimants map[requestKey]claimant // all waits, and the holds that are not exclusive
	under     map[string][]*wait      // by the id of a hold: the waiters under it, by ticket
	clients   map[string]Usage        // and of sessions

	past history // not part of the state
	// follows: news has the events that News has not returned yet. Neither is part of the state.
	follows bool
	news    []Event

	// Of one Apply.
	touched []*entry // lost a claim
	looked  int      // the waiters that settle has visited, since the machine was made
	notices []Notice
	scratch []claim // of claimsOf
	wanted  []claim // of acquire
}

// firstRevision is the revision of a machine without any change. It is not 0, so that a client that follows the
// events from there differs from a client that names no revision.
const firstRevision = 1

// New returns an empty machine with DefaultLimits, at revision 1 and the first level.
//
// events bounds the number of events that EventsSince can return; at least one is kept. It is local to the replica
// and does not change the effect of commands.
func New(events int) *Machine {
	return &Machine{
		revision: firstRevision, limits: DefaultLimits(), level: firstLevel, rules: &Rules{}, policies: &Policies{},
		sessions:  map[SessionID]*session{},
		holds:     map[uint64]*hold{},
		waits:     map[uint64]*wait{},
		names:     map[string]*entry{},
		sorted:    newIndex(),
		claimants: map[requestKey]claimant{},
		under:     map[string][]*wait{},
		clients:   map[string]Usage{},
		past:      history{base: firstRevision, most: max(events, 1)},
	}
}

// newIndex returns an empty index of names.
func newIndex() *btree.BTreeG[*entry] {
	return btree.NewG(32, func(a, b *entry) bool { return a.name < b.name })
}

// Revision returns the number of the last event.
func (m *Machine) Revision() uint64 {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.revision
}

// Limits returns the limits in force.
func (m *Machine) Limits() Limits {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.limits
}

// Clock returns the cluster's clock as the last OpCheckpoint has set it. It counts from an arbitrary moment in the
// past and may run slow: each leader continues from the last value of its predecessor that it knows.
func (m *Machine) Clock() time.Duration {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.clock
}

// Level returns the feature level: see OpRaiseLevel.
func (m *Machine) Level() uint32 {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.level
}
