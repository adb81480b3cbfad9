package fencelock

// holdHeap orders holds by hold.at, and each knows its index. It is written out because container/heap calls through an
// interface, and because of sweep.
type holdHeap []*hold

func (q *holdHeap) push(h *hold) {
	h.index = len(*q)
	*q = append(*q, h)
	q.up(h.index)
}

func (q *holdHeap) remove(i int) {
	old := *q
	last := len(old) - 1
	old[i].index = -1
	if i != last {
		old[i] = old[last]
		old[i].index = i
	}
	old[last] = nil
	*q = old[:last]
	if i != last {
		q.fix(i)
	}
}

// fix restores the order after the hold at i has changed.
func (q *holdHeap) fix(i int) {
	if !q.down(i) {
		q.up(i)
	}
}

// sweep removes every hold for which gone says so, in one pass in no order, and restores the order; gone may change
// others.
func (q *holdHeap) sweep(gone func(*hold) bool) {
	kept := (*q)[:0]
	for _, h := range *q {
		if gone(h) {
			h.index = -1
			continue
		}
		h.index = len(kept)
		kept = append(kept, h)
	}
	clear((*q)[len(kept):])
	*q = kept
	for i := len(kept)/2 - 1; i >= 0; i-- {
		q.down(i)
	}
}

func (q *holdHeap) up(i int) {
	s := *q
	for i > 0 {
		parent := (i - 1) / 2
		if s[parent].at <= s[i].at {
			return
		}
		s.swap(i, parent)
		i = parent
	}
}

func (q *holdHeap) down(i int) (moved bool) {
	s := *q
	for {
		least := 2*i + 1
		if least >= len(s) {
			return moved
		}
		if right := least + 1; right < len(s) && s[right].at < s[least].at {
			least = right
		}
		if s[i].at <= s[least].at {
			return moved
		}
		s.swap(i, least)
		i, moved = least, true
	}
}

func (q holdHeap) swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}
