package machine

import (
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/fencing"
)

// EventType says what happened.
type EventType uint8

const (
	EventAcquired  EventType = 1 // a hold began; Token is Revision, with the mark of its kind
	EventReleased  EventType = 2 // a hold ended by its holder, by OpRelease or with its session by OpCloseSession
	EventExpired   EventType = 3 // a hold ended with its session, by OpExpire
	EventForced    EventType = 4 // a hold ended by OpForceRelease; Reason, By
	EventQueued    EventType = 5 // a wait began; one event for all of its names, Name is the first one
	EventCancelled EventType = 6 // a wait ended without a grant, for whatever reason; Name as with EventQueued
	EventFreed     EventType = 7 // a hold that lingered ended; its lingering was told as its release or expiry
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
	Reason   string
	By       string
}

// ErrAhead: this replica has not reached the revision that was asked for.
var ErrAhead = errors.New("machine: revision is ahead of this replica")

// CompactedError says that events after the asked revision are no longer kept.
type CompactedError struct {
	Since    uint64 // asked
	Revision uint64 // the lowest that may be asked for
}

func (e *CompactedError) Error() string {
	return fmt.Sprintf("machine: events since revision %d are no longer kept, only since %d", e.Since, e.Revision)
}

// EventsSince returns up to limit events after revision since, of all names, in order and without gaps; none if there
// is nothing new. Events are kept by each replica for itself, none from before a Restore. The error is ErrAhead or a
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
	most   int    // how many are kept
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
	m.past.record(e)
	return m.revision
}

// eventOf describes what happened to a hold.
func eventOf(t EventType, h *hold) Event {
	return Event{
		Type: t, Name: h.Name, Session: h.session, Owner: h.Owner, HoldID: h.HoldID, Kind: h.Kind, Token: h.token,
	}
}

// waitEvent describes what happened to a wait.
func waitEvent(t EventType, w *wait) Event {
	r := &w.requests[0]
	return Event{Type: t, Name: r.Name, Session: w.session, Owner: r.Owner, HoldID: r.HoldID, Kind: r.Kind}
}
