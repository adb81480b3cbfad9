package machine

import (
	"cmp"
	"slices"

	"github.com/google/btree"
)

// holdSet is a set of holds in the order of their tokens. Most have one; some have hundreds of thousands, of which each
// comes and goes in logarithmic time.
type holdSet struct {
	few  []*hold              // while there are no more than fewHolds of them
	many *btree.BTreeG[*hold] // nil until there have been more
}

const fewHolds = 64

func byToken(a, b *hold) bool { return a.token.Order() < b.token.Order() }

func (s *holdSet) len() int {
	if s.many != nil {
		return s.many.Len()
	}
	return len(s.few)
}

// put adds h, or puts it in the place of the hold with the same token.
func (s *holdSet) put(h *hold) {
	if s.many == nil && len(s.few) >= fewHolds {
		s.many = btree.NewG(32, byToken)
		for _, x := range s.few {
			s.many.ReplaceOrInsert(x)
		}
		s.few = nil
	}
	if s.many != nil {
		s.many.ReplaceOrInsert(h)
		return
	}
	i, found := s.find(h)
	if found {
		s.few[i] = h
		return
	}
	s.few = slices.Insert(s.few, i, h)
}

func (s *holdSet) find(h *hold) (int, bool) {
	return slices.BinarySearchFunc(s.few, h, func(a, b *hold) int { return cmp.Compare(a.token.Order(), b.token.Order()) })
}

// remove reports whether there was a hold with that token.
func (s *holdSet) remove(h *hold) bool {
	if s.many != nil {
		_, found := s.many.Delete(h)
		if s.many.Len() == 0 {
			s.many = nil
		}
		return found
	}
	i, found := s.find(h)
	if found {
		s.few = slices.Delete(s.few, i, i+1)
	}
	return found
}

// first is nil if there is none.
func (s *holdSet) first() *hold {
	for h := range s.all {
		return h
	}
	return nil
}

// all yields the holds in the order of their tokens. The set must not change meanwhile.
func (s *holdSet) all(yield func(*hold) bool) {
	if s.many != nil {
		s.many.Ascend(yield)
		return
	}
	for _, h := range s.few {
		if !yield(h) {
			return
		}
	}
}
