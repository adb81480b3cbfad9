package nemesis

import (
	"strings"
	"testing"
	"time"
)

// everything returns all kinds, for a service that supports them.
func everything() []Kind {
	all := matrix()
	for i := range all {
		all[i].needs = nil
	}
	return all
}

func TestSchedule(t *testing.T) {
	t.Parallel()
	const d, ttl = 10 * time.Minute, 2 * time.Second
	kinds := everything()
	print := func(seed uint64) string { return NewSchedule("driver", seed, d, ttl, kinds, 3, true).String() }
	if a, b := print(7), print(7); a != b {
		t.Errorf("one seed, two schedules:\n%s\n%s", a, b)
	}
	if a, b := print(7), print(8); strings.TrimPrefix(a, "schedule of seed 7") ==
		strings.TrimPrefix(b, "schedule of seed 8") {
		t.Error("two seeds, one schedule")
	}
	s := NewSchedule("driver", 7, d, ttl, kinds, 3, true)
	count, pairs := map[string]int{}, 0
	var last time.Duration
	bySlug := map[string]Kind{}
	for _, k := range kinds {
		bySlug[k.Slug] = k
	}
	for _, step := range s.Steps {
		if step.At <= last || step.At >= d {
			t.Errorf("%v begins at %v, after %v", step, step.At, last)
		}
		last = step.At
		servers := 0
		for _, draw := range step.Draws {
			k := bySlug[draw.Kind]
			count[draw.Kind]++
			if k.where == onNode || k.where == onPeers {
				servers++
			}
			if low, high := float64(draw.Length), float64(ttl); low < k.least*high-1e6 || low > k.most*high+1e6 {
				t.Errorf("%v lasts %v, want %v to %v TTLs", draw, draw.Length, k.least, k.most)
			}
			if k.alone && len(step.Draws) > 1 {
				t.Errorf("%v is not alone", step)
			}
		}
		if len(step.Draws) > 1 {
			pairs++
		}
		if servers > 1 {
			t.Errorf("%v hits %d of 3 nodes", step, servers)
		}
	}
	fewest, most := 1<<30, 0
	for _, k := range kinds {
		fewest, most = min(fewest, count[k.Slug]), max(most, count[k.Slug])
	}
	if fewest == 0 || most-fewest > 2 {
		t.Errorf("kinds come %d to %d times: %v", fewest, most, count)
	}
	if pairs == 0 || pairs > len(s.Steps)/2 {
		t.Errorf("%d of %d steps are pairs", pairs, len(s.Steps))
	}
	t.Logf("%d steps, %d pairs", len(s.Steps), pairs)
}

func TestScheduleOneByOne(t *testing.T) {
	t.Parallel()
	for _, step := range NewSchedule("driver", 1, time.Hour, time.Second, everything(), 5, false).Steps {
		if len(step.Draws) != 1 {
			t.Fatalf("%v", step)
		}
	}
	if s := NewSchedule("driver", 1, time.Hour, time.Second, nil, 1, true); len(s.Steps) != 0 {
		t.Errorf("%v of nothing", s)
	}
}
