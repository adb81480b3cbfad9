package check

import (
	"testing"
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// A long history is checked in a time that grows with its length, even if a client always waits and some clients
// never release. In quadratic time, ten times the length would take a hundred times as long.
func TestLongHistory(t *testing.T) {
	const turns, longer = 5_000, 10
	var short, long time.Duration
	for range 3 { // the machine may stall
		short, long = took(t, turns), took(t, longer*turns)
		if long < 4*longer*short {
			return
		}
	}
	t.Errorf("%d turns took %v, and %d times as many %v", turns, short, longer, long)
}

// took checks a history of that many turns and returns the time that it took.
func took(t *testing.T, turns int) time.Duration {
	s := tell()
	for i := range turns {
		from, at := max(0, 10*i-25), 10*i // three wait at any time
		who := string(rune('a' + i%4))
		switch id := s.grab(who, from+1, at+2, fencing.Token(i+1), at+9); i % 100 {
		case 17: // never released: it expires
		case 31:
			s.give(who, id, at+6, at+30, Unknown)
		default:
			s.give(who, id, at+6, at+8, OK)
		}
		if i%20 == 0 {
			s.ask("z", at+3, at+4, fencing.Token(i+1))
		}
	}
	rules := fenced
	rules.Timeout = 10 * time.Minute
	h, begin := s.history(), time.Now()
	p := Verify(t.Context(), h, rules)
	end := time.Since(begin)
	if len(p.Violations) > 0 || p.Grants != turns {
		t.Errorf("%v\n%s", p, p.Text())
	}
	t.Logf("%d turns: scans %v, search %v over %d", turns, p.Scans, p.Search, p.Searched)
	return end
}
