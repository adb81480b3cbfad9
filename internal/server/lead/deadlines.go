package lead

// Deadlines, and their heap. A renewal changes the deadline but not the heap: renewals are the most frequent operation
// of a lock service.

import (
	"container/heap"
	"time"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/machine"
)

// deadline is the end of a session, of a minimum hold or of a maximum hold.
type deadline struct {
	at    time.Time // when it is due
	seen  time.Time // its position in the heap: never after at
	index int       // in the heap

	session machine.SessionID
	ttl     time.Duration
	renewed time.Time // the receipt of the last renewal; zero: not by this leader
	ending  bool      // its end has been proposed
	kept    bool
	writing bool      // a checkpoint with its deadline is in progress
	unkept  time.Time // not zero: the checkpoint failed, and is retried at this time

	token     fencing.Token // not zero: a minimum or maximum hold
	name      string
	maximum   bool
	lingering bool // the hold has ended; the name becomes free at the deadline
}

// renew extends the deadline to the TTL and the grace after the receipt. It never shortens the deadline: a request with
// an earlier receipt may be handled later.
func (d *deadline) renew(receipt time.Time) {
	if at := receipt.Add(d.ttl + grace); !at.Before(d.at) {
		d.at, d.renewed = at, receipt
	}
}

func (k *Timekeeper) push(d *deadline) {
	d.seen = k.next(d)
	heap.Push(&k.heap, d)
	if d.index == 0 {
		k.wake.Notify()
	}
}

// move restores the heap order after a change of d.
func (k *Timekeeper) move(d *deadline) {
	if d.index < 0 {
		return
	}
	d.seen = k.next(d)
	heap.Fix(&k.heap, d.index)
	if d.index == 0 {
		k.wake.Notify()
	}
}

func (k *Timekeeper) remove(d *deadline) {
	if d.index >= 0 {
		heap.Remove(&k.heap, d.index)
	}
}

type deadlineHeap []*deadline

func (h deadlineHeap) Len() int { return len(h) }

func (h deadlineHeap) Less(i, j int) bool { return h[i].seen.Before(h[j].seen) }

func (h deadlineHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

// Push implements heap.Interface.
func (h *deadlineHeap) Push(x any) {
	d := x.(*deadline)
	d.index = len(*h)
	*h = append(*h, d)
}

// Pop implements heap.Interface.
func (h *deadlineHeap) Pop() any {
	old := *h
	d := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	d.index = -1
	return d
}
