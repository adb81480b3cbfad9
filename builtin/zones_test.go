package builtin_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/testtier"
)

// TestZones measures cycles of 64 callers, each with its own name, while a message between members takes 5 or 10 ms,
// and then the recovery after the leader's process is killed, several times. It prints the figures.
func TestZones(t *testing.T) {
	testtier.Only(t)
	for _, away := range []time.Duration{0, 5 * time.Millisecond, 10 * time.Millisecond} {
		t.Run(away.String(), func(t *testing.T) {
			p := startProcesses(t, 3)
			p.apart(away)
			within(t, func(ctx context.Context) error { return p.caughtUp(ctx, 0) })
			all, took := cycles(t, p.addrs(), 64, 10*time.Second)
			p50 := all.took(0.5)
			t.Logf("zones: %v from member to member, 64 callers: %.0f cycles/s, a cycle takes %v (p50), %v (p99)", away,
				float64(len(all))/took.Seconds(), p50.Round(100*time.Microsecond), all.took(0.99).Round(100*time.Microsecond))
			if p50 < 4*away { // two commits, each of one round trip
				t.Errorf("a cycle takes %v: less than the way", p50)
			}
			var slowest, sum time.Duration
			const rounds = 10
			for range rounds {
				took := p.recovery(t)
				slowest, sum = max(slowest, took), sum+took
			}
			t.Logf("zones: %v from member to member, the leader is killed %d times: the next lock after %v on average, %v at most",
				away, rounds, (sum / rounds).Round(time.Millisecond), slowest.Round(time.Millisecond))
		})
	}
}

// apart sets the delay of a message from one member to another.
func (p *processes) apart(d time.Duration) {
	for _, row := range p.paths {
		for _, path := range row {
			if path != nil {
				path.Delay(fault.Both, d)
			}
		}
	}
}

// cycles lets callers acquire and release one name each, for the given time, and returns all cycles and the total
// time.
func cycles(t *testing.T, addrs []string, callers int, length time.Duration) (all askedAll, took time.Duration) {
	t.Helper()
	drivers := make([]*builtin.Driver, 4)
	for i := range drivers {
		drivers[i] = builtin.New(addrs, nil)
		within(t, drivers[i].Ping)
		defer drivers[i].Close(context.Background())
	}
	var over atomic.Bool
	done := make(chan askedAll, callers)
	began := time.Now()
	for i := range callers {
		go func() {
			var own askedAll
			for !over.Load() {
				left := &atomic.Int64{}
				left.Store(1)
				at := time.Now()
				err := churn(context.Background(), drivers[i%len(drivers)], fmt.Sprint("zones/", i), left)
				own = append(own, asked{at, time.Since(at), err})
			}
			done <- own
		}()
	}
	time.Sleep(length)
	over.Store(true)
	for range callers {
		all = append(all, <-done...)
	}
	for _, a := range all {
		if a.err != nil {
			t.Fatal(a.err)
		}
	}
	return all, time.Since(began)
}

// recovery kills the leader and returns how long an existing client waits for its next lock. Before it returns, all
// members work again.
func (p *processes) recovery(t *testing.T) time.Duration {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	d := builtin.New(p.addrs(), nil)
	defer d.Close(context.Background())
	giveBack(t, d, take(t, d, request("before", time.Minute)))
	leader, _, err := p.lead(ctx, 0)
	if err == nil {
		err = p.kill(ctx, leader)
	}
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	g, err := d.Acquire(ctx, request("after", time.Minute))
	took := time.Since(began)
	if err != nil {
		t.Fatal(err)
	}
	giveBack(t, d, g)
	if err := p.start(ctx, leader); err != nil {
		t.Fatal(err)
	}
	if err := p.caughtUp(ctx, leader); err != nil {
		t.Fatal(err)
	}
	return took
}
