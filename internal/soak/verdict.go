// Package soak breaks the bundled server as operators and machines do, and judges what its clients saw by a checker that
// shares no code with package conformance/check: what one of the two overlooks, the other one may see. TestServer is
// the run: members in network namespaces, disks that fail, upgrades, members that come and go, and the mistakes that
// docs/SERVER.md describes. `make soak-server` runs it for ten minutes with a new seed.
package soak

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// Clients write their events, one on a line, with the time in nanoseconds of one monotonic clock:
//
//	TIME want LINE NAME          a line of a client asks for a name
//	TIME got LINE NAME TOKEN     it believes from here on that it holds the name
//	TIME end LINE NAME TOKEN     it believes so no more: it is about to release, or the hold is lost
//	TIME dead LINE               the process of the line was killed
//
// A register is the file that the holders of a name wrote under a guard: lines of TOKEN VALUE, where VALUE is one more
// than the last value at the beginning of the holder's section.

// hold is one belief.
type hold struct {
	name            string
	token           uint64
	want, from, end int64
}

// history is all that was seen.
type history struct {
	holds []hold
	open  map[string]int   // by line: an index of holds, while it is not ended
	asked map[string]int64 // by line
}

// read adds the events of one client.
func (h *history) read(r io.Reader) error {
	if h.open == nil {
		h.open, h.asked = map[string]int{}, map[string]int64{}
	}
	for lines := bufio.NewScanner(r); ; {
		if !lines.Scan() {
			return lines.Err()
		}
		var at int64
		var token uint64
		var what, line, name string
		n, _ := fmt.Sscan(lines.Text(), &at, &what, &line, &name, &token)
		last, open := h.open[line]
		switch {
		case what == "want" && n == 4 && !open:
			h.asked[line] = at
		case what == "got" && n == 5 && !open && h.asked[line] > 0:
			h.open[line] = len(h.holds)
			h.holds = append(h.holds, hold{name, token, h.asked[line], at, math.MaxInt64})
		case what == "end" && n == 5 && open && h.holds[last].name == name && h.holds[last].token == token:
			h.holds[last].end = at
			delete(h.open, line)
		case what == "dead" && n == 3:
			if open {
				h.holds[last].end = at
				delete(h.open, line)
			}
		default:
			return fmt.Errorf("%q makes no sense here", lines.Text())
		}
	}
}

// violations are all that no lock service may show.
func (h *history) violations() (found []string) {
	say := func(format string, args ...any) { found = append(found, fmt.Sprintf(format, args...)) }
	byName := map[string][]hold{}
	tokens := map[uint64]hold{}
	for _, x := range h.holds {
		byName[x.name] = append(byName[x.name], x)
		if other, twice := tokens[x.token]; twice {
			say("token %d was issued for %s and for %s", x.token, other.name, x.name)
		}
		tokens[x.token] = x
	}
	for name, all := range byName {
		slices.SortFunc(all, func(a, b hold) int { return cmp.Compare(a.from, b.from) })
		for i := 1; i < len(all); i++ {
			if before := all[i-1]; all[i].from < before.end {
				say("%s: tokens %d and %d were held at one time, for %d ns", name, before.token, all[i].token,
					min(before.end, all[i].end)-all[i].from)
			}
		}
	}
	// A token that was there before another one was asked for is smaller.
	byWant, byFrom := slices.Clone(h.holds), slices.Clone(h.holds)
	slices.SortFunc(byWant, func(a, b hold) int { return cmp.Compare(a.want, b.want) })
	slices.SortFunc(byFrom, func(a, b hold) int { return cmp.Compare(a.from, b.from) })
	greatest, next := uint64(0), 0
	for _, x := range byWant {
		for ; next < len(byFrom) && byFrom[next].from < x.want; next++ {
			greatest = max(greatest, byFrom[next].token)
		}
		if x.token <= greatest {
			say("%s: token %d came after token %d", x.name, x.token, greatest)
		}
	}
	slices.Sort(found)
	return found
}

// register judges the writes under a guard: that no write was lost, repeated or stale.
func (h *history) register(name string, r io.Reader) (found []string, err error) {
	granted := map[uint64]bool{}
	for _, x := range h.holds {
		if x.name == name {
			granted[x.token] = true
		}
	}
	want, last := uint64(0), uint64(0)
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		var token, value uint64
		if _, err := fmt.Sscan(lines.Text(), &token, &value); err != nil {
			return nil, fmt.Errorf("%s: %q: %w", name, lines.Text(), err)
		}
		want++
		switch {
		case value != want:
			found = append(found, fmt.Sprintf("%s: token %d wrote %d after %d", name, token, value, want-1))
			want = value
		case token < last:
			found = append(found, fmt.Sprintf("%s: token %d wrote after token %d", name, token, last))
		case !granted[token]:
			found = append(found, fmt.Sprintf("%s: token %d wrote, and nobody got it", name, token))
		}
		last = token
	}
	return found, lines.Err()
}

// longest returns the longest time without a grant, in nanoseconds, between the first grant and the last.
func (h *history) longest() (gap int64) {
	var times []int64
	for _, x := range h.holds {
		times = append(times, x.from)
	}
	slices.Sort(times)
	for i := 1; i < len(times); i++ {
		gap = max(gap, times[i]-times[i-1])
	}
	return gap
}

// names returns the names with an event after a time.
func (h *history) names(after int64) string {
	var all []string
	for _, x := range h.holds {
		if x.from > after {
			all = append(all, x.name)
		}
	}
	slices.Sort(all)
	return strings.Join(slices.Compact(all), " ")
}
