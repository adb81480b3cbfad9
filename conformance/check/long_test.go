package check

import (
	"testing"
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// A long history is checked in a time that grows with its length, also where somebody always waits and some never come
// back.
func TestLongHistory(t *testing.T) {
	s := tell()
	const turns = 50_000
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
	begin := time.Now()
	p := Verify(t.Context(), s.history(), fenced)
	if len(p.Violations) > 0 || p.Grants != turns {
		t.Errorf("%v\n%s", p, p.Text())
	}
	if took := time.Since(begin); took > 30*time.Second {
		t.Errorf("%d turns took %v: %+v", turns, took, p.Figures)
	}
	t.Logf("scans %v, search %v over %d", p.Scans, p.Search, p.Searched)
}
