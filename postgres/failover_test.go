package postgres_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/check"
	"github.com/fencelock/fencelock/internal/testfindings"
	"github.com/fencelock/fencelock/internal/testtier"
	"github.com/fencelock/fencelock/postgres"
)

// forgetting has the violations that the loss of the last commits causes: a holder gets a loss, or a rival is granted
// beside it.
var forgetting = []check.Kind{check.EarlyLoss, check.Early, check.Overlap, check.Illegal}

// TestFailoversUnderLoad kills the primary under contending clients, and promotes the standby: twenty times each with
// a standby that lacks at most the last moment, with a lagging standby, and with a standby for which every commit
// waits. Tokens always increase. With the last kind, holds never overlap; for the others the test prints the number of
// overlaps.
func TestFailoversUnderLoad(t *testing.T) {
	testtier.Only(t)
	const rounds = 20
	for kind, f := range map[string]struct{ quorum, lags bool }{
		"quorum": {quorum: true}, "asynchronous": {}, "asynchronous and lagging": {lags: true},
	} {
		t.Run(kind, func(t *testing.T) {
			var grants, losses, doubled, disorder int
			others := map[check.Kind]int{}
			var overrun time.Duration
			for range rounds {
				r := failover(t, f.quorum, f.lags)
				grants, losses, doubled = grants+r.Grants, losses+r.Losses, doubled+r.Doubled
				overrun = max(overrun, r.Overrun)
				for _, v := range r.Violations {
					tokens := v.Kind == check.TokenOrder || v.Kind == check.TokenTwice || v.Kind == check.TokenMark
					if tokens {
						disorder++
					} else {
						others[v.Kind]++
					}
					if f.quorum || !slices.Contains(forgetting, v.Kind) {
						t.Errorf("%v", v)
					} else {
						t.Logf("what a failover without a quorum may do: %v", v)
					}
				}
			}
			t.Logf("%s: %d failovers, %d grants, %d losses, %d tokens out of order, %d holders beside whom somebody else was granted "+
				"(for %v at most), violations but those of tokens: %v", kind, rounds, grants, losses, disorder, doubled,
				overrun.Round(time.Millisecond), others)
			testfindings.Write(t, testfindings.Failover{
				Standby: kind, Rounds: rounds, Grants: grants, Losses: losses, Disorder: disorder,
				Doubled: doubled, Overrun: overrun,
			})
		})
	}
}

// failover is one round: clients contend before, during and after it.
func failover(t *testing.T, quorum, lags bool) check.Report {
	const ttl = 3 * time.Second
	primary, standby := pair(t, quorum)
	migrate(t, newPool(t, primary.URL()))
	primary.replicated() // the standby may lack locks, but not the schema
	recorder := check.NewRecorder(check.Options{})
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var work sync.WaitGroup
	var clients []*fencelock.Client
	var mu sync.Mutex
	granted := 0
	var last error // of an acquire
	for i := range 4 {
		d := postgres.New(newPool(t, both(primary, standby)), nil)
		c, err := fencelock.ForCorrectness(d, &fencelock.Options{TTL: ttl, AcceptAsyncReplica: true})
		if err != nil {
			t.Fatal(err)
		}
		clients = append(clients, c)
		locks := recorder.Wrap(fmt.Sprintf("client-%d", i), c)
		for _, name := range []string{"a", "b", "c"} {
			work.Go(func() {
				for ctx.Err() == nil {
					bounded, cancel := context.WithTimeout(ctx, ttl)
					held, err := locks.Acquire(bounded, name)
					cancel()
					if err != nil {
						mu.Lock()
						last = err
						mu.Unlock()
						sleepFor(ctx, rand.N(20*time.Millisecond))
						continue
					}
					mu.Lock()
					granted++
					mu.Unlock()
					length := rand.N(20 * time.Millisecond)
					if rand.N(10) == 0 {
						length = rand.N(ttl) // the time from before to after the failover
					}
					select {
					case <-time.After(length):
					case <-held.Lease().Context().Done():
					}
					bounded, cancel = context.WithTimeout(context.WithoutCancel(ctx), ttl)
					_ = held.Release(bounded)
					cancel()
				}
			})
		}
	}
	more := func(n int, when string) {
		t.Helper()
		mu.Lock()
		want := granted + n
		mu.Unlock()
		for until := soon(t, time.Minute); ; sleepFor(until, 10*time.Millisecond) {
			mu.Lock()
			enough, last := granted >= want, last
			mu.Unlock()
			switch {
			case enough:
				return
			case until.Err() != nil:
				t.Fatalf("%s: nobody is granted anything: %v", when, last)
			}
		}
	}
	more(20, "before the failover")
	if lags {
		standby.kill()
		more(20, "without a standby")
	}
	recorder.Fault("the primary is killed")
	primary.kill()
	if lags {
		standby.start()
	}
	standby.promote()
	if quorum {
		standby.set("") // without a standby it would wait for one indefinitely
	}
	recorder.Healed("the standby is primary")
	more(20, "after the failover")
	stop()
	work.Wait()
	for _, c := range clients {
		bounded, cancel := context.WithTimeout(context.Background(), 15*time.Second)
		_ = c.Close(bounded)
		cancel()
	}
	standby.kill()
	return check.Verify(context.Background(), recorder.History(), check.Rules{Fencing: true, TTL: ttl})
}

func sleepFor(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
