package check

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// story is a handwritten history. Instants are milliseconds; the name is n unless changed.
type story struct {
	name   string
	events []Event
	last   uint64
}

func ms(n int) backend.Instant { return backend.Instant(n) * backend.Instant(time.Millisecond) }

func tell() *story { return &story{name: "n"} }

func (s *story) add(e Event) {
	if e.Name == "" && e.Type != TypeKilled && e.Type != TypeFault && e.Type != TypeHealed {
		e.Name = s.name
	}
	s.events = append(s.events, e)
}

// call adds a call, with its return unless to is negative, and returns its number.
func (s *story) call(client string, op Op, from, to int, ret Event) uint64 {
	s.last++
	id := s.last
	s.add(Event{Type: TypeCall, At: ms(from), Client: client, ID: id, Op: op, Hold: ret.Hold, Until: ret.Until})
	if to >= 0 {
		ret.Type, ret.At, ret.Client, ret.ID, ret.Op, ret.Until = TypeReturn, ms(to), client, id, op, 0
		s.add(ret)
	}
	return id
}

// grab adds an exclusive acquire that was granted until the deadline.
func (s *story) grab(client string, from, to int, token fencing.Token, deadline int) uint64 {
	return s.grabAs(client, from, to, Event{Token: token, Kind: "exclusive"}, deadline)
}

func (s *story) share(client string, from, to int, token fencing.Token, deadline int) uint64 {
	return s.grabAs(client, from, to, Event{Token: token.NotExclusive(), Kind: "shared"}, deadline)
}

func (s *story) permits(client string, from, to int, token fencing.Token, deadline, n, limit int) uint64 {
	return s.grabAs(client, from, to,
		Event{Token: token.NotExclusive(), Kind: "permits", Permits: n, Limit: limit}, deadline)
}

func (s *story) grabAs(client string, from, to int, e Event, deadline int) uint64 {
	e.Outcome, e.SentAt, e.Deadline = OK, ms(from), ms(deadline)
	e.TTL = e.Deadline.Sub(e.SentAt) + margin
	return s.call(client, OpAcquire, from, to, e)
}

// margin is the time between the deadlines of a story and the ends of its TTLs.
const margin = 10 * time.Millisecond

func (s *story) give(client string, hold uint64, from, to int, out Outcome) {
	s.call(client, OpRelease, from, to, Event{Hold: hold, Outcome: out})
}

func (s *story) renewed(client string, hold uint64, sent, at, deadline int) {
	s.add(Event{
		Type: TypeRenewed, At: ms(at), Client: client, ID: hold,
		SentAt: ms(sent), TTL: ms(deadline).Sub(ms(sent)) + margin, Deadline: ms(deadline),
	})
}

func (s *story) lost(client string, hold uint64, at, deadline int, why backend.Reason) {
	s.add(Event{Type: TypeEnd, At: ms(at), Client: client, ID: hold, Deadline: ms(deadline), Why: string(why)})
}

func (s *story) ask(client string, from, to int, seen ...fencing.Token) {
	s.call(client, OpAsk, from, to, Event{Outcome: OK, Seen: seen})
}

func (s *story) history() History { return Merge(History{Events: s.events}) }

// fenced are the rules for most stories.
var fenced = Rules{Fencing: true, Patience: time.Second, Recovery: 10 * time.Second}

