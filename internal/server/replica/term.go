package replica

// One term of leadership in the log: the leader's entries, and the proof that it led. Package lead decides what to
// write, and when.

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/machine"
)

// ErrUnknown means that the outcome of a command is open: it may be carried out yet.
var ErrUnknown = errors.New("leadership was lost before the outcome was known")

// retryAfter is the pause before a fact that could not be written is proposed again.
const retryAfter = 100 * time.Millisecond

// Term is one term in which this member leads: its entries in the log as the leader, and the proof that it led. No
// replica carries out an entry that lands in a later term of the same member.
type Term struct {
	replica   *Replica
	number    uint64
	confirmer *confirmer
}

// Lead begins a term in which this member leads. Run confirms in it, and End ends it.
func (r *Replica) Lead(term uint64) *Term {
	return &Term{replica: r, number: term, confirmer: newConfirmer(r.raft, r.proof, r.id, term)}
}

// Number names the term. Every election begins a greater one.
func (t *Term) Number() uint64 { return t.number }

// Run answers Confirm until ctx ends, and the remaining questions with its cause, and admits processes of members
// that start meanwhile.
func (t *Term) Run(ctx context.Context) {
	var recording sync.WaitGroup
	defer recording.Wait()
	recording.Go(func() { t.recordStarts(ctx) })
	t.confirmer.run(ctx)
}

// End ends the term: it stops proposing.
func (t *Term) End() { t.replica.stores.silence.deposed() }

// Confirm calls then with nil once it is proven that this member led at an instant after the call, or with the cause
// of the end of Run. It costs no log entry. It is called from one goroutine for all, and must not block.
func (t *Term) Confirm(then func(error)) { t.confirmer.ask(then) }

// Serve sets whether this term serves clients: only then it answers other members' questions to the leader.
func (t *Term) Serve(yes bool) {
	if yes {
		t.replica.serving.Store(t)
		return
	}
	t.replica.serving.Store(nil)
}

// acknowledged returns the index of the last entry that was acknowledged to anybody before the call. A leader carries
// an entry out before it acknowledges the entry. The index is of an entry that every state machine gets: other
// members would never reach the index of a barrier, with which a term begins.
func (t *Term) acknowledged(ctx context.Context) (uint64, error) {
	index := t.replica.Applied()
	proven := make(chan error, 1)
	t.Confirm(func(err error) { proven <- err })
	select {
	case err := <-proven:
		return index, err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// Propose gives the commands of one log entry to raft, and returns a function that waits for their outcome. Entries
// are to be proposed from one goroutine, and waited for in their order. The error wraps ErrNotLeader if no command
// was carried out, else ErrUnknown.
func (t *Term) Propose(b *machine.Batch) (wait func() (*Applied, error)) {
	r := t.replica
	r.stores.silence.proposed()
	future := r.raft.Apply(EncodeBatch(t.number, b), 0)
	landed := landing(future)
	return func() (*Applied, error) {
		err := r.awaitLanding(landed)
		r.stores.silence.landed(err)
		if err != nil {
			return nil, proposalError(err)
		}
		out, ok := future.Response().(*Applied)
		switch {
		case !ok: // the replica is broken: it does not know the result of the entry at the others
			return nil, ErrUnknown
		case out.Stale:
			return nil, ErrNotLeader
		}
		return out, nil
	}
}

// EncodeBatch returns a log entry with commands, decided in a term.
func EncodeBatch(term uint64, b *machine.Batch) []byte {
	return machine.AppendBatch(beginEntry(entryBatch, term), b)
}

// proposalError wraps err in ErrNotLeader if the entry was certainly not proposed, else in ErrUnknown.
func proposalError(err error) error {
	if errors.Is(err, raft.ErrNotLeader) || errors.Is(err, raft.ErrLeadershipTransferInProgress) {
		return fmt.Errorf("%w: %w", ErrNotLeader, err)
	}
	return fmt.Errorf("%w: %w", ErrUnknown, err)
}

// Begin returns once all entries of earlier terms are applied: an entry of this term has gone through the log. Among
// them may be ends of sessions, which must be known before anybody learns that a session lives. It reports false if
// ctx ended before.
func (t *Term) Begin(ctx context.Context) bool {
	r := t.replica
	own := fact{Member: r.id, Client: r.config.Client, Started: r.id, Start: r.start}
	if r.State.Cluster() == "" {
		own.Cluster, own.MaxTTL, own.DefaultMaxTTL = newClusterID(), r.MaxTTL(), DefaultMaxTTL
	}
	return t.tell(ctx, own)
}

// Reopen records the end of the time in which the cluster served nobody after a restore. It reports false if ctx
// ended before.
func (t *Term) Reopen(ctx context.Context) bool { return t.tell(ctx, fact{Opened: true}) }

// tell puts a fact into the log of this term. It reports false if ctx ended before.
func (t *Term) tell(ctx context.Context, x fact) bool {
	for ctx.Err() == nil {
		err := t.tryTell(x)
		t.replica.stores.silence.answered(err)
		if err == nil {
			return true
		}
		t.replica.config.Log.Debug("an entry about the cluster failed", "term", t.number, "error", err)
		select {
		case <-time.After(retryAfter):
		case <-ctx.Done():
		}
	}
	return false
}

// tryTell puts a fact into the log of this term and returns once it is applied here.
func (t *Term) tryTell(x fact) error {
	body, err := json.Marshal(x)
	if err != nil {
		return err
	}
	r := t.replica
	future := r.raft.Apply(append(beginEntry(entryFact, t.number), body...), 0)
	if err := r.await(future); err != nil {
		return err
	}
	out, ok := future.Response().(*Applied)
	switch {
	case !ok:
		return r.State.failure()
	case out.Stale:
		return ErrNotLeader
	}
	return nil
}

// newClusterID returns a name for a cluster: tokens of two clusters do not compare.
func newClusterID() string {
	var raw [16]byte
	rand.Read(raw[:]) // never fails
	return hex.EncodeToString(raw[:])
}
