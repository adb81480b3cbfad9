package newdriver

import (
	"sync"
	"time"
)

// Service stands for the lock service: a map of entries that expire, and a counter that never goes back. Yours is
// behind a network; each method here is one step that it takes as a whole, such as a script, a transaction or a
// conditional write.
type Service struct {
	mu      sync.Mutex // protects the following fields
	entries map[string]Entry
	counter uint64
}

// Entry is what the service keeps for a name.
type Entry struct {
	RequestID, HoldID, Owner string
	Token                    uint64
	Ends                     time.Time // by the service's own clock
}

// take makes an entry unless there is one, and returns the one that is there then. An entry of the same request counts
// as made: its end moves, and its token stays.
func (s *Service) take(name string, e Entry, ttl time.Duration) (there Entry, taken bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	old, held := s.entries[name]
	held = held && old.Ends.After(now)
	if held && old.RequestID != e.RequestID {
		return old, false
	}
	if held {
		e.Token, e.Ends = old.Token, later(old.Ends, now.Add(ttl))
	} else {
		s.counter++
		e.Token, e.Ends = s.counter, now.Add(ttl)
	}
	if s.entries == nil {
		s.entries = map[string]Entry{}
	}
	s.entries[name] = e
	return e, true
}

// prolong moves the end of an entry, never towards now. It is false if the entry is gone.
func (s *Service) prolong(name, requestID string, token uint64, ttl time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	e, held := s.entries[name]
	if !held || !e.Ends.After(now) || e.RequestID != requestID || e.Token != token {
		return false
	}
	e.Ends = later(e.Ends, now.Add(ttl))
	s.entries[name] = e
	return true
}

// remove deletes what a request has, with any token if that is 0. It is false if that is nothing.
func (s *Service) remove(name, requestID string, token uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, held := s.entries[name]
	if !held || e.RequestID != requestID || token != 0 && e.Token != token {
		return false
	}
	delete(s.entries, name)
	return e.Ends.After(time.Now())
}

// read returns the entry of a name.
func (s *Service) read(name string) (e Entry, held bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, held = s.entries[name]
	return e, held && e.Ends.After(time.Now())
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
