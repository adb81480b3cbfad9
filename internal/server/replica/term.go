package replica

// One term of leadership in the log: the leader's entries, and the proof that it led. Package lead decides which
// entries to write, and when.

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

// ErrUnknown means that the outcome of a command is unknown: it may still take effect.
var ErrUnknown = errors.New("leadership was lost before the outcome was known")

// retryAfter is the pause before a failed fact is proposed again.
const retryAfter = 100 * time.Millisecond

// Term is one term in which this member leads: its entries in the log, and the proof that it led. No replica applies an
// entry of a Term that commits in another term.
type Term struct {
	replica   *Replica
	number    uint64
	confirmer *confirmer
}

// Lead returns the Term for a term in which this member leads. The caller calls Run, and End at the end of the term.
func (r *Replica) Lead(term uint64) *Term {
	return &Term{replica: r, number: term, confirmer: newConfirmer(r.raft, r.proof, r.id, term)}
}

// Number returns the number of the term. Every election begins a greater term.
func (t *Term) Number() uint64 { return t.number }

// Run answers Confirm and admits the processes of starting members, until ctx ends. It answers the remaining calls of
// Confirm with the cause.
func (t *Term) Run(ctx context.Context) {
	var recording sync.WaitGroup
	defer recording.Wait()
	recording.Go(func() { t.recordStarts(ctx) })
	t.confirmer.run(ctx)
}

// End ends the term. The caller no longer proposes entries.
func (t *Term) End() { t.replica.stores.silence.deposed() }

// Confirm calls then with nil once it is proven that this member led at an instant after the call of Confirm, or with
// the cause of the end of Run. It needs no log entry. One goroutine calls the functions of all calls, so then must not
// block.
func (t *Term) Confirm(then func(error)) { t.confirmer.ask(then) }

// Serve sets whether this term serves clients. Only then does it answer the questions of other members to the leader.
func (t *Term) Serve(yes bool) {
	if yes {
		t.replica.serving.Store(t)
		return
	}
	t.replica.serving.Store(nil)
}

// acknowledged returns an index that includes all entries that were acknowledged to anybody before the call. It is the
// applied index, since a leader applies an entry before it acknowledges the entry. Every state machine gets the entry
// with this index: other members would never reach the index of the entry without a command with which raft begins a
// term.
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

// Propose passes the commands of one log entry to raft, and returns a function that waits for their outcome. Only one
// goroutine may propose entries, and the caller must wait for them in order. The error wraps ErrNotLeader if no command
// had an effect, otherwise ErrUnknown.
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
		case !ok: // this replica has failed: it does not know the result of the entry
			return nil, ErrUnknown
		case out.Stale:
			return nil, ErrNotLeader
		}
		return out, nil
	}
}

// EncodeBatch returns a log entry with commands that a leader decides in a term.
func EncodeBatch(term uint64, b *machine.Batch) []byte {
	return machine.AppendBatch(beginEntry(entryBatch, term), b)
}

// proposalError wraps err in ErrNotLeader if the entry was certainly not proposed, otherwise in ErrUnknown.
func proposalError(err error) error {
	if errors.Is(err, raft.ErrNotLeader) || errors.Is(err, raft.ErrLeadershipTransferInProgress) {
		return fmt.Errorf("%w: %w", ErrNotLeader, err)
	}
	return fmt.Errorf("%w: %w", ErrUnknown, err)
}

// Begin returns true once an entry of this term has gone through the log, so that all entries of earlier terms are
// applied. These may end sessions, so the leader must apply them before it confirms a session. Begin returns false if
// ctx ends earlier.
func (t *Term) Begin(ctx context.Context) bool {
	r := t.replica
	own := fact{Member: r.id, Client: r.config.Client, Started: r.id, Start: r.start}
	if r.State.Cluster() == "" {
		own.Cluster, own.MaxTTL, own.DefaultMaxTTL = newClusterID(), r.MaxTTL(), DefaultMaxTTL
	}
	return t.tell(ctx, own)
}

// Reopen records the end of the time in which the cluster did not serve clients after a restore. It returns false if
// ctx ends earlier.
func (t *Term) Reopen(ctx context.Context) bool { return t.tell(ctx, fact{Opened: true}) }

// tell puts a fact into the log of this term, and retries until it is applied. It returns false if ctx ends earlier.
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

// tryTell proposes a fact in this term once, and returns nil once it is applied here.
func (t *Term) tryTell(x fact) error {
	x.Leader = t.replica.start
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

// newClusterID returns a random name for a cluster. The name identifies its token space.
func newClusterID() string {
	var raw [16]byte
	rand.Read(raw[:]) // never fails
	return hex.EncodeToString(raw[:])
}
