package guardtest

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/testtier"
)

var sectionClauses = []Clause{
	{
		ID: "U1", Group: "section", Slug: "overtaken-write-survives", needs: needUpdate | needWrite,
		run: overtakenWriteSurvives,
		Rule: "the write of a holder that was overtaken, and not yet refused, " +
			"is visible to the next holder or is not acknowledged",
	},
	{
		ID: "U2", Group: "section", Slug: "racing-writers", needs: needUpdate | needWrite, run: racingWriters,
		Rule: "if many holders read, compute and write concurrently, no acknowledged write is lost",
	},
	{
		ID: "U3", Group: "section", Slug: "refused-is-not-called", needs: needUpdate | needWrite,
		run:  refusedIsNotCalled,
		Rule: "the function of a refused section is not called, and a section that fails changes nothing",
	},
	{
		ID: "U4", Group: "section", Slug: "nested", needs: needUpdate | needHand, run: nested,
		Rule: "a section within a section returns ErrNested",
	},
	{
		ID: "U5", Group: "section", Slug: "one-hold", needs: needUpdate | needWrite, run: oneHold,
		Rule: "concurrent sections of one hold do not fail, and no acknowledged write is lost",
	},
}

// blocked bounds the wait of a section for a rival that may be unable to begin.
const blocked = 100 * time.Millisecond

func overtakenWriteSurvives(t *trial) {
	a, b, name := t.client(), t.client(), t.resource()
	entered, resume := make(chan struct{}), make(chan struct{})
	looked, goOn := make(chan struct{}), make(chan struct{})
	var enteredOnce, lookedOnce sync.Once
	ctx, cancel := context.WithTimeout(t.ctx, patience)
	defer cancel()
	wait := func(c <-chan struct{}) {
		select {
		case <-c:
		case <-ctx.Done():
			t.errorf("the section was not resumed")
		}
	}
	late, next := make(chan error, 1), make(chan error, 1)
	go func() {
		late <- a.Update(ctx, t.claim(name, 33), name, func(_ context.Context, old string) (string, error) {
			enteredOnce.Do(func() { close(entered) })
			wait(resume)
			return old + "A", nil
		})
	}()
	wait(entered)
	go func() { // it has the lock by now
		next <- b.Update(ctx, t.claim(name, 34), name, func(_ context.Context, old string) (string, error) {
			lookedOnce.Do(func() { close(looked) })
			wait(goOn)
			return old + "B", nil
		})
	}()
	select {
	case <-looked:
	case <-time.After(blocked): // it waits for the first one's section, as in a database
	}
	close(resume)
	errA := <-late
	close(goOn)
	errB := <-next
	value := t.read(b, name)
	if errB != nil {
		t.errorf("the section of the holder = %v, want it admitted", errB)
	}
	if errA == nil && !strings.Contains(value, "A") || errB == nil && !strings.Contains(value, "B") {
		t.errorf("the value is %q after A (%v) and B (%v): an acknowledged write is lost", value, errA, errB)
	}
	if errA != nil && !errors.Is(errA, fencing.ErrStale) {
		t.errorf("the section of the holder that was overtaken = %v, want it admitted or ErrStale", errA)
	}
}

func racingWriters(t *trial) {
	var token atomic.Uint64
	// The lock goes round while the one before is still writing.
	t.race(12, func() fencing.Token { return fencing.Token(token.Add(1)) })
}

func oneHold(t *trial) {
	stale := t.race(6, func() fencing.Token { return 33 })
	if stale > 0 {
		t.errorf("%d sections of the only hold there is were refused as stale", stale)
	}
}

// race adds one to the value in many concurrent sections, and returns the number refused as stale.
func (t *trial) race(writers int, token func() fencing.Token) (refused int64) {
	writes := max(5, t.h.Checks/400)
	if testtier.Wanted() {
		writes *= 6
	}
	name := t.resource()
	var acknowledged, stale, gaveUp atomic.Int64
	t.together(writers, func(c *Client) {
		for range writes {
			mine := token()
			ctx, cancel := context.WithTimeout(t.ctx, patience)
			err := c.Update(ctx, t.claim(name, mine), name, func(_ context.Context, old string) (string, error) {
				if old == "" {
					old = "0"
				}
				n, err := strconv.Atoi(old)
				// Gives the others time to come too early, even on a busy machine: a guard does not report that it
				// keeps them waiting.
				time.Sleep(time.Millisecond)
				return strconv.Itoa(n + 1), err
			})
			cancel()
			switch {
			case err == nil:
				acknowledged.Add(1)
			case errors.Is(err, fencing.ErrStale):
				stale.Add(1)
			case t.h.Again != nil && t.h.Again(err):
				gaveUp.Add(1)
			default:
				t.errorf("section with token %v = %v, want it admitted or ErrStale", mine, err)
			}
		}
	})
	value, _ := strconv.ParseInt(t.read(t.client(), name), 10, 64) // where it is no number, all are lost
	lost := acknowledged.Load() - value
	if lost != 0 {
		t.errorf("the counter is %d after %d acknowledged writes", value, acknowledged.Load())
	}
	t.notef("%s: %d writers at once, %d writes each: %d acknowledged, %d stale, %d abandoned by the database, %d lost",
		t.h.Name, writers, writes, acknowledged.Load(), stale.Load(), gaveUp.Load(), lost)
	return stale.Load()
}

func refusedIsNotCalled(t *trial) {
	c, name := t.client(), t.resource()
	t.update(c, t.claim(name, 34), name, "34")
	called := false
	err := c.Update(t.ctx, t.claim(name, 33), name, func(context.Context, string) (string, error) {
		called = true
		return "33", nil
	})
	if !errors.Is(err, fencing.ErrStale) || called {
		t.errorf("section with token 33 after 34 = %v, called: %v; want ErrStale and that it is not called", err,
			called)
	}
	failed := errors.New("the function failed")
	err = c.Update(t.ctx, t.claim(name, 35), name, func(context.Context, string) (string, error) {
		return "35", failed
	})
	if !errors.Is(err, failed) {
		t.errorf("section with a failing function = %v, want its error", err)
	}
	if value := t.read(c, name); value != "34" {
		t.errorf("the value is %q, want 34", value)
	}
}

func nested(t *trial) {
	c, name := t.client(), t.resource()
	var inner error
	err := c.Update(t.ctx, t.claim(name, 5), name, func(ctx context.Context, old string) (string, error) {
		ctx, cancel := context.WithTimeout(ctx, blocked)
		defer cancel()
		inner = c.Update(ctx, t.claim(name, 5), name, func(context.Context, string) (string, error) {
			return "inner", nil
		})
		return "outer", nil
	})
	if err != nil || !errors.Is(inner, fencing.ErrNested) {
		t.errorf("section = %v, and the one within it = %v; want ErrNested", err, inner)
	}
}

// update ends the clause unless the section is admitted.
func (t *trial) update(c *Client, claims fencing.Claims, resource, value string) {
	err := t.repeat(func(ctx context.Context) error {
		return c.Update(ctx, claims, resource, func(context.Context, string) (string, error) { return value, nil })
	})
	if err != nil {
		t.fatalf("section with %v = %v, want it admitted", claims, err)
	}
}
