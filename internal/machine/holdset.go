package machine

import "github.com/google/btree"

// holdSet is a set of holds in the order of their tokens. Most sets have one hold; some have hundreds of thousands,
// each added and removed in logarithmic time.
type holdSet struct {
	one  *hold                // if it is alone
	many *btree.BTreeG[*hold] // otherwise, until the set is empty
}

const setDegree = 32

// spareNodes are shared by all sets: otherwise each would have separate ones.
var spareNodes = btree.NewFreeListG[*hold](btree.DefaultFreeListSize)

func byToken(a, b *hold) bool { return a.token.Order() < b.token.Order() }

func (s *holdSet) len() int {
	switch {
	case s.many != nil:
		return s.many.Len()
	case s.one != nil:
		return 1
	}
	return 0
}

// put adds h, or replaces the hold with the same token.
func (s *holdSet) put(h *hold) {
	switch {
	case s.many != nil:
		s.many.ReplaceOrInsert(h)
	case s.one == nil || s.one.token.Order() == h.token.Order():
		s.one = h
	default:
		s.many = btree.NewWithFreeListG(setDegree, byToken, spareNodes)
		s.many.ReplaceOrInsert(s.one)
		s.many.ReplaceOrInsert(h)
		s.one = nil
	}
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
	found := s.one != nil && s.one.token.Order() == h.token.Order()
	if found {
		s.one = nil
	}
	return found
}

// first returns the first hold, or nil.
func (s *holdSet) first() *hold {
	for h := range s.all {
		return h
	}
	return nil
}

// all yields the holds in the order of their tokens. The set must not change meanwhile.
func (s *holdSet) all(yield func(*hold) bool) {
	switch {
	case s.many != nil:
		s.many.Ascend(yield)
	case s.one != nil:
		yield(s.one)
	}
}