// stories name the violations that the checker must find in each story, and no others. For an illegal story, the
// search alone must find no order.
var stories = []struct {
	name    string
	rules   Rules
	want    []Kind
	illegal bool
	tell    func(*story)
}{
	{name: "nothing", rules: fenced, tell: func(s *story) {}},
	{name: "one after the other", rules: fenced, tell: func(s *story) {
		a := s.grab("a", 1, 5, 1, 1000)
		s.give("a", a, 20, 30, OK)
		b := s.grab("b", 10, 25, 2, 1000) // granted before the answer to the release
		s.give("b", b, 50, 60, OK)
	}},
	{name: "two at once", rules: fenced, want: []Kind{Overlap, Early}, illegal: true, tell: func(s *story) {
		a := s.grab("a", 1, 5, 1, 1000)
		b := s.grab("b", 10, 15, 2, 1000)
		s.give("a", a, 20, 30, OK)
		s.give("b", b, 50, 60, OK)
	}},
	{name: "two at once, asked for at once", rules: fenced, want: []Kind{Overlap, Illegal}, illegal: true,
		tell: func(s *story) {
			a := s.grab("a", 1, 15, 1, 1000)
			b := s.grab("b", 2, 14, 2, 1000)
			s.give("a", a, 20, 30, OK)
			s.give("b", b, 50, 60, OK)
		}},
	{name: "two names at once", rules: fenced, tell: func(s *story) {
		a := s.grab("a", 1, 5, 1, 1000)
		s.give("a", a, 20, 30, OK)
		s.name = "m"
		b := s.grab("b", 10, 15, 1, 1000)
		s.give("b", b, 50, 60, OK)
	}},
	{name: "the rival comes after the deadline", rules: fenced, tell: func(s *story) {
		a := s.grab("a", 1, 5, 1, 100)
		b := s.grab("b", 10, 120, 2, 1000)
		s.lost("a", a, 130, 100, backend.ReasonExpired) // late, without effect
		s.give("b", b, 150, 160, OK)
	}},
	{name: "the rival comes before the deadline", rules: fenced, want: []Kind{Overlap, Early}, illegal: true,
		tell: func(s *story) {
			a := s.grab("a", 1, 5, 1, 100)
			b := s.grab("b", 10, 90, 2, 1000)
			s.lost("a", a, 100, 100, backend.ReasonExpired)
			s.give("b", b, 150, 160, OK)
		}},
	{name: "the rival comes in the margin", rules: fenced, tell: func(s *story) {
		a := s.grab("a", 1, 5, 1, 100)
		b := s.grab("b", 10, 105, 2, 1000)
		s.lost("a", a, 100, 100, backend.ReasonExpired)
		s.give("b", b, 150, 160, OK)
	}},
	{
		name: "the rival comes in the margin of an exact service", rules: Rules{Fencing: true, Exact: true},
		want: []Kind{Early}, illegal: true, tell: func(s *story) {
			a := s.grab("a", 1, 5, 1, 100)
			b := s.grab("b", 10, 105, 2, 1000)
			s.lost("a", a, 100, 100, backend.ReasonExpired)
			s.give("b", b, 150, 160, OK)
		},
	},
	{name: "a renewed hold is kept", rules: fenced, want: []Kind{Overlap, Early}, illegal: true, tell: func(s *story) {
		a := s.grab("a", 1, 5, 1, 100)
		s.renewed("a", a, 50, 60, 150)
		b := s.grab("b", 10, 120, 2, 1000)
		s.give("a", a, 140, 145, OK)
		s.give("b", b, 150, 160, OK)
	}},
	{name: "a renewal that came after the rival", rules: fenced, want: []Kind{Overlap, Early}, illegal: true,
		tell: func(s *story) {
			a := s.grab("a", 1, 5, 1, 100)
			b := s.grab("b", 10, 120, 2, 1000)
			s.renewed("a", a, 130, 140, 230)
			s.give("b", b, 150, 160, OK)
			s.lost("a", a, 230, 230, backend.ReasonExpired)
		}},
	{name: "a deadline that was taken back", rules: Rules{Fencing: true, Exact: true}, tell: func(s *story) {
		a := s.grab("a", 1, 5, 1, 1000)
		s.add(Event{
			Type: TypeEnd, At: ms(100), Client: "a", ID: a, SentAt: ms(1), TTL: ms(999).Sub(0) + margin,
			Deadline: ms(100), Why: "expired",
		})
		s.grab("b", 10, 115, 2, 1000)
	}},
	{name: "the holder was not notified", rules: fenced, want: []Kind{Overlap}, tell: func(s *story) {
		a := s.call("a", OpAcquire, 1, 5,
			Event{Outcome: OK, Token: 1, Kind: "exclusive", SentAt: ms(1), TTL: 100 * time.Millisecond})
		b := s.grab("b", 10, 120, 2, 1000)
		s.give("b", b, 150, 160, OK)
		s.give("a", a, 170, 180, Gone)
	}},
	{name: "a killed holder", rules: fenced, tell: func(s *story) {
		s.grab("a/1", 1, 5, 1, 100)
		s.add(Event{Type: TypeKilled, At: ms(50), Client: "a"})
		b := s.grab("b", 10, 111, 2, 1000)
		s.give("b", b, 150, 160, OK)
	}},
	{name: "a killed holder's lock is kept for its TTL", rules: fenced, want: []Kind{Early}, illegal: true,
		tell: func(s *story) {
			s.grab("a/1", 1, 5, 1, 100)
			s.add(Event{Type: TypeKilled, At: ms(50), Client: "a"})
			b := s.grab("b", 10, 80, 2, 1000)
			s.give("b", b, 150, 160, OK)
		}},
	{name: "notified of a loss before the deadline", rules: fenced, want: []Kind{EarlyLoss}, tell: func(s *story) {
		a := s.grab("a", 1, 5, 1, 100)
		s.lost("a", a, 50, 100, backend.ReasonEvicted)
	}},
	{name: "taken away by force", rules: fenced, tell: func(s *story) {
		a := s.grab("a", 1, 5, 1, 1000)
		s.call("admin", OpForce, 20, 25, Event{Outcome: OK})
		b := s.grab("b", 10, 24, 2, 1000)
		s.lost("a", a, 50, 1000, backend.ReasonEvicted)
		s.give("b", b, 150, 160, OK)
	}},
	{name: "forced while it was acquired, and taken away by force later", rules: fenced, tell: func(s *story) {
		s.call("admin", OpForce, 1, 2, Event{Outcome: OK})
		a := s.grab("a", 1, 5, 1, 1000)
		s.renewed("a", a, 900, 905, 1900)
		s.renewed("a", a, 1800, 1805, 2800)
		s.call("admin", OpForce, 2000, 2001, Event{Outcome: OK})
		b := s.grab("b", 2002, 2003, 2, 3000)
		s.lost("a", a, 2100, 2800, backend.ReasonEvicted)
		s.give("b", b, 2600, 2601, OK)
	}},
	{name: "taken away before the force", rules: fenced, want: []Kind{Overlap, Early}, illegal: true,
		tell: func(s *story) {
			a := s.grab("a", 1, 5, 1, 1000)
			b := s.grab("b", 10, 15, 2, 1000)
			s.call("admin", OpForce, 20, 25, Event{Outcome: OK})
			s.lost("a", a, 50, 1000, backend.ReasonEvicted)
			s.lost("b", b, 50, 1000, backend.ReasonEvicted)
		}},
	{name: "notified of a forced release", rules: fenced, tell: func(s *story) {
		a := s.grab("a", 1, 5, 1, 1000)
		b := s.grab("b", 10, 24, 2, 1000)
		s.lost("a", a, 50, 1000, backend.ReasonForceReleased)
		s.give("b", b, 150, 160, OK)
	}},
	{name: "a token that goes back", rules: fenced, want: []Kind{TokenOrder}, illegal: true, tell: func(s *story) {
		a := s.grab("a", 1, 5, 7, 1000)
		s.give("a", a, 20, 30, OK)
		b := s.grab("b", 40, 45, 6, 1000)
		s.give("b", b, 50, 60, OK)
	}},
	{
		name: "a token that goes back between waits at once", rules: fenced, want: []Kind{Illegal}, illegal: true,
		tell: func(s *story) {
			a := s.grab("a", 1, 5, 7, 1000)
			s.give("a", a, 20, 30, OK)
			b := s.grab("b", 2, 25, 6, 1000)
			s.give("b", b, 50, 60, OK)
		},
	},
	{name: "tokens without fencing", rules: Rules{}, tell: func(s *story) {
		a := s.grab("a", 1, 5, 7, 1000)
		s.give("a", a, 20, 30, OK)
		b := s.grab("b", 40, 45, 0, 1000)
		s.give("b", b, 50, 60, OK)
	}},
	{name: "a token twice", rules: fenced, want: []Kind{TokenTwice}, illegal: true, tell: func(s *story) {
		a := s.grab("a", 1, 5, 7, 1000)
		s.give("a", a, 20, 30, OK)
		b := s.grab("b", 40, 45, 7, 1000)
		s.give("b", b, 50, 60, OK)
	}},
	{name: "no token", rules: fenced, want: []Kind{TokenMark, Illegal}, illegal: true, tell: func(s *story) {
		a := s.grab("a", 1, 5, 0, 1000)
		s.give("a", a, 20, 30, OK)
	}},
	{name: "a shared hold with a token that fences", rules: fenced, want: []Kind{TokenMark}, tell: func(s *story) {
		a := s.grabAs("a", 1, 5, Event{Token: 3, Kind: "shared"}, 1000)
		s.give("a", a, 20, 30, OK)
	}},
	{name: "one hold that is granted again", rules: fenced, tell: func(s *story) {
		a := s.grabAs("a", 1, 5, Event{Token: 7, Kind: "exclusive", Request: "r"}, 100)
		b := s.grabAs("b", 50, 60, Event{Token: 7, Kind: "exclusive", Request: "r"}, 150)
		s.give("b", b, 70, 80, OK)
		s.give("a", a, 85, 90, Gone)
	}},
	{name: "a release of unknown outcome that was done", rules: fenced, tell: func(s *story) {
		a := s.grab("a", 1, 5, 1, 1000)
		s.give("a", a, 20, 30, Unknown)
		b := s.grab("b", 40, 45, 2, 1000)
		s.give("b", b, 50, 60, OK)
	}},
	{name: "a release of unknown outcome that was done late", rules: fenced, tell: func(s *story) {
		a := s.grab("a", 1, 5, 1, 1000)
		s.give("a", a, 20, 30, Unknown)
		b := s.grab("b", 40, 500, 2, 1000)
		s.give("b", b, 510, 520, OK)
	}},
	{name: "a release of unknown outcome that was never done", rules: fenced, tell: func(s *story) {
		a := s.grab("a", 1, 5, 1, 1000)
		s.give("a", a, 20, 30, Unknown)
		b := s.grab("b", 40, 1100, 2, 2000)
		s.give("b", b, 1510, 1520, OK)
	}},
	{name: "an acquire of unknown outcome", rules: fenced, tell: func(s *story) {
		s.call("a", OpAcquire, 1, 5, Event{Outcome: Unknown})
		b := s.grab("b", 40, 500, 2, 1000)
		s.give("b", b, 510, 520, OK)
	}},
	{name: "a release by somebody who does not hold", rules: fenced, want: []Kind{Overlap, Early}, illegal: true,
		tell: func(s *story) {
			a := s.grab("a", 1, 5, 1, 100) // lost, and then a releases the name that b holds
			b := s.grab("b", 120, 130, 2, 1000)
			s.lost("a", a, 100, 100, backend.ReasonExpired)
			s.give("a", a, 140, 145, OK)
			c := s.grab("c", 150, 155, 3, 1000)
			s.give("b", b, 160, 170, Gone)
			s.give("c", c, 180, 190, OK)
		}},
	{name: "a release that is confirmed although nothing was held", rules: fenced, want: []Kind{Overlap, Illegal},
		illegal: true, tell: func(s *story) {
			a := s.grab("a", 1, 8, 1, 1000)
			b := s.grab("b", 4, 30, 2, 1000) // a was evicted after 8
			s.give("b", b, 35, 36, OK)
			s.give("a", a, 40, 50, OK)
		}},
	{name: "the service forgets", rules: fenced, want: []Kind{Forgotten}, illegal: true, tell: func(s *story) {
		a := s.grab("a", 1, 5, 1, 1000)
		s.ask("a", 10, 15)
		s.give("a", a, 20, 30, OK)
	}},
	{name: "the service remembers", rules: fenced, tell: func(s *story) {
		a := s.grab("a", 1, 5, 1, 1000)
		s.ask("a", 10, 15, 1)
		s.give("a", a, 20, 30, OK)
		s.ask("a", 22, 40) // beside the release
	}},
	{name: "readers together, and a writer after them", rules: fenced, tell: func(s *story) {
		a := s.share("a", 1, 5, 1, 1000)
		b := s.share("b", 10, 15, 2, 1000)
		s.give("a", a, 20, 30, OK)
		s.give("b", b, 40, 50, OK)
		w := s.grab("w", 12, 45, 3, 1000)
		s.give("w", w, 60, 70, OK)
	}},
	{name: "a writer beside a reader", rules: fenced, want: []Kind{Overlap, Early}, illegal: true,
		tell: func(s *story) {
			a := s.share("a", 1, 5, 1, 1000)
			w := s.grab("w", 12, 15, 3, 1000)
			s.give("a", a, 20, 30, OK)
			s.give("w", w, 60, 70, OK)
		}},
	{name: "a reader beside a writer", rules: fenced, want: []Kind{Overlap, Early}, illegal: true,
		tell: func(s *story) {
			w := s.grab("w", 1, 5, 1, 1000)
			a := s.share("a", 12, 15, 2, 1000)
			s.give("a", a, 20, 30, OK)
			s.give("w", w, 60, 70, OK)
		}},
	{name: "a writer after a lost reader", rules: fenced, tell: func(s *story) {
		a := s.share("a", 1, 5, 1, 100)
		b := s.share("b", 1, 5, 2, 1000)
		s.lost("a", a, 100, 100, backend.ReasonExpired)
		s.give("b", b, 110, 120, OK)
		w := s.grab("w", 12, 115, 3, 1000)
		s.give("w", w, 160, 170, OK)
	}},
	{name: "as many permits as there are", rules: fenced, tell: func(s *story) {
		a := s.permits("a", 1, 5, 1, 1000, 2, 3)
		b := s.permits("b", 1, 5, 2, 1000, 1, 3)
		s.give("a", a, 20, 30, OK)
		c := s.permits("c", 6, 25, 3, 1000, 2, 3)
		s.give("b", b, 40, 50, OK)
		s.give("c", c, 60, 70, OK)
	}},
	{name: "more permits than there are", rules: fenced, want: []Kind{Overlap, Early}, illegal: true,
		tell: func(s *story) {
			a := s.permits("a", 1, 5, 1, 1000, 2, 3)
			b := s.permits("b", 6, 8, 2, 1000, 2, 3)
			s.give("a", a, 20, 30, OK)
			s.give("b", b, 40, 50, OK)
		}},
	{
		name: "more permits than there are, asked for at once", rules: fenced,
		want: []Kind{Overlap, Illegal}, illegal: true, tell: func(s *story) {
			a := s.permits("a", 1, 5, 1, 1000, 1, 2)
			b := s.permits("b", 1, 5, 2, 1000, 1, 2)
			c := s.permits("c", 1, 5, 3, 1000, 1, 2)
			s.give("a", a, 20, 30, OK)
			s.give("b", b, 20, 30, OK)
			s.give("c", c, 20, 30, OK)
		},
	},
	{name: "permits come back when their holder is gone", rules: fenced, tell: func(s *story) {
		a := s.permits("a", 1, 5, 1, 100, 2, 3)
		s.lost("a", a, 100, 100, backend.ReasonExpired)
		b := s.permits("b", 6, 120, 2, 1000, 2, 3)
		s.give("b", b, 140, 150, OK)
	}},
	{name: "another limit", rules: fenced, want: []Kind{Overlap, Early}, illegal: true, tell: func(s *story) {
		a := s.permits("a", 1, 5, 1, 1000, 1, 3)
		b := s.permits("b", 6, 8, 2, 1000, 1, 4)
		s.give("a", a, 20, 30, OK)
		s.give("b", b, 40, 50, OK)
	}},
	{name: "a call that goes on after its context", rules: fenced, want: []Kind{Stuck}, tell: func(s *story) {
		s.call("a", OpAcquire, 1, 1600, Event{Outcome: Refused, Until: ms(500)})
	}},
	{name: "a call that ends after its context", rules: fenced, tell: func(s *story) {
		s.call("a", OpAcquire, 1, 600, Event{Outcome: Refused, Until: ms(500)})
	}},
	{name: "a call that never ends", rules: fenced, want: []Kind{Stuck}, tell: func(s *story) {
		s.call("a", OpAcquire, 1, -1, Event{})
	}},
	{name: "a call of a killed caller", rules: fenced, tell: func(s *story) {
		s.call("a/1", OpAcquire, 1, -1, Event{})
		s.add(Event{Type: TypeKilled, At: ms(50), Client: "a"})
	}},
	{name: "a free name that is waited for", rules: fenced, want: []Kind{Stuck}, tell: func(s *story) {
		a := s.grab("a", 1, 5, 1, 1000)
		s.give("a", a, 20, 30, OK)
		s.grab("b", 10, 10100, 2, 11000)
	}},
	{name: "a free name that is waited for during a fault", rules: fenced, tell: func(s *story) {
		a := s.grab("a", 1, 5, 1, 1000)
		s.give("a", a, 20, 30, OK)
		s.add(Event{Type: TypeFault, At: ms(40), Why: "partition"})
		s.add(Event{Type: TypeHealed, At: ms(10000)})
		b := s.grab("b", 10, 10100, 2, 11000)
		s.give("b", b, 10200, 10300, OK)
	}},
	{name: "nothing goes on after a fault", rules: fenced, want: []Kind{Stuck}, tell: func(s *story) {
		s.add(Event{Type: TypeFault, At: ms(40), Why: "partition"})
		s.add(Event{Type: TypeHealed, At: ms(100)})
		s.call("a", OpTry, 200, 15000, Event{Outcome: Refused})
	}},
	{name: "a return without a call", rules: fenced, want: []Kind{Malformed}, tell: func(s *story) {
		s.add(Event{Type: TypeReturn, At: ms(40), Client: "a", ID: 7, Op: OpAcquire, Outcome: OK})
	}},
	{name: "two calls with one number", rules: fenced, want: []Kind{Malformed}, tell: func(s *story) {
		s.call("a", OpTry, 1, 2, Event{Outcome: Refused})
		s.last = 0
		s.call("a", OpTry, 3, -1, Event{})
	}},
	{name: "a release of nothing", rules: fenced, want: []Kind{Malformed}, tell: func(s *story) {
		s.give("a", 77, 1, 2, OK)
	}},
	{name: "a call that nobody knows", rules: fenced, want: []Kind{Malformed}, tell: func(s *story) {
		s.call("a", "lock", 1, 2, Event{Outcome: Refused})
	}},
	{name: "an outcome that nobody knows", rules: Rules{Fencing: true}, want: []Kind{Malformed}, tell: func(s *story) {
		s.call("a", OpTry, 1, 2, Event{Outcome: "granted", Token: 7})
	}},
	{name: "a kind that nobody knows", rules: Rules{Fencing: true}, want: []Kind{Malformed}, tell: func(s *story) {
		s.call("a", OpTry, 1, 2, Event{Outcome: OK, Token: 7, Kind: "write"})
	}},
	{name: "a kind that is not said is exclusive", rules: Rules{Fencing: true}, want: []Kind{Overlap},
		tell: func(s *story) {
			s.call("a", OpTry, 1, 4, Event{Outcome: OK, Token: 7})
			s.call("b", OpTry, 2, 5, Event{Outcome: OK, Token: 8})
		}},
	{name: "two grants are the last that is heard", rules: fenced, want: []Kind{Overlap, Illegal}, illegal: true,
		tell: func(s *story) {
			s.grab("a", 1, 5, 1, 1000)
			s.grab("b", 2, 5, 2, 1000)
		}},
	{name: "the second grant is the last that is heard", rules: fenced, want: []Kind{Early, Overlap}, illegal: true,
		tell: func(s *story) {
			s.grab("a", 1, 5, 1, 1000)
			s.grab("b", 6, 20, 2, 1000)
		}},
	{name: "the last grant is after the first belief", rules: fenced, tell: func(s *story) {
		a := s.grab("a", 1, 5, 1, 100)
		s.lost("a", a, 100, 100, backend.ReasonExpired)
		s.grab("b", 6, 120, 2, 1000)
	}},
}

