package lead

// How a leader counts, logs and audits locks.
//
//	proposer.land ─► account.landed ─► Meter, log, audit
//	                        └─► Standing
//
// Only entries that this leader has proposed count, so neither a replay of the log nor another member counts them
// twice. Times run from the receipt of a command to its answer, by the leader's clock. Standing includes the holds and
// waits of earlier leaders; their durations are unknown.

import (
	"container/list"
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// The outcomes of an acquire, and the ends of a hold, for Meter.
const (
	OutcomeGranted   = "granted"
	OutcomeHeld      = "held"
	OutcomeCancelled = "cancelled"
	OutcomeDeadlock  = "deadlock"
	OutcomeLimit     = "limit"
	OutcomeRefused   = "refused"

	EndReleased = "released"
	EndExpired  = "expired"
	EndForced   = "forced"
)

// Meter gets a leader's counts. Only one goroutine at a time calls its methods, which must not block.
type Meter interface {
	// Acquired reports that an acquire ended with an outcome after took. waited reports that it was queued.
	Acquired(kind machine.Kind, outcome string, waited bool, took time.Duration)
	// Ended reports that a hold ended. held is negative if the hold began under an earlier leader.
	Ended(kind machine.Kind, end string, held time.Duration)
	// Limited reports that a command failed because it reached a limit of machine.Limits.
	Limited(limit string)
	// StaleRelease reports that a release named a token without a hold.
	StaleRelease()
}

// Standing is the state at one instant. The index of the arrays is the kind.
type Standing struct {
	Holds, Waits           [3]int
	OldestHold, OldestWait [3]time.Duration
	Sessions               int
	// LongestQueue is the number of waiters in the longest queue. A wait for several names counts for the first name.
	LongestQueue int
	Limits       machine.Limits
}

// maxLogged bounds the lines about holds that end in one log entry: a session may have 100,000 holds.
const maxLogged = 100

// claim is one hold or wait.
type claim struct {
	name, owner string
	kind        machine.Kind
	at          time.Time
	inherited   bool // it began under an earlier leader
	place       *list.Element
}

// account tracks holds and waits in one term.
type account struct {
	now   func() time.Time
	meter Meter // nil: no counting
	log   *slog.Logger
	trail trail

	mu sync.Mutex // protects the following fields
	// holds is by the order of the token, waits by ticket.
	holds, waits map[uint64]*claim
	// oldest has the holds of each kind, and next the waits, in the order in which they began.
	oldest, next [3]list.List
	// queues has the number of waiters of each name, and lengths the number of names with each number of waiters.
	queues  map[string]int
	lengths map[int]int
	longest int
}

func newAccount(c *Config) *account {
	return &account{
		now: c.Now, meter: c.Meter, log: c.Log, trail: newTrail(c), holds: map[uint64]*claim{}, waits: map[uint64]*claim{},
		queues: map[string]int{}, lengths: map[int]int{},
	}
}

// inherit records the existing holds and waits before the term serves. wall is the current wall-clock time.
func (a *account) inherit(m *machine.Machine, wall time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.now()
	for _, x := range m.Follow() {
		age := max(0, wall.Sub(time.Unix(0, x.Since)))
		c := &claim{name: x.Name, owner: x.Owner, kind: x.Kind, at: now.Add(-age), inherited: true}
		if x.Token != 0 {
			a.addHold(x.Token.Order(), c)
		} else {
			a.addWait(x.Ticket, c)
		}
	}
}

// Without a Meter, addHold and addWait record nothing, to save memory.
func (a *account) addHold(order uint64, c *claim) {
	if a.meter == nil {
		return
	}
	c.place = a.oldest[c.kind].PushBack(c)
	a.holds[order] = c
}

func (a *account) addWait(ticket uint64, c *claim) {
	if a.meter == nil {
		return
	}
	c.place = a.next[c.kind].PushBack(c)
	a.waits[ticket] = c
	n := a.queues[c.name] + 1
	a.queues[c.name] = n
	a.lengths[n]++
	if n > 1 {
		a.lengths[n-1]--
	}
	a.longest = max(a.longest, n)
}

func (a *account) removeHold(order uint64) *claim {
	c := a.holds[order]
	if c != nil {
		delete(a.holds, order)
		a.oldest[c.kind].Remove(c.place)
	}
	return c
}

func (a *account) removeWait(ticket uint64) *claim {
	c := a.waits[ticket]
	if c == nil {
		return nil
	}
	delete(a.waits, ticket)
	a.next[c.kind].Remove(c.place)
	n := a.queues[c.name]
	if a.lengths[n]--; a.lengths[n] == 0 {
		delete(a.lengths, n)
	}
	if n > 1 {
		a.lengths[n-1]++
		a.queues[c.name] = n - 1
	} else {
		delete(a.queues, c.name)
	}
	for a.longest > 0 && a.lengths[a.longest] == 0 {
		a.longest--
	}
	return c
}

// landed counts, logs and audits one entry, whose commands were just answered.
func (a *account) landed(batch []Proposal, out *replica.Applied) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.now()
	asked := map[uint64]time.Time{} // by ticket
	for i := range batch {
		if r := &out.Results[i]; r.Code == machine.CodeQueued {
			asked[r.Ticket] = batch[i].at
		}
	}
	fresh := a.follow(batch, out, asked, now)
	a.trail.landed(batch, out)
	if a.meter == nil {
		return
	}
	for i := range batch {
		a.command(&batch[i], &out.Results[i], fresh, now)
	}
}

