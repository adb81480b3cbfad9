package nemesis

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"strings"
	"time"
)

// Schedule is the list of a run's faults with their times. It is a pure function of a Plan and of the possible faults
// of the service: two runs with one seed have the same schedule. A target such as the leader, or a client that holds,
// is looked up when the fault strikes.
type Schedule struct {
	Seed  uint64
	Steps []Step
}

// Step is one fault, or two simultaneous faults.
type Step struct {
	// At is the beginning of the step, from the beginning of the run. If earlier steps take longer, it begins after
	// them.
	At    time.Duration
	Draws []Draw
}

// Draw is one fault with all of its random choices.
type Draw struct {
	Kind    string        // the slug of a Kind
	After   time.Duration // from the beginning of the step
	Length  time.Duration // the minimum duration; a fault with an awaited effect may last longer
	Target  uint32        // which of the possible targets, by remainder
	Name    uint32        // which name a client holds across it, by remainder
	Variant uint32        // which variant of the kind, by remainder
}

// The pace of a schedule, in TTLs: the time without faults before a step, and the expected time of recovery.
const (
	gapMost      = 0.75
	recoverySpan = 0.75
)

// NewSchedule draws from kinds until d is over. It repeats a kind only after all other kinds. With pairs, about every
// third step has two faults, never on more nodes than a minority. The draws also depend on the name of the driver and
// on the order of kinds, so that one seed gives other faults for other drivers.
func NewSchedule(driver string, seed uint64, d, ttl time.Duration, kinds []Kind, nodes int, pairs bool) Schedule {
	s := Schedule{Seed: seed}
	if len(kinds) == 0 {
		return s
	}
	of := fnv.New64a()
	fmt.Fprint(of, driver, nodes, len(kinds))
	r := rand.New(rand.NewPCG(seed, of.Sum64()))
	var deck []Kind
	next := func(fits func(Kind) bool) (Kind, bool) {
		if len(deck) == 0 {
			deck = append(deck, kinds...)
			r.Shuffle(len(deck), func(i, j int) { deck[i], deck[j] = deck[j], deck[i] })
		}
		for i, k := range deck {
			if fits(k) {
				deck = append(deck[:i:i], deck[i+1:]...)
				return k, true
			}
		}
		return Kind{}, false
	}
	for at := fraction(r, ttl, 0.25, gapMost); at < d; {
		first, _ := next(func(Kind) bool { return true })
		step := Step{At: at, Draws: []Draw{newDraw(r, first, ttl)}}
		if r.IntN(3) == 0 && pairs {
			if second, ok := next(func(k Kind) bool { return together(first, k, nodes) }); ok {
				draw := newDraw(r, second, ttl)
				draw.After = fraction(r, step.Draws[0].Length, 0, 0.75)
				step.Draws = append(step.Draws, draw)
			}
		}
		s.Steps = append(s.Steps, step)
		at += step.length() + fraction(r, ttl, recoverySpan, recoverySpan+gapMost)
	}
	return s
}

func newDraw(r *rand.Rand, k Kind, ttl time.Duration) Draw {
	return Draw{
		Kind: k.Slug, Length: fraction(r, ttl, k.least, k.most),
		Target: r.Uint32N(1000), Name: r.Uint32N(1000), Variant: r.Uint32N(1000),
	}
}

// fraction draws between least and most times d, in whole milliseconds, for readers of the schedule.
func fraction(r *rand.Rand, d time.Duration, least, most float64) time.Duration {
	return time.Duration(float64(d) * (least + (most-least)*r.Float64())).Round(time.Millisecond)
}

// together reports whether two kinds may strike at once: different clients, or clients and servers, or two servers if
// they are a minority.
func together(a, b Kind, nodes int) bool {
	if a.alone || b.alone || a.Slug == b.Slug {
		return false
	}
	return a.where == onClient || b.where == onClient || nodes >= 5 && a.where == onNode && b.where == onNode
}

func (s Step) length() (longest time.Duration) {
	for _, d := range s.Draws {
		longest = max(longest, d.After+d.Length)
	}
	return longest
}

// String returns one line for each step. Equal schedules have equal lines.
func (s Schedule) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "schedule of seed %d: %d steps", s.Seed, len(s.Steps))
	for i, step := range s.Steps {
		fmt.Fprintf(&b, "\n%4d  at %8.3fs  %v", i, step.At.Seconds(), step)
	}
	return b.String()
}

func (s Step) String() string {
	var all []string
	for _, d := range s.Draws {
		all = append(all, d.String())
	}
	return strings.Join(all, "  and ")
}

func (d Draw) String() string {
	after := ""
	if d.After > 0 {
		after = fmt.Sprintf(" after %.3fs", d.After.Seconds())
	}
	return fmt.Sprintf("%-18s for %.3fs%s, target %d, name %d, variant %d",
		d.Kind, d.Length.Seconds(), after, d.Target, d.Name, d.Variant)
}