func TestStories(t *testing.T) {
	for _, test := range stories {
		t.Run(strings.ReplaceAll(test.name, " ", "-"), func(t *testing.T) {
			s := tell()
			test.tell(s)
			p := Verify(t.Context(), s.history(), test.rules)
			var got []Kind
			for _, v := range p.Violations {
				if !slices.Contains(got, v.Kind) {
					got = append(got, v.Kind)
				}
			}
			slices.Sort(got)
			want := slices.Sorted(slices.Values(test.want))
			if !slices.Equal(got, want) {
				t.Errorf("found %q, want %q\n%s\nin\n%s", got, want, p.Text(), script(p.History))
			}
			if legal := searchAlone(p.History, test.rules); legal == test.illegal {
				t.Errorf("legal for the search: %v\n%s", legal, script(p.History))
			}
		})
	}
}

// searchAlone reports whether there is an order of all operations, without the scans.
func searchAlone(h History, rules Rules) bool {
	r := gather(h, rules)
	for _, n := range r.names {
		for _, q := range r.parts(n) {
			if porcupine.CheckOperationsTimeout(q.model(), q.ops, 10*time.Second) != porcupine.Ok {
				return false
			}
		}
	}
	return true
}

func script(h History) string {
	var lines []string
	for _, e := range h.Events {
		lines = append(lines, "    "+e.String())
	}
	return strings.Join(lines, "\n")
}