// command counts the result of a command, unless an event of the entry counts it. fresh has the tokens that the entry
// granted without a wait: any other grant was counted before.
func (a *account) command(x *Proposal, r *machine.Result, fresh map[uint64]bool, now time.Time) {
	if r.Code == machine.CodeLimit {
		a.meter.Limited(r.Field)
	}
	switch c := &x.Command; c.Op {
	case machine.OpAcquire:
		outcome := OutcomeRefused
		switch r.Code {
		case machine.CodeGranted:
			if len(r.Grants) == 0 || !fresh[r.Grants[0].Token.Order()] {
				return
			}
			outcome = OutcomeGranted
		case machine.CodeQueued, machine.CodeStale:
			return
		case machine.CodeHeld:
			outcome = OutcomeHeld
		case machine.CodeCancelled:
			outcome = OutcomeCancelled
		case machine.CodeDeadlock:
			outcome = OutcomeDeadlock
		case machine.CodeLimit:
			outcome = OutcomeLimit
		}
		if len(c.Requests) > 0 && c.Requests[0].Kind <= machine.Permits {
			a.meter.Acquired(c.Requests[0].Kind, outcome, false, now.Sub(x.at))
		}
	case machine.OpRelease:
		if r.Code == machine.CodeNotHeld && c.Token != 0 {
			a.meter.StaleRelease()
		}
	}
}

// follow counts and logs the events of an entry. asked has the receipts of queued commands by ticket. It returns the
// tokens, by their order, that were granted without a wait.
func (a *account) follow(
	batch []Proposal, out *replica.Applied, asked map[uint64]time.Time, now time.Time,
) map[uint64]bool {
	fresh := map[uint64]bool{}
	before := map[string]*machine.Event{} // the event that ended the last hold, by name
	logged := 0
	for i := range out.Events {
		e := &out.Events[i]
		order := e.Token.Order()
		switch e.Type {
		case machine.EventQueued:
			at, ok := asked[e.Ticket]
			if !ok {
				at = now
			}
			a.addWait(e.Ticket, &claim{name: e.Name, owner: e.Owner, kind: e.Kind, at: at})
		case machine.EventAcquired:
			a.addHold(order, &claim{name: e.Name, owner: e.Owner, kind: e.Kind, at: now})
			if e.Ticket == 0 {
				fresh[order] = true
			} else {
				a.waitOver(e.Ticket, OutcomeGranted, now)
			}
			if b := before[e.Name]; b != nil && b.Owner != e.Owner {
				a.logChange(b, e)
				delete(before, e.Name)
			}
		case machine.EventCancelled:
			a.waitOver(e.Ticket, OutcomeCancelled, now)
		case machine.EventReleased, machine.EventExpired, machine.EventForced, machine.EventFreed:
			held := a.ended(e, now)
			before[e.Name] = e
			if e.Type == machine.EventExpired || e.Type == machine.EventForced {
				if logged++; logged <= maxLogged {
					from := ""
					if x := forcer(batch, out, e); x != nil {
						from = x.From
					}
					a.logEnd(e, held, from)
				}
			}
		}
	}
	if logged > maxLogged {
		a.log.Warn("more locks ended in the same step", "count", logged-maxLogged)
	}
	return fresh
}

