package check

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// Op is the kind of a call.
type Op string

// The calls.
const (
	OpAcquire Op = "acquire" // waits
	OpTry     Op = "try"     // one attempt
	OpRelease Op = "release"
	OpAsk     Op = "ask"   // inspects the holders of the name
	OpForce   Op = "force" // ends the holds of the name by force: force-released, deleted, flushed
)

// Type is the type of an event.
type Type string

// The types of events.
const (
	// TypeCall: a call begins. This may be the last event of the call.
	TypeCall Type = "call"
	// TypeReturn: the call with the same Client and ID has returned.
	TypeReturn Type = "return"
	// TypeRenewed: the service has confirmed a renewal of the hold.
	TypeRenewed Type = "renewed"
	// TypeEnd: the hold is no longer valid, for a reason other than its release.
	TypeEnd Type = "end"
	// TypeKilled: a client was killed. The outcome of its open calls stays unknown, and its holds stay unreleased.
	TypeKilled Type = "killed"
	// TypeFault and TypeHealed: a fault began, all faults are over. They belong to no client.
	TypeFault  Type = "fault"
	TypeHealed Type = "healed"
)

// Outcome is the outcome of a call.
type Outcome string

// The outcomes.
const (
	// OK: the service executed the call.
	OK Outcome = "ok"
	// Refused: the service did not execute the call, and never will.
	Refused Outcome = "refused"
	// Unknown: the service may have executed the call, or may execute it later.
	Unknown Outcome = "unknown"
	// Gone: the hold had ended before the release, or the release repeats one with a lost answer.
	Gone Outcome = "gone"
)

// Event is one line of a history. Type determines the other fields.
type Event struct {
	Type Type            `json:"type"`
	At   backend.Instant `json:"at"` // in nanoseconds of the clock of the whole history

	// Client is the caller, unique among all processes. ID is the number of the call, unique for the client. For
	// TypeRenewed and TypeEnd, ID is that of the granted acquire.
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

	// Of an acquire's return with OK. Kind is a backend.Kind in words, empty for an exclusive hold. In JSON a token is
	// a string, as fencing.Token writes it, or a number.
	Kind    string        `json:"kind,omitempty"`
	Permits int           `json:"permits,omitempty"`
	Limit   int           `json:"limit,omitempty"`
	Token   fencing.Token `json:"token,omitzero"`
	Request string        `json:"request,omitempty"` // identity of the hold: acquires with equal ones have one hold

	// Of an acquire's return with OK, TypeRenewed and TypeEnd: the last confirmation of the service, and the deadline of
	// the holder. Zero: no confirmation, or no deadline.
	SentAt   backend.Instant `json:"sent_at,omitempty"`
	TTL      time.Duration   `json:"ttl,omitempty"`
	Deadline backend.Instant `json:"deadline,omitempty"`

	// Why is the reason of the end (a backend.Reason), or the fault that began.
	Why string `json:"why,omitempty"`

	// Seen are the tokens in the answer to an OpAsk.
	Seen []fencing.Token `json:"seen,omitempty"`
}

// UnmarshalJSON refuses unknown fields: no check would use a misspelt field.
func (e *Event) UnmarshalJSON(line []byte) error {
	type plain Event
	read := struct {
		*plain
		Token number   `json:"token"`
		Seen  []number `json:"seen"`
	}{plain: (*plain)(e)}
	in := json.NewDecoder(bytes.NewReader(line))
	in.DisallowUnknownFields()
	if err := in.Decode(&read); err != nil {
		return err
	}
	e.Token, e.Seen = fencing.Token(read.Token), nil
	for _, t := range read.Seen {
		e.Seen = append(e.Seen, fencing.Token(t))
	}
	return nil
}

// number is a token in JSON, a string or a number.
type number fencing.Token

// UnmarshalJSON accepts both.
func (n *number) UnmarshalJSON(b []byte) error {
	t, err := fencing.ParseToken(strings.Trim(string(b), `"`))
	*n = number(t)
	return err
}

// unknown names the unknown part of an event, or returns "".
func (e Event) unknown() string {
	switch e.Type {
	case TypeCall:
		if !slices.Contains([]Op{OpAcquire, OpTry, OpRelease, OpAsk, OpForce}, e.Op) {
			return fmt.Sprintf("nobody knows the call %q", e.Op)
		}
	case TypeReturn:
		if !slices.Contains([]Outcome{OK, Refused, Unknown, Gone}, e.Outcome) {
			return fmt.Sprintf("nobody knows the outcome %q", e.Outcome)
		}
		if _, known := kinds[e.Kind]; !known {
			return fmt.Sprintf("nobody knows the kind %q", e.Kind)
		}
	}
	return ""
}

// kinds maps words to kinds of holds.
var kinds = map[string]backend.Kind{
	"":                             backend.KindExclusive,
	backend.KindExclusive.String(): backend.KindExclusive,
	backend.KindShared.String():    backend.KindShared,
	backend.KindPermits.String():   backend.KindPermits,
}

// String returns one line for people, with the instant of the history.
func (e Event) String() string { return e.since(0) }

// since is String with instants counted from start.
func (e Event) since(start backend.Instant) string {
	at := e.At.Sub(start)
	who := fmt.Sprintf("%-12s %-8s", e.Client, e.Type)
	switch e.Type {
	case TypeFault, TypeHealed:
		return fmt.Sprintf("%v %s %s", at, who, e.Why)
	case TypeKilled:
		return fmt.Sprintf("%v %s", at, who)
	case TypeCall:
		return fmt.Sprintf("%v %s #%d %s %q", at, who, e.ID, e.Op, e.Name)
	case TypeReturn:
		s := fmt.Sprintf("%v %s #%d %s %q %s", at, who, e.ID, e.Op, e.Name, e.Outcome)
		if e.Token.Valid() {
			s += fmt.Sprintf(" token %v", e.Token)
		}
		if e.Err != "" {
			return s + e.until(start) + ": " + e.Err
		}
		return s + e.until(start)
	}
	return fmt.Sprintf("%v %s #%d%s %s", at, who, e.ID, e.until(start), e.Why)
}

// until returns the deadline as text, or "".
func (e Event) until(start backend.Instant) string {
	if e.Deadline == 0 {
		return ""
	}
	return fmt.Sprintf(" until %v", e.Deadline.Sub(start))
}