// TestParts compares the search in parts with one search of everything.
func TestParts(t *testing.T) {
	for _, test := range stories {
		s := tell()
		test.tell(s)
		r := gather(s.history(), test.rules)
		for _, n := range r.names {
			whole := &part{ops: r.operations(n), holds: n.holds, rules: r.rules}
			together := porcupine.CheckOperationsTimeout(whole.model(), whole.ops, 10*time.Second)
			if apart := searchAlone(s.history(), test.rules); (together == porcupine.Ok) != apart {
				t.Errorf("%s: legal in parts: %v, together: %v", test.name, apart, together)
			}
		}
	}
}

func TestFigures(t *testing.T) {
	s := tell()
	a := s.grab("a", 1, 5, 1, 100)
	b := s.grab("b", 10, 120, 2, 1000)
	s.lost("a", a, 130, 100, backend.ReasonExpired)
	s.give("b", b, 150, 160, OK)
	s.add(Event{Type: TypeFault, At: ms(200), Why: "partition"})
	s.add(Event{Type: TypeHealed, At: ms(300)})
	s.call("c", OpTry, 310, 320, Event{Outcome: Refused})
	s.call("c", OpAcquire, 310, 320, Event{Outcome: Unknown})
	c := s.grab("c", 330, 340, 3, 400)
	s.renewed("c", c, 370, 380, 450)
	s.lost("c", c, 450, 450, backend.ReasonExpired)
	d := s.grab("d", 440, 470, 4, 1000)
	s.give("d", d, 480, 490, OK)

	p := Verify(t.Context(), s.history(), fenced)
	if len(p.Violations) > 0 {
		t.Fatal(p.Text())
	}
	want := Figures{
		Operations: 8, Grants: 4, Refusals: 1, Unknowns: 1, Renewals: 1, Losses: 2, Faults: 1,
		Duration: 489 * time.Millisecond, NotifiedBefore: 1, NotifiedAfter: 1, Margin: 20 * time.Millisecond, Margins: 2,
		LateContext: 30 * time.Millisecond, Recovery: 40 * time.Millisecond, Recoveries: 1,
	}
	got := p.Figures
	got.Scans, got.Search, got.Searched, got.Idle = 0, 0, 0, 0
	if got != want {
		t.Errorf("got\n%+v, want\n%+v", got, want)
	}
	if p.Searched == 0 || p.Search == 0 {
		t.Errorf("nothing was searched: %+v", p.Figures)
	}
}

