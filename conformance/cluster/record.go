package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// hold is one lease as its holder saw it. Times are of this process's clock, which all clients share.
type hold struct {
	client int
	name   string
	token  fencing.Token
	lease  lease

	// The following fields are protected by record.mu.
	begin    time.Time // Acquire had returned
	end      time.Time // until which the holder believed; zero while it does
	deadline time.Time // at the end
	told     time.Time // the lease's context had ended; zero if it was released before
	lost     bool
}

// lease is what the record needs of a fencelock.Lease.
type lease interface {
	Err() error
	Deadline() time.Time
}

// record is the history of all holds, and the register that they write.
type record struct {
	guard fencing.Guard // of the register

	mu        sync.Mutex // protects the following fields
	all       []*hold
	open      map[string][]*hold         // by name: those that have not ended
	stale     map[string][]fencing.Token // by name: of holds that were lost, and write late
	refused   int                        // late writes
	confirmed int                        // holds that the service knew of when it was asked
	turns     map[turn]int               // grants so far
	failures  map[string]int             // errors that faults may cause
	found     []string                   // violations
	changed   chan struct{}              // closed at the next grant
}

// turn is a client that got a name.
type turn struct {
	client int
	name   string
}

func newRecord() *record {
	return &record{
		guard: fencing.NewMemory(""), open: map[string][]*hold{}, stale: map[string][]fencing.Token{},
		turns: map[turn]int{}, failures: map[string]int{}, changed: make(chan struct{}),
	}
}

// granted notes that Acquire has returned, and checks at once whether somebody else believes in the same lock.
func (r *record) granted(client int, name string, token fencing.Token, l lease) *hold {
	r.mu.Lock()
	defer r.mu.Unlock()
	h := &hold{client: client, name: name, token: token, lease: l, begin: time.Now()}
	for _, other := range r.open[name] {
		// Err is exact also where timers are late.
		if err, own := other.lease.Err(), l.Err(); err == nil && own == nil {
			r.found = append(r.found, fmt.Sprintf("%v was granted while %v is believed in", h, other))
		}
	}
	r.all = append(r.all, h)
	r.open[name] = append(r.open[name], h)
	r.turns[turn{client, name}]++
	close(r.changed)
	r.changed = make(chan struct{})
	return h
}

// write lets the holder write the register, and after it those that lost the lock before, and do not know or care.
func (r *record) write(h *hold) {
	err := r.guard.Check(context.Background(), h.name, h.token)
	own := h.lease.Err() // read after the write: whoever still holds now held then
	r.mu.Lock()
	late := r.stale[h.name]
	r.stale[h.name] = nil
	if err != nil && own == nil {
		r.found = append(r.found, fmt.Sprintf("%v holds and its write was refused: %v", h, err))
	}
	r.mu.Unlock()
	if err != nil {
		return
	}
	for _, token := range late {
		err := r.guard.Check(context.Background(), h.name, token)
		r.mu.Lock()
		if errors.Is(err, fencing.ErrStale) {
			r.refused++
		} else if token < h.token {
			r.found = append(r.found, fmt.Sprintf("a late write with token %v after %v: %v", token, h, err))
		}
		r.mu.Unlock()
	}
}

// ended notes that the holder stops to believe now: it is about to release, or was told of the loss.
func (r *record) ended(h *hold, told bool) {
	deadline := h.lease.Deadline()
	r.mu.Lock()
	defer r.mu.Unlock()
	if !h.end.IsZero() {
		return
	}
	now := time.Now()
	h.deadline, h.end, h.lost = deadline, now, told
	if deadline.Before(now) {
		h.end = deadline // whoever asks Err or the deadline knew since then, whatever timers do
	}
	if told {
		h.told = now
		if now.Before(deadline) {
			// The service keeps a hold for at least as long as its holder may believe in it. Nobody takes one away here.
			r.found = append(r.found, fmt.Sprintf("%v was acknowledged until %s and is gone: %v", h, deadline.Format(clock), h.lease.Err()))
		}
		r.stale[h.name] = append(r.stale[h.name], h.token)
	}
	r.open[h.name] = slices.DeleteFunc(r.open[h.name], func(other *hold) bool { return other == h })
}

// lostAtRelease notes that the release found the hold gone. That alone is no violation: a release whose answer was lost is
// sent again, and finds nothing.
func (r *record) lostAtRelease(h *hold) {
	r.mu.Lock()
	defer r.mu.Unlock()
	h.lost = true
	r.stale[h.name] = append(r.stale[h.name], h.token)
}

