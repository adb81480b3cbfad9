package fencelock

// The heap of a client's holds, by the instant at which something is due. Each hold knows its index, so that a release
// takes it out without a search; sweep takes out many at once. All methods need heart.mu, which also protects
// hold.index.

import "time"

// slot is one hold in the heap, with its key beside it: a pass over a hundred thousand reads no hold that is not due.
//
//	at        early    the hold is
//	+9.1 s    5 s      renewed, due in 9.1 s or up to 5 s sooner with others
//	+29.6 s   0        being renewed, or not to be renewed: looked at when its deadline is reached
//	now       0        to be extended at once
type slot struct {
	// at is when heart looks at the hold next: a renewal is due, or the deadline is reached.
	at instant
	// early is the time before at from which a renewal may ride along with others. 0 for a deadline, an Extend and a
	// repetition.
	early time.Duration
	hold  *hold
}

// holdHeap orders holds by slot.at, and each hold knows its index. It is written out because container/heap calls
// through an interface, and because of sweep.
type holdHeap []slot

// push adds a hold that is not in the heap.
func (q *holdHeap) push(s slot) {
	s.hold.index = len(*q)
	*q = append(*q, s)
	q.up(s.hold.index)
}

// remove takes out the slot at i, and clears its place, so that the heap keeps no hold alive that has ended.
func (q *holdHeap) remove(i int) {
	old := *q
	last := len(old) - 1
	s := old[last]
	old[i].hold.index = -1
	old[last] = slot{}
	*q = old[:last]
	if i != last {
		q.put(i, s)
		q.fix(i)
	}
}

// fix restores the order after the slot at i has changed, in either direction.
func (q holdHeap) fix(i int) {
	if !q.down(i) {
		q.up(i)
	}
}

// sweep removes every hold for which gone returns true, in one pass in no order, and restores the order; gone may
// change the slot. It costs one look at each slot, where taking n holds from the top costs n times the depth: a
// client with holds that all expire together would pay that within the safety margin.
func (q *holdHeap) sweep(gone func(*slot) bool) {
	all, kept := *q, 0
	for i := range all {
		if s := &all[i]; gone(s) {
			s.hold.index = -1
		} else {
			if kept != i {
				all.put(kept, *s)
			}
			kept++
		}
	}
	clear(all[kept:])
	*q = all[:kept]
	for i := kept/2 - 1; i >= 0; i-- {
		q.down(i)
	}
}

// holds returns all of them, in no order.
func (q holdHeap) holds() []*hold {
	all := make([]*hold, len(q))
	for i, s := range q {
		all[i] = s.hold
	}
	return all
}

// put stores s at i and records i in the hold.
func (q holdHeap) put(i int, s slot) {
	q[i] = s
	s.hold.index = i
}

// up moves the slot at i towards the top until its parent is due no later.
func (q holdHeap) up(i int) {
	s := q[i]
	for at := i; ; {
		parent := (at - 1) / 2
		if at == 0 || q[parent].at <= s.at {
			if at != i {
				q.put(at, s)
			}
			return
		}
		q.put(at, q[parent])
		at = parent
	}
}

// down moves the slot at i away from the top until its children are due no earlier, and reports whether it moved.
func (q holdHeap) down(i int) (moved bool) {
	s := q[i]
	for at := i; ; {
		least := 2*at + 1
		if right := least + 1; right < len(q) && q[right].at < q[least].at {
			least = right
		}
		if least >= len(q) || s.at <= q[least].at {
			if at != i {
				q.put(at, s)
			}
			return at != i
		}
		q.put(at, q[least])
		at = least
	}
}
