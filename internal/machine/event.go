package machine

import (
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/principal"
)

// EventType is the type of an Event.
type EventType uint8

const (
	EventAcquired  EventType = 1 // a hold began; Token is Revision, with the mark of its kind
	EventReleased  EventType = 2 // a hold ended by its holder, by OpRelease or with its session by OpCloseSession
	EventExpired   EventType = 3 // a hold ended with its session, by OpExpire; or by OpFree, with ReasonMaxHold as Reason
	EventForced    EventType = 4 // a hold ended by OpForceRelease; Reason, By, Principal
	EventQueued    EventType = 5 // a wait began; one event for all of its names, Name is the first one
	EventCancelled EventType = 6 // a wait ended without a grant, for any reason; Name as with EventQueued
	EventFreed     EventType = 7 // a lingering hold ended; its lingering was reported as its release or expiry
)

// Event is one step of the revision.
type Event struct {
	Type     EventType
	Revision uint64
	At       int64 // Unix nanoseconds by the leader's clock; for people
	Name     string
	Session  SessionID
	Owner    string
	HoldID   string
	Kind     Kind
	Token    fencing.Token // of the hold; zero for a wait
	// Ticket is the ticket of a wait that began or was cancelled, and of the wait that a grant ended; zero for other
	// grants.
	Ticket uint64
	Reason string
	By     string
	// Principal is Command.Principal.
	Principal string
	// Holder is the principal that asked for the hold or the wait: Request.For, or else the principal of Session, which
	// only News fills in.
	Holder principal.Principal
}

// ErrAhead means that this replica has not reached the requested revision.
var ErrAhead = errors.New("machine: revision is ahead of this replica")

// CompactedError means that events after the requested revision are no longer kept.
type CompactedError struct {
	Since    uint64 // asked
	Revision uint64 // the lowest valid revision
}

func (e *CompactedError) Error() string {
	return fmt.Sprintf("machine: events since revision %d are no longer kept, only since %d", e.Since, e.Revision)
}

// EventsSince returns up to limit events after revision since, of all names, in order and without gaps; an empty slice
// without a later event. Each replica keeps its own events, and drops them at a Restore. The error is ErrAhead or a
// *CompactedError.
func (m *Machine) EventsSince(since uint64, limit int) ([]Event, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	oldest := m.revision - uint64(len(m.past.events))
	switch {
	case since > m.revision:
		return nil, ErrAhead
	case since < oldest:
		return nil, &CompactedError{Since: since, Revision: oldest}
	}
	n := min(m.revision-since, uint64(max(limit, 0)))
	found := make([]Event, 0, n)
	for r := since + 1; r <= since+n; r++ {
		found = append(found, m.past.events[m.past.index(r)])
	}
	return found, nil
}

// history is a ring of the last events. Their revisions follow each other without gaps.
type history struct {
	base   uint64 // revision before the first event that was ever recorded
	most   int    // the maximum kept
	events []Event
}

func (h *history) index(revision uint64) int { return int((revision - h.base - 1) % uint64(h.most)) }

func (h *history) record(e Event) {
	if i := h.index(e.Revision); i < len(h.events) {
		h.events[i] = e
		return
	}
	h.events = append(h.events, e)
}

// record makes e the next event, and returns its revision.
func (m *Machine) record(e Event) uint64 {
	m.revision++
	e.Revision, e.At = m.revision, m.now
	if e.Type == EventQueued {
		e.Ticket = m.revision
	}
	m.past.record(e)
	if m.follows {
		if s := m.sessions[e.Session]; s != nil && e.Holder == "" {
			e.Holder = s.principal
		}
		m.news = append(m.news, e)
	}
	return m.revision
}

// Claimed is a hold or a wait that existed when Follow began.
type Claimed struct {
	Name, Owner string
	Kind        Kind
	// Token is a hold's, and Ticket a wait's.
	Token  fencing.Token
	Ticket uint64
	Since  int64 // Unix nanoseconds by the leader's clock; for people
}

// Follow returns the present holds and waits, in the order in which they began. From then on News returns each event.
func (m *Machine) Follow() []Claimed {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.follows, m.news = true, nil
	all := make([]Claimed, 0, len(m.holds)+len(m.waits))
	for _, h := range sorted(m.holds) {
		all = append(all, Claimed{Name: h.Name, Owner: h.Owner, Kind: h.Kind, Token: h.token, Since: h.since})
	}
	for _, w := range sorted(m.waits) {
		r := &w.requests[0]
		all = append(all, Claimed{Name: r.Name, Owner: r.Owner, Kind: r.Kind, Ticket: w.ticket, Since: w.since})
	}
	return all
}

// Unfollow ends Follow.
func (m *Machine) Unfollow() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.follows, m.news = false, nil
}

// News returns the events since the last call, while the machine is followed. The goroutine that calls Apply calls it.
func (m *Machine) News() []Event {
	m.mu.Lock()
	defer m.mu.Unlock()
	news := m.news
	m.news = nil
	return news
}

// eventOf returns the event of a hold.
func eventOf(t EventType, h *hold) Event {
	return Event{
		Type: t, Name: h.Name, Session: h.session, Owner: h.Owner, HoldID: h.HoldID, Kind: h.Kind, Token: h.token,
		Holder: h.For,
	}
}

// waitEvent returns the event of a wait.
func waitEvent(t EventType, w *wait) Event {
	r := &w.requests[0]
	return Event{
		Type: t, Name: r.Name, Session: w.session, Owner: r.Owner, HoldID: r.HoldID, Kind: r.Kind, Ticket: w.ticket,
		Holder: r.For,
	}
}