// asked notes what the service says about a name that h holds. What h believed before and after the question, it must say.
func (r *record) asked(h *hold, info backend.Info) {
	own := h.lease.Err() // read after the answer: whoever still holds now held then
	r.mu.Lock()
	defer r.mu.Unlock()
	if own != nil || !h.end.IsZero() {
		return
	}
	r.confirmed++
	if !slices.ContainsFunc(info.Holders, func(other backend.Holder) bool { return other.Token == h.token }) {
		r.found = append(r.found, fmt.Sprintf("%v was acknowledged and the service knows of %v", h, info.Holders))
	}
}

// failed counts an error that the fault explains, and reports any other.
func (r *record) failed(call string, err error, explained bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !explained {
		r.found = append(r.found, fmt.Sprintf("%s: unexpected error: %v", call, err))
	}
	r.failures[call]++
}

// alarm returns what was found so far.
func (r *record) alarm() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.found) == 0 {
		return nil
	}
	return errors.New(strings.Join(r.found, "\n"))
}

// count returns a copy of the grants so far, and a channel that is closed at the next.
func (r *record) count() (map[turn]int, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	turns := make(map[turn]int, len(r.turns))
	for k, n := range r.turns {
		turns[k] = n
	}
	return turns, r.changed
}

// report is what a run has shown.
type report struct {
	grants, lost, refused int
	confirmed             int
	failures              map[string]int
	worst                 time.Duration // the shortest time from a holder's last belief after a loss to the rival's first
	late                  time.Duration // the longest time from a deadline to the end of the context
	overlap               time.Duration // the longest
	violations            []string
}

func (p report) String() string {
	worst := "no loss was followed by a rival"
	if p.worst != forever {
		worst = fmt.Sprintf("shortest time from a loss to the rival %.1f ms", p.worst.Seconds()*1000)
	}
	return fmt.Sprintf("%d grants, %d lost, %d confirmed by the service, %s, %d late writes refused, contexts up to %.1f ms after the deadline, %v failed, "+
		"overlap %.1f ms, %d violations", p.grants, p.lost, p.confirmed, worst, p.refused, p.late.Seconds()*1000, p.failures,
		p.overlap.Seconds()*1000, len(p.violations))
}

const forever = time.Duration(1<<63 - 1)

// verify checks the whole history. All holds have ended.
func (r *record) verify() report {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := report{
		grants: len(r.all), refused: r.refused, confirmed: r.confirmed, failures: r.failures, worst: forever, violations: slices.Clone(r.found),
	}
	byName := map[string][]*hold{}
	for _, h := range r.all {
		byName[h.name] = append(byName[h.name], h)
		if h.lost {
			p.lost++
		}
		if !h.told.IsZero() {
			p.late = max(p.late, h.told.Sub(h.deadline))
		}
	}
	for _, holds := range byName {
		slices.SortFunc(holds, func(a, b *hold) int {
			switch {
			case a.token < b.token:
				return -1
			case a.token > b.token:
				return 1
			}
			return a.begin.Compare(b.begin)
		})
		p.check(holds)
	}
	return p
}

// check goes through the holds of one name in the order of their tokens.
func (p *report) check(holds []*hold) {
	var last *hold // whose belief ended last
	for i, h := range holds {
		switch {
		case !h.token.Valid() || !h.token.Exclusive():
			p.violations = append(p.violations, fmt.Sprintf("%v has a token that fences nothing", h))
		case i > 0 && h.token == holds[i-1].token:
			p.violations = append(p.violations, fmt.Sprintf("%v and %v have one token", holds[i-1], h))
		}
		if !h.begin.Before(h.end) {
			continue // it was over before its caller looked: nobody believed in it
		}
		if last != nil {
			after := h.begin.Sub(last.end)
			if after < 0 {
				p.overlap = max(p.overlap, -after)
				p.violations = append(p.violations, fmt.Sprintf("%v began %v before the end of %v", h, -after, last))
			}
			if last.lost {
				p.worst = min(p.worst, after)
			}
		}
		if last == nil || last.end.Before(h.end) {
			last = h
		}
	}
}

const clock = "15:04:05.000000"

func (h *hold) String() string {
	end := "now"
	if !h.end.IsZero() {
		end = h.end.Format(clock)
	}
	if h.lost {
		end += " (lost)"
	}
	return fmt.Sprintf("hold of %s by client %d with token %v from %s to %s", h.name, h.client, h.token, h.begin.Format(clock), end)
}

// recent returns the last holds, for whoever has to explain a failure.
func (r *record) recent() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var lines []string
	for _, h := range r.all[max(0, len(r.all)-60):] {
		lines = append(lines, "    "+h.String())
	}
	return strings.Join(lines, "\n")
}
