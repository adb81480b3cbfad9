package lead

// Deadlines that a leader records in the log for the next leader, so that a dead holder does not get its whole TTL from
// every new leader. docs/decisions/2026-11-22-what-is-left-of-a-lease.md describes them, and argues why no holder
// outlives its validity.

import (
	"container/heap"
	"context"
	"slices"
	"time"

	"github.com/fencelock/fencelock/internal/machine"
)

// silence returns the time without renewals after which a session becomes kept. With few sessions it is short, so that
// a new leader grants little time a second time. It grows with the number of sessions, so that the load on the log
// stays bounded. It is at most half the TTL: a live client renews more often, so in a large cluster only sessions
// without renewals become kept. The caller holds k.mu.
func (k *Timekeeper) silence(ttl time.Duration) time.Duration {
	if k.alone.Load() {
		return ttl / 2
	}
	return min(ttl/2, time.Duration(len(k.sessions))*keepPace)
}

// keep begins to keep sessions in the log. The first are the sessions whose last renewal this new leader does not know.
// keep waits until their deadlines are in the log, or the proposals have failed, or ctx ends.
func (k *Timekeeper) keep(ctx context.Context) {
	k.mu.Lock()
	k.keeps = true
	var silent []*deadline
	for _, d := range k.heap {
		if d.token == 0 && !d.ending && !d.kept && d.renewed.IsZero() {
			d.kept, d.writing = true, true
			silent = append(silent, d)
		}
	}
	k.kept += len(silent)
	for _, d := range k.heap {
		d.seen = k.next(d)
	}
	heap.Init(&k.heap)
	k.wake.Notify()
	k.mu.Unlock()
	written, n := make(chan struct{}, len(silent)), 0
	for chunk := range slices.Chunk(silent, keptAtOnce) {
		k.checkpoint(chunk, func() { written <- struct{}{} })
		n++
	}
	for range n {
		select {
		case <-written:
		case <-ctx.Done():
			return
		}
	}
}

// checkpoint records the time, and the deadlines of all, in the log. If then is not nil, checkpoint calls it when the
// log has the record, or the proposal failed.
func (k *Timekeeper) checkpoint(all []*deadline, then func()) {
	k.mu.Lock()
	c := machine.Command{Op: machine.OpCheckpoint, Clock: k.clock.At(k.now())}
	for _, d := range all {
		c.Deadlines = append(c.Deadlines, machine.Deadline{Session: d.session, At: k.clock.At(d.at)})
	}
	k.mu.Unlock()
	written := func(err error) {
		k.written(all, err)
		if then != nil {
			then()
		}
	}
	if err := k.propose(c, written); err != nil {
		written(err)
	}
}

// written handles the result of a checkpoint. After an error the sessions stay kept, because the log may have the
// deadlines, which count for the next leader; the checkpoint is retried after retryAfter.
func (k *Timekeeper) written(all []*deadline, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, d := range all {
		d.writing, d.unkept = false, time.Time{}
		if err != nil {
			d.unkept = k.now().Add(retryAfter)
			k.move(d)
		}
	}
}
