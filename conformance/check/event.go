package check

import (
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// Op is what a call asks for.
type Op string

// The calls.
const (
	OpAcquire Op = "acquire" // waits
	OpTry     Op = "try"     // one attempt
	OpRelease Op = "release"
	OpAsk     Op = "ask"   // who holds the name?
	OpForce   Op = "force" // the name is taken away from its holders by force: force-released, deleted, flushed
)

// Type says what an event tells.
type Type string

// The types of events.
const (
	// TypeCall: a call begins. It may be the last that is heard of it.
	TypeCall Type = "call"
	// TypeReturn: the call with the same Client and ID has returned.
	TypeReturn Type = "return"
	// TypeRenewed: the service has confirmed the hold again.
	TypeRenewed Type = "renewed"
	// TypeEnd: the holder believes no longer, for another reason than its release.
	TypeEnd Type = "end"
	// TypeKilled: a client was killed. What it had called stays unknown, what it held unreleased.
	TypeKilled Type = "killed"
	// TypeFault and TypeHealed: a fault began, all faults are over. They belong to no client.
	TypeFault  Type = "fault"
	TypeHealed Type = "healed"
)

// Outcome is how a call ended.
type Outcome string

// The outcomes.
const (
	// OK: it was done.
	OK Outcome = "ok"
	// Refused: it was not done, and is not going to be.
	Refused Outcome = "refused"
	// Unknown: it may have been done, or may be done later.
	Unknown Outcome = "unknown"
	// Gone: a release found that the hold was over. So does one that is repeated after its answer was lost.
	Gone Outcome = "gone"
)

// Event is one line of a history. Which fields are set depends on Type.
type Event struct {
	Type Type            `json:"type"`
	At   backend.Instant `json:"at"` // when it happened, in nanoseconds of the clock that the whole history shares

	// Client is who calls, unique among all processes. ID is the number of the call, unique among those of the client. For
	// TypeRenewed and TypeEnd, ID is that of the acquire that was granted.
	Client string `json:"client,omitempty"`
	ID     uint64 `json:"id,omitempty"`

	// Of a call.
	Op    Op              `json:"op,omitempty"`
	Name  string          `json:"name,omitempty"`
	Hold  uint64          `json:"hold,omitempty"`  // a release's: the ID of the acquire
	Until backend.Instant `json:"until,omitempty"` // when its context ends, zero if never

	// Of a return.
	Outcome Outcome `json:"outcome,omitempty"`
	Err     string  `json:"err,omitempty"`

	// Of an acquire's return with OK. Kind is a backend.Kind in words.
	Kind    string        `json:"kind,omitempty"`
	Permits int           `json:"permits,omitempty"`
	Limit   int           `json:"limit,omitempty"`
	Token   fencing.Token `json:"token,omitzero"`
	Request string        `json:"request,omitempty"` // identity of the hold: two acquires with one are the same hold

	// Of an acquire's return with OK, TypeRenewed and TypeEnd: what the service has promised last, and until when its holder
	// believes in that. Zero: nothing was promised, or it is believed without end.
	SentAt   backend.Instant `json:"sent_at,omitempty"`
	TTL      time.Duration   `json:"ttl,omitempty"`
	Deadline backend.Instant `json:"deadline,omitempty"`

	// Why the belief ended (a backend.Reason), or which fault began.
	Why string `json:"why,omitempty"`

	// Seen are the tokens that an OpAsk was shown.
	Seen []fencing.Token `json:"seen,omitempty"`
}

// String returns one line for people.
func (e Event) String() string {
	who := fmt.Sprintf("%-12s %-8s", e.Client, e.Type)
	switch e.Type {
	case TypeFault, TypeHealed:
		return fmt.Sprintf("%d %s %s", e.At, who, e.Why)
	case TypeKilled:
		return fmt.Sprintf("%d %s", e.At, who)
	case TypeCall:
		return fmt.Sprintf("%d %s #%d %s %q", e.At, who, e.ID, e.Op, e.Name)
	case TypeReturn:
		s := fmt.Sprintf("%d %s #%d %s %q %s", e.At, who, e.ID, e.Op, e.Name, e.Outcome)
		if e.Outcome == OK && (e.Op == OpAcquire || e.Op == OpTry) {
			s += fmt.Sprintf(" token %v until %d", e.Token, e.Deadline)
		}
		if e.Err != "" {
			s += ": " + e.Err
		}
		return s
	}
	return fmt.Sprintf("%d %s #%d until %d %s", e.At, who, e.ID, e.Deadline, e.Why)
}