func (a *account) waitOver(ticket uint64, outcome string, now time.Time) {
	c := a.removeWait(ticket)
	if c != nil && !c.inherited && a.meter != nil {
		a.meter.Acquired(c.kind, outcome, true, now.Sub(c.at))
	}
}

// ended counts the end of a hold, and returns its duration; negative if unknown. It ignores a lingering hold, which has
// ended before.
func (a *account) ended(e *machine.Event, now time.Time) time.Duration {
	c := a.removeHold(e.Token.Order())
	if c == nil {
		return -1
	}
	held := now.Sub(c.at)
	if c.inherited {
		held = -1
	}
	end := EndReleased
	switch e.Type {
	case machine.EventExpired:
		end = EndExpired
	case machine.EventForced:
		end = EndForced
	}
	if a.meter != nil {
		a.meter.Ended(c.kind, end, held)
	}
	return held
}

// forcer returns the command that forced the end of a hold; nil for other ends.
func forcer(batch []Proposal, out *replica.Applied, e *machine.Event) *Proposal {
	if e.Type != machine.EventForced && e.Type != machine.EventFreed {
		return nil
	}
	for i := range batch {
		c := &batch[i].Command
		if c.Op == machine.OpForceRelease && c.Name == e.Name && string(c.Principal) == e.Principal &&
			out.Results[i].Code == machine.CodeOK {
			return &batch[i]
		}
	}
	return nil
}

// logEnd logs a hold that ended without a release.
func (a *account) logEnd(e *machine.Event, held time.Duration, from string) {
	attrs := []any{"name", e.Name, "owner", e.Owner, "hold", e.HoldID, "token", e.Token.String()}
	if held >= 0 {
		attrs = append(attrs, "held", held)
	}
	if e.Type == machine.EventExpired {
		if e.Reason != "" {
			attrs = append(attrs, "reason", e.Reason)
		}
		a.log.Warn("held lock expired", append(attrs, "session", e.Session.String())...)
		return
	}
	a.log.Warn("forced release", append(attrs, "by", e.By, "principal", e.Principal, "from", from, "reason", e.Reason)...)
}

// logChange logs that the owner of a name changed: at the debug level if the previous owner released it.
func (a *account) logChange(was, is *machine.Event) {
	level := slog.LevelDebug
	if was.Type == machine.EventExpired || was.Type == machine.EventForced {
		level = slog.LevelInfo
	}
	a.log.Log(context.Background(), level, "lock changed its owner", "name", is.Name, "from", was.Owner, "to", is.Owner,
		"token", is.Token.String())
}

// standing returns the current counts of holds and waits.
func (a *account) standing() Standing {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.now()
	s := Standing{LongestQueue: a.longest}
	for kind := range a.oldest {
		s.Holds[kind], s.OldestHold[kind] = state(&a.oldest[kind], now)
		s.Waits[kind], s.OldestWait[kind] = state(&a.next[kind], now)
	}
	return s
}

// state returns the number of claims, and the age of the first claim.
func state(l *list.List, now time.Time) (n int, age time.Duration) {
	if first := l.Front(); first != nil {
		age = max(0, now.Sub(first.Value.(*claim).at))
	}
	return l.Len(), age
}
