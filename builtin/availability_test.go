package builtin_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/conformance/cluster"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/internal/testtier"
)

const (
	// availabilityEnv names the variable with the duration of TestAvailability, which injects a fault in each faultEvery.
	availabilityEnv = "FENCELOCK_AVAILABILITY"
	faultEvery      = time.Minute
	// inTime is the maximum duration of a call that counts as served.
	inTime = 5 * time.Second
)

// TestAvailability keeps asking for free names while a random fault breaks the cluster once a minute. It prints the
// share of calls that got their lock in time, and the longest time without any grant.
func TestAvailability(t *testing.T) {
	testtier.Only(t)
	length := 3 * time.Minute
	if text := os.Getenv(availabilityEnv); text != "" {
		var err error
		if length, err = time.ParseDuration(text); err != nil || length < faultEvery {
			t.Fatalf("%s=%q: want a duration of %v or more", availabilityEnv, text, faultEvery)
		}
	}
	p := startProcesses(t, 3)
	calls := askAlways(t, p.addrs(), 50)
	window := stallmeter.Begin()
	began := time.Now()
	var faults []struck
	for n := 0; time.Duration(n) < length/faultEvery; n++ {
		half := faultEvery / 2 // the other half is for the aftermath of the fault
		time.Sleep(time.Until(began.Add(time.Duration(n)*faultEvery + rand.N(half))))
		faults = append(faults, p.strike(t))
	}
	time.Sleep(time.Until(began.Add(length)))
	lost := window.End()
	all := calls()
	all.print(t, length, lost, faults)
	gap, _ := all.longestGap(time.Time{}, time.Now())
	if gap > 20*time.Second && !lost.Matters(5*time.Second, length) {
		t.Errorf("for %v nobody had a lock", gap)
	}
	if share := all.served(); share < 0.95 && !lost.Matters(5*time.Second, length) {
		t.Errorf("%.2f %% of the calls had their lock within %v", 100*share, inTime)
	}
}

// struck is a fault that was injected.
type struck struct {
	slug       string
	began, end time.Time
}

// strike injects a random fault for a random time, heals it, and waits until all members work again.
func (p *processes) strike(t *testing.T) struck {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	leader, _, err := p.lead(ctx, 0)
	must(err)
	hit, who := leader, "leader"
	if rand.N(3) == 0 {
		hit, who = (leader+1+rand.N(2))%3, "follower"
	}
	m := p.machines()
	kinds := []struct {
		slug       string
		begin, end func() error
	}{
		{"kill", func() error { return p.kill(ctx, hit) }, func() error { return p.start(ctx, hit) }},
		{"pause", func() error { return p.pause(ctx, hit) }, func() error { return p.resume(ctx, hit) }},
		{"restart", func() error { return p.leave(ctx, hit) }, func() error { return p.start(ctx, hit) }},
		{"partition", func() error { p.isolate(hit); return nil }, func() error { p.heal(); return nil }},
		{"stuck disk", func() error { return m.Disk(ctx, hit, cluster.DiskStuck) },
			func() error { return m.Disk(ctx, hit, cluster.DiskWorks) }},
	}
	kind := kinds[rand.N(len(kinds))]
	f := struck{slug: who + " " + kind.slug, began: time.Now()}
	must(kind.begin())
	time.Sleep(time.Second + rand.N(9*time.Second))
	must(kind.end())
	must(p.caughtUp(ctx, hit))
	f.end = time.Now()
	t.Logf("%v: %s for %v", f.began.Format(time.TimeOnly), f.slug, f.end.Sub(f.began).Round(time.Millisecond))
	return f
}

// leave ends a member as an operator does, and waits for its end.
func (p *processes) leave(ctx context.Context, i int) error {
	c := p.child(i)
	process, err := os.FindProcess(c.Pid())
	if err != nil {
		return err
	}
	if err := process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	for c.Running() {
		if err := moment(ctx); err != nil {
			return fmt.Errorf("member %d does not end: %w", i, err)
		}
	}
	return nil
}

// isolate cuts a member off from all others, both ways.
func (p *processes) isolate(i int) {
	for other := range p.members {
		if other != i {
			p.cut(i, other)
			p.cut(other, i)
		}
	}
}

// asked is one call for a free name.
type asked struct {
	began time.Time
	took  time.Duration
	err   error
}

type askedAll []asked

