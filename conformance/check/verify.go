package check

import (
	"context"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// Rules are the rules for a history. The zero value checks exclusion alone.
type Rules struct {
	// Fencing: tokens increase.
	Fencing bool

	// TTL of the locks: for how long at least an acquire of unknown outcome may keep a name closed. Zero: the longest
	// in the history.
	TTL time.Duration

	// Exact: the service keeps a hold for the whole TTL. Otherwise it is held to the deadline only, which lies a margin
	// before: a holder may rely on it. Exact is for services that are never early: backend.Description.Margin is
	// zero.
	Exact bool

	// Patience bounds the rest of a call after the end of its context. Zero: not checked. A busy machine takes
	// its time, and a process that was stopped too: choose seconds.
	Patience time.Duration

	// Recovery bounds the wait for a free name without a fault. Zero: not checked.
	Recovery time.Duration

	// Timeout bounds the search for an order, for all names together. Default one minute. Negative: no search.
	Timeout time.Duration

	// Found are violations that the caller knows of: leftovers, a fault that did not happen. They are put before the
	// others.
	Found []Violation

	// Seed tells how to repeat the run. It is part of what Report.Dump writes.
	Seed string
}

// Kind names a rule that was broken.
type Kind string

// The kinds of violations.
const (
	// Overlap: two believed in a lock at once.
	Overlap Kind = "overlap"
	// Early: a lock was granted although its holder had not released it and its TTL was not over.
	Early Kind = "early grant"
	// EarlyLoss: a holder was told of a loss before its deadline, and nobody had taken the lock away by force.
	EarlyLoss Kind = "early loss"
	// TokenOrder: a later grant has a lower token.
	TokenOrder Kind = "token order"
	// TokenTwice: two holds have one token.
	TokenTwice Kind = "token twice"
	// TokenMark: a token has another kind than the hold, or is missing.
	TokenMark Kind = "token mark"
	// Stuck: a call went on after its context, or a free name was waited for.
	Stuck Kind = "stuck"
	// Forgotten: the service was asked, and did not know of a hold that it had promised to keep.
	Forgotten Kind = "forgotten"
	// Illegal: there is no order in which a lock could have done all operations.
	Illegal Kind = "illegal history"
	// Undecided: the search for an order did not end in time.
	Undecided Kind = "undecided"
	// Malformed: the history is invalid: a return without a call, two calls with one ID, an unknown operation, outcome or
	// kind.
	Malformed Kind = "malformed"
	// Leftover: something was left in the service after everybody had closed. Found by callers.
	Leftover Kind = "leftover"
	// NoFault: a fault that was to happen did not. Found by callers.
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

// Verify checks a history in which all calls have ended, or their callers were killed. The search ends early,
// with Undecided, when ctx does. It is not for calls under testing/synctest, with a clock that stands still while the
// search runs.
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
