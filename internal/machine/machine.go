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
// name exists only as long as somebody holds it or waits for it. The state of a machine lives in three maps: sessions
// by their id, holds by their token, waits by their ticket; the queues of the names are computed from them.
//
// # One number
//
// Machine.Revision counts events, from 1. The revision of the event that grants is the token of the hold; the revision
// of the event that queues is the ticket of the wait; a revision is also the cursor of a client that follows the
// events. Revisions and tokens therefore increase strictly, over all names together. They stay below 1<<63; tokens of
// holds that are not exclusive carry the mark of fencing.Token.NotExclusive on top. The counter is part of the snapshot
// and never goes back; RestoreBackup sets it far ahead.
//
// # Who gets a name
//
// A request is granted immediately if it is compatible with every holder and with every earlier waiter of each of its
// names; otherwise it is refused, or takes one ticket in all of its queues. Whenever a hold or a wait ends, the
// waiters of the names concerned are checked, in the order of their tickets, by the same rule. Hence nobody barges,
// not even a request that does not wait, and a waiting exclusive request stops later shared ones. Requests for
// permits never overtake each other, even if the later and smaller one would fit.
//
// Kinds. Exclusive and shared requests of a name mix. Permits mix only with permits of the same limit, and
// hierarchical requests not with flat ones: CodeMismatch, judged against the present holders and waiters of the name.
//
// # Hierarchy
//
// A hierarchical request (Request.Hierarchical) claims "a/b/c" in its own kind and leaves an intention on "a" and
// "a/b". An exclusive hold of "a/b" excludes hierarchical holds of "a" and of "a/b/c"; a shared one excludes
// exclusive ones there. Holds of "a/b" and "a/c" do not touch each other. Ancestors are what stands before each "/",
// as far as it is not empty. Permits cannot be hierarchical.
//
// A flat request concerns its own name only. A name that is in use by flat requests refuses hierarchical ones and the
// other way round, ancestors included: while "a/b" is held flatly, a hierarchical request for "a/b/c" is
// CodeMismatch. But a hierarchical request for "a" does not see a flat hold of "a/b": a client that wants a hierarchy
// asks hierarchically throughout.
//
// # Deadlocks
//
// A client library runs many independent callers in one session, so a session that waits for itself is no deadlock.
// What counts is Command.Under, the holds that are kept while the request waits, by the ids of their requests and in
// whichever sessions. A request that would have to wait is refused with CodeDeadlock if it would close a cycle. The
// search starts from the newcomer's blockers: from a waiter it goes on to the waiter's blockers, from a hold to the
// blockers of all who wait under that hold; a hold that is among the newcomer's Under closes the cycle. Requests
// without Under close no cycle, and their holds lead to no waiter. Two requests under one hold that want the same name
// just queue. Lingering holds have no owner.
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
// granted or queued returns the present state of that, and is never carried out a second time: CodeGranted with the
// same tokens, CodeQueued, or CodeNotHeld if one of its holds ended, by whomever. Every other result stays as it was.
// So an answer that says granted always speaks of the present.
//
// A caller that abandons an acquire sends Release without a token, with Target set to the Seq of that acquire: its
// hold or wait ends, and should the acquire arrive only later, it is answered CodeCancelled and has no effect.
//
// # Concurrency
//
// Apply, Restore and RestoreBackup are called by one goroutine at a time. All reading methods (Freeze and Hash too)
// may be called from any goroutine at any time. Their results share memory with the machine and must not be changed.
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

// New returns an empty machine with DefaultLimits, at revision 1 and the first level, which keeps the last events.
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

// Clock returns the cluster's clock as the last OpCheckpoint has set it. It counts the time since some moment of the
// past, or less: each leader goes on from the last one's value, as far as it knows.
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