// askAlways asks for rate free names a second, without waiting for earlier calls. The function end stops the calls and
// returns them.
func askAlways(t *testing.T, addrs []string, rate int) (end func() askedAll) {
	drivers := make([]*builtin.Driver, 4)
	for i := range drivers {
		d := builtin.New(addrs, nil)
		within(t, d.Ping)
		t.Cleanup(func() { _ = d.Close(context.Background()) })
		drivers[i] = d
	}
	var (
		mu      sync.Mutex
		all     askedAll
		running sync.WaitGroup
	)
	stop := make(chan struct{})
	ask := func(d *builtin.Driver, n int) {
		r := backend.Request{
			Name: fmt.Sprint("free/", n), Owner: "availability", RequestID: backend.NewRequestID(), TTL: 10 * time.Second, Fresh: true,
		}
		began := time.Now()
		ctx, cancel := context.WithTimeout(context.Background(), inTime)
		g, err := d.Acquire(ctx, r)
		cancel()
		mu.Lock()
		all = append(all, asked{began, time.Since(began), err})
		mu.Unlock()
		if err != nil {
			g = r.Grant()
		}
		ctx, cancel = context.WithTimeout(context.Background(), patience)
		defer cancel()
		if release := d.Release(ctx, g); release != nil && (err == nil || !errors.Is(release, backend.ErrNotHeld)) {
			t.Errorf("release of %s: %v", r.Name, release)
		}
	}
	running.Go(func() {
		tick := time.NewTicker(time.Second / time.Duration(rate))
		defer tick.Stop()
		for n := 0; ; n++ {
			select {
			case <-tick.C:
				running.Go(func() { ask(drivers[n%len(drivers)], n) })
			case <-stop:
				return
			}
		}
	})
	return func() askedAll {
		close(stop)
		running.Wait()
		return all
	}
}

// served returns the share of calls that got their lock in time.
func (all askedAll) served() float64 {
	n := 0
	for _, a := range all {
		if a.err == nil && a.took <= inTime {
			n++
		}
	}
	return float64(n) / float64(len(all))
}

// longestGap returns the longest gap between grants that begins between from and to, and the sum of all gaps longer
// than half a second.
func (all askedAll) longestGap(from, to time.Time) (longest, together time.Duration) {
	var grants []time.Time
	for _, a := range all {
		if at := a.began.Add(a.took); a.err == nil && at.After(from) {
			grants = append(grants, at)
		}
	}
	slices.SortFunc(grants, time.Time.Compare)
	for i := 1; i < len(grants) && grants[i-1].Before(to); i++ {
		gap := grants[i].Sub(grants[i-1])
		longest = max(longest, gap)
		if gap > time.Second/2 {
			together += gap
		}
	}
	return longest, together
}

// took returns the time within which the given share of the calls returned.
func (all askedAll) took(share float64) time.Duration {
	times := make([]time.Duration, len(all))
	for i, a := range all {
		times[i] = a.took
	}
	slices.Sort(times)
	return times[min(int(share*float64(len(times))), len(times)-1)]
}

func (all askedAll) print(t *testing.T, length time.Duration, lost stallmeter.Lost, faults []struck) {
	worst := map[string]time.Duration{}
	count := map[string]int{}
	for i, f := range faults {
		to := f.began.Add(faultEvery)
		if i+1 < len(faults) {
			to = faults[i+1].began
		}
		gap, _ := all.longestGap(f.began, to)
		worst[f.slug] = max(worst[f.slug], gap)
		count[f.slug]++
	}
	var kinds []string
	for slug, gap := range worst {
		kinds = append(kinds, fmt.Sprintf("%s %d times, gap at most %v", slug, count[slug], gap.Round(10*time.Millisecond)))
	}
	slices.Sort(kinds)
	longest, together := all.longestGap(time.Time{}, time.Now())
	ms := time.Millisecond
	t.Logf("availability: %v, %d faults, %d calls, %.4f %% with their lock within %v; p50 %v, p99 %v, p99.9 %v; "+
		"longest gap %v, gaps of more than 0.5 s together %v; the machine lost %v\n%s",
		length, len(faults), len(all), 100*all.served(), inTime, all.took(0.5).Round(ms/10), all.took(0.99).Round(ms), all.took(0.999).Round(ms),
		longest.Round(ms), together.Round(ms), lost, strings.Join(kinds, "\n"))
}
