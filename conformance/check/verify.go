package check

import (
	"context"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// Rules are the rules for a history. The zero value checks only exclusion.
type Rules struct {
	// Fencing requires increasing tokens.
	Fencing bool

	// TTL of the locks, for which an acquire of unknown outcome may keep a name closed. Zero, or shorter than the
	// longest TTL in the history: the longest TTL.
	TTL time.Duration

	// Exact requires that the service keeps a hold for the whole TTL. Otherwise it must keep the hold only until the
	// deadline, which lies a margin before and on which a holder may rely. Exact is for services that are never early:
	// backend.Description.Margin is zero.
	Exact bool

	// Patience bounds the time of a call after the end of its context. Zero: not checked. Choose seconds, since the
	// machine may be busy, and the process may be stopped.
	Patience time.Duration

	// Recovery bounds the wait for a free name without a fault. Zero: not checked.
	Recovery time.Duration

	// Timeout bounds the search for an order, for all names together. Default one minute. Negative: no search.
	Timeout time.Duration

	// Found are violations that the caller has found: leftovers, a fault that did not happen. They come before the
	// others.
	Found []Violation

	// Seed describes how to repeat the run. Report.Dump writes it.
	Seed string
}

// Kind is the kind of a violation.
type Kind string

// The kinds of violations.
const (
	// Overlap: conflicting holds were valid at the same time.
	Overlap Kind = "overlap"
	// Early: a lock was granted before its holder released it and before its TTL ended.
	Early Kind = "early grant"
	// EarlyLoss: a holder was notified of a loss before its deadline, without a force-release.
	EarlyLoss Kind = "early loss"
	// TokenOrder: a later grant has a lower token.
	TokenOrder Kind = "token order"
	// TokenTwice: two holds have the same token.
	TokenTwice Kind = "token twice"
	// TokenMark: a token is missing or is marked for another kind of hold.
	TokenMark Kind = "token mark"
	// Stuck: a call went on after its context, or a client waited for a free name.
	Stuck Kind = "stuck"
	// Forgotten: an inspection did not show a hold that the service had to keep.
	Forgotten Kind = "forgotten"
	// Illegal: there is no order in which a lock could have executed all operations.
	Illegal Kind = "illegal history"
	// Undecided: the search for an order did not end in time.
	Undecided Kind = "undecided"
	// Malformed: the history is invalid: a return without a call, two calls with one ID, an unknown operation, outcome or
	// kind.
	Malformed Kind = "malformed"
	// Leftover: the service had entries after all clients had closed. Found by callers.
	Leftover Kind = "leftover"
	// NoFault: an intended fault did not happen. Found by callers.
	NoFault Kind = "fault did not happen"
)

// Violation is one rule broken once.
type Violation struct {
	Kind Kind            `json:"kind"`
	Name string          `json:"name,omitempty"` // of the lock
	At   backend.Instant `json:"at,omitempty"`   // as in Event; times in Text count from the first event
	Text string          `json:"text"`
}

// String returns kind and text.
func (v Violation) String() string { return string(v.Kind) + ": " + v.Text }

// Verify checks a history in which all calls have ended, or their callers were killed. The search ends early, with
// Undecided, when ctx does. Do not call it under testing/synctest, whose clock does not move during the search.
func Verify(ctx context.Context, h History, rules Rules) Report {
	begin := time.Now()
	if rules.Timeout == 0 {
		rules.Timeout = time.Minute
	}
	p := Report{Violations: append([]Violation(nil), rules.Found...), History: h, Rules: rules}
	run := gather(h, rules)
	p.Violations = append(p.Violations, run.malformed...)
	p.scan(run)
	p.Scans = time.Since(begin)
	if rules.Timeout > 0 {
		ctx, cancel := context.WithTimeout(ctx, rules.Timeout)
		defer cancel()
		p.search(ctx, run)
	}
	return p
}