// TestUndecided checks that a search that does not end in time is a violation.
func TestUndecided(t *testing.T) {
	s := tell()
	for i := range 16 { // sixteen concurrent holds, with contradictory tokens at the end
		id := s.share(fmt.Sprint("c", i), 1+i, 100-i, fencing.Token(100-i), 1000)
		s.give(fmt.Sprint("c", i), id, 101+i, 200-i, OK)
	}
	s.grab("w", 1, 300, 50, 1000)
	begin := time.Now()
	rules := fenced
	rules.Timeout = 300 * time.Millisecond
	p := Verify(t.Context(), s.history(), rules)
	if p.Count(Undecided)+p.Count(Illegal) == 0 {
		t.Errorf("found %v in %v", p.Violations, time.Since(begin))
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if p := Verify(ctx, s.history(), fenced); p.Count(Undecided) == 0 {
		t.Errorf("found %v after the end of the context", p.Violations)
	}
	rules.Timeout = -1
	if p := Verify(t.Context(), s.history(), rules); len(p.Violations) != 0 || p.Searched != 0 {
		t.Errorf("found %v without a search", p.Violations)
	}
}

func TestDump(t *testing.T) {
	s := tell()
	a := s.grab("a", 1, 5, 1, 1000)
	b := s.grab("b", 10, 15, 2, 1000)
	s.give("a", a, 20, 30, OK)
	s.give("b", b, 50, 60, OK)
	rules := fenced
	rules.Seed = "FENCELOCK_SEED=42"
	rules.Found = []Violation{{Kind: Leftover, Text: "a key"}}
	p := Verify(t.Context(), s.history(), rules)
	if p.Violations[0].Kind != Leftover {
		t.Errorf("the caller's violation is missing: %v", p.Violations)
	}
	dir := filepath.Join(t.TempDir(), "new")
	if err := p.Dump(dir); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(filepath.Join(dir, "history.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h, err := ReadHistory(f)
	if err != nil {
		t.Fatal(err)
	}
	again := Verify(t.Context(), h, rules)
	if got, want := again.Text(), p.Text(); got != want {
		t.Errorf("what was read says\n%s\nwhat was written\n%s", got, want)
	}
	for file, text := range map[string]string{"report.txt": "FENCELOCK_SEED=42", "search-1.html": "acquire"} {
		b, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil || !strings.Contains(string(b), text) {
			t.Errorf("%s: %v, and does it contain %q?", file, err, text)
		}
	}
}
