package newdriver

import (
	"encoding/json"
	"net/http"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// Service stands for the lock service: a map of entries that expire, and a counter that never goes back, behind HTTP.
// It carries out the steps of a request as a whole. The zero value is an empty service.
type Service struct {
	mu      sync.Mutex // protects the following fields
	space   string     // names this service, as a cluster id does; drawn with the first request
	counter uint64
	entries map[string]Entry
}

// Entry is the service's entry for a name.
type Entry struct {
	RequestID, HoldID, Owner string
	Token                    uint64
	Nonce                    fencing.Nonce
	Ends                     time.Time // by the service's own clock
}

// request is a list of steps for the service with the client's space, if known; a service with another space ignores
// it.
type request struct {
	Space string
	Steps []step
}

// step is one step of a request, and answer the service's answer.
type step struct {
	Do, Name string // take, prolong, remove or read
	Entry    Entry
	TTL      time.Duration
}

type answer struct {
	Done  bool
	Entry Entry // that there is then, or was before it was removed
	Left  time.Duration
}

type answers struct {
	Space string
	All   []answer
}

func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var in request
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.entries == nil {
		s.space, s.entries = "newdriver-"+backend.NewRequestID(), map[string]Entry{}
	}
	out := answers{Space: s.space}
	for _, do := range in.Steps {
		if in.Space != "" && in.Space != s.space {
			break
		}
		out.All = append(out.All, s.carryOut(do, time.Now()))
	}
	_ = json.NewEncoder(w).Encode(out)
}

// carryOut is one step. The caller holds s.mu.
func (s *Service) carryOut(do step, now time.Time) answer {
	old, held := s.entries[do.Name]
	held = held && old.Ends.After(now)
	mine := held && old.RequestID == do.Entry.RequestID && (do.Entry.Token == 0 || do.Entry.Token == old.Token)
	switch {
	case do.Do == "take" && !held:
		s.counter++
		do.Entry.Token, do.Entry.Ends = s.counter, now.Add(do.TTL)
		s.entries[do.Name] = do.Entry
		return answer{true, do.Entry, do.TTL}
	case mine && (do.Do == "take" || do.Do == "prolong"): // its end moves, never towards now; token and nonce stay
		if ends := now.Add(do.TTL); ends.After(old.Ends) {
			old.Ends = ends
			s.entries[do.Name] = old
		}
	case mine && do.Do == "remove":
		delete(s.entries, do.Name)
	}
	return answer{mine || held && do.Do == "read", old, old.Ends.Sub(now)}
}
