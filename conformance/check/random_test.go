package check

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/internal/race"
	"github.com/fencelock/fencelock/internal/testtier"
)

// randomly plays for a minute of simulated time: clients take, hold and release names of all kinds, while links and the
// service break.
func randomly(seed uint64) func(*world) {
	return func(w *world) {
		random := rand.New(rand.NewPCG(seed, 0))
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		for _, c := range w.clients {
			for lane := range 2 {
				own := rand.New(rand.NewPCG(random.Uint64(), uint64(lane)))
				w.work.Go(func() { w.contend(ctx, own, c) })
			}
		}
		for ctx.Err() == nil {
			pause(ctx, upTo(random, 2*w.ttl))
			w.trouble(ctx, random)
		}
		w.work.Wait()
	}
}

// contend performs random operations until ctx ends.
func (w *world) contend(ctx context.Context, random *rand.Rand, c *client) {
	for ctx.Err() == nil {
		pause(ctx, upTo(random, 50*time.Millisecond))
		name, opts := "x", []fencelock.AcquireOption(nil)
		switch random.IntN(4) {
		case 0:
			opts = append(opts, fencelock.Shared())
		case 1:
			name, opts = "p", append(opts, fencelock.Permits(1+random.IntN(3), 3))
		case 2:
			name = "y"
		}
		if random.IntN(8) == 0 {
			opts = append(opts, fencelock.NoRenew())
		}
		wait, cancel := context.WithTimeout(ctx, upTo(random, 3*w.ttl))
		var h *Held
		var err error
		if random.IntN(4) == 0 {
			h, err = c.TryAcquire(wait, name, opts...)
		} else {
			h, err = c.Acquire(wait, name, opts...)
		}
		cancel()
		if err != nil {
			continue
		}
		length := upTo(random, 100*time.Millisecond)
		if random.IntN(10) == 0 {
			length = upTo(random, 2*w.ttl)
		}
		pause(h.Lease().Context(), length)
		if random.IntN(10) == 0 {
			h.Renewed()
			w.ask(c, name)
		}
		_ = release(h, upTo(random, w.ttl))
	}
}

// trouble causes a random fault for a while, and marks its end.
func (w *world) trouble(ctx context.Context, random *rand.Rand) {
	c := w.clients[random.IntN(len(w.clients))]
	direction := []memory.Direction{memory.Requests, memory.Replies, memory.Both}[random.IntN(3)]
	length := upTo(random, 2*w.ttl)
	switch random.IntN(7) {
	case 0:
		w.r.Fault("a link drops")
		c.link().Drop(direction)
	case 1:
		w.r.Fault("a link holds")
		c.link().Hold(direction)
	case 2:
		w.r.Fault("a link refuses")
		c.link().Refuse()
	case 3:
		w.r.Fault("a link is slow")
		c.link().Delay(direction, upTo(random, w.ttl/12))
	case 4:
		w.r.Fault("the service restarts")
		w.store.Restart()
		length = 0
	case 5:
		w.r.Fault("the service stands still")
		w.store.Pause()
		pause(ctx, length)
		w.store.Resume()
		length = 0
	case 6:
		w.r.Fault("a lock is taken away")
		w.force([]string{"x", "y", "p"}[random.IntN(3)])
		length = 0
	}
	pause(ctx, length)
	c.link().Reset()
	w.heal(c)
	w.r.Healed("")
}

func upTo(random *rand.Rand, d time.Duration) time.Duration {
	return time.Duration(1 + random.Int64N(int64(d)))
}

func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

var randomRules = Rules{Fencing: true, Patience: time.Second, Recovery: 10 * time.Second}

// TestRandom plays with the correct service, once for each seed. FENCELOCK_SEED plays one seed and prints the whole
// history.
func TestRandom(t *testing.T) {
	seeds := uint64(50)
	switch {
	case testing.Short() || race.Enabled:
		seeds = 20
	case testtier.Wanted():
		seeds = 400
	}
	first := uint64(0)
	only := os.Getenv("FENCELOCK_SEED")
	if only != "" {
		n, err := strconv.ParseUint(only, 0, 64)
		if err != nil {
			t.Fatal(err)
		}
		first, seeds = n, 1
	}
	var all Figures
	for seed := first; seed < first+seeds; seed++ {
		h := simulate(t, 4, nil, randomly(seed))
		p := Verify(t.Context(), h, randomRules)
		all.Operations += p.Operations
		all.Grants += p.Grants
		all.Losses += p.Losses
		all.Unknowns += p.Unknowns
		all.Faults += p.Faults
		all.Searched += p.Searched
		all.Scans += p.Scans
		all.Search += p.Search
		all.Duration += p.Duration
		if only != "" {
			t.Logf("%v\n%s", p, script(h))
		}
		if len(p.Violations) > 0 {
			dir := t.ArtifactDir()
			_ = p.Dump(dir)
			t.Errorf("FENCELOCK_SEED=%d go test -run TestRandom ./conformance/check: %v\n%s\nsee %s with -artifacts",
				seed, p, p.Text(), dir)
			break
		}
	}
	t.Logf("%d seeds, %v of simulated time: %d operations, %d grants, %d losses, %d of unknown outcome, %d faults; scans %v, search %v over %d",
		seeds, all.Duration, all.Operations, all.Grants, all.Losses, all.Unknowns, all.Faults, all.Scans,
		all.Search, all.Searched)
	if only == "" && (all.Grants < int(seeds)*100 || all.Losses < int(seeds) || all.Faults < int(seeds)*5) {
		t.Errorf("too little happened to tell anything: %+v", all)
	}
}

// TestRandomMutants logs how many random plays catch each mutant. It tests the checkers, which must always decide.
// TestMutants tests the mutants, since chance does not catch all of them.
func TestRandomMutants(t *testing.T) {
	const seeds = 2
	some := mutants
	if testing.Short() || race.Enabled { // it is slow, and decides nothing beyond TestMutants
		some = mutants[:3]
	}
	var rows []string
	for _, m := range some {
		caught, kinds := 0, map[Kind]int{}
		for seed := range uint64(seeds) {
			p := Verify(t.Context(), simulate(t, 4, m.apply, randomly(seed)), randomRules)
			if len(p.Violations) > 0 {
				caught++
			}
			for _, k := range kindsOf(p) {
				kinds[k]++
			}
			if p.Count(Undecided)+p.Count(Malformed) > 0 {
				t.Errorf("%s, seed %d: %s", m.name, seed, p.Text())
			}
		}
		rows = append(rows, fmt.Sprintf("%-56s %d of %d %v", m.name, caught, seeds, kinds))
	}
	t.Logf("caught at random:\n%s", strings.Join(rows, "\n"))
}
