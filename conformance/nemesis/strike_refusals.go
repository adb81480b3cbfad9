package nemesis

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/stallmeter"
)

// refuseRelease has the victim release its hold while the service refuses releases. The hold ends with its TTL or with
// a repeated release, although the client is still running.
func (a *attack) refuseRelease(ctx context.Context) error {
	return a.refusal(ctx, a.RefuseRelease, a.refusedRelease)
}

// refuseWrites has the service refuse acquires, renewals and releases. The victim releases meanwhile, or keeps its hold
// for as long as it is valid.
func (a *attack) refuseWrites(ctx context.Context) error {
	return a.refusal(ctx, a.RefuseWrites, func(ctx context.Context, began time.Time) error {
		since := a.all.marks.Now()
		if a.Variant%2 == 0 {
			if err := a.refusedRelease(ctx, began); err != nil {
				return err
			}
		} else if a.last(ctx, began); a.outlasted() {
			if _, err := a.lost(ctx); err != nil {
				return err
			}
		}
		for _, c := range a.clients {
			if name := c.now().name; a.all.served(name, since) {
				return fmt.Errorf("%w: %s was granted its request while writes are refused", errNoFault, name)
			}
		}
		return nil
	})
}

// refusedRelease has the victim release its hold, which must be refused, and lasts for the drawn length.
func (a *attack) refusedRelease(ctx context.Context, began time.Time) error {
	if err := a.finish(ctx); err != nil {
		return err
	}
	if a.answer == "" {
		return fmt.Errorf("%w: the release was to be refused, and was carried out", errNoFault)
	}
	a.last(ctx, began)
	return nil
}

// refusal begins a refusal, ends it when during returns, and waits until other clients have had every name. This must
// take at most a TTL, plus the allowance of a busy machine.
func (a *attack) refusal(ctx context.Context, begin func(testing.TB, string) func(),
	during func(ctx context.Context, began time.Time) error) error {
	began := time.Now()
	allow := sync.OnceFunc(begin(a.t, a.name))
	defer allow()
	pause(ctx, settle) // connections are affected one after the other
	if err := during(ctx, began); err != nil {
		return err
	}
	allow()
	most := a.TTL + soon
	whole := ctx
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	if err := a.finish(ctx); err != nil {
		return err
	}
	if err := a.goOn(ctx, began, true); err != nil {
		return a.neverOpens(whole, began, most, fmt.Errorf("%v after a refusal: %w", most, err))
	}
	return nil
}

// neverOpens waits after a name did not open within most, until the machine has run for most again. If the name opens
// then, it was late, which a busy machine excuses. If it stays closed, no stall excuses that. Without this wait the
// step would be repeated on a name that no client can acquire, and fail with another error each time.
func (a *attack) neverOpens(ctx context.Context, began time.Time, most time.Duration, late error) error {
	since := time.Now()
	for ran := time.Duration(0); ran < most; {
		bounded, cancel := context.WithTimeout(ctx, most-ran)
		w, from := stallmeter.Begin(), time.Now()
		err := a.goOn(bounded, began, true)
		cancel()
		ran += max(0, time.Since(from)-w.End().Total)
		if err == nil || ctx.Err() != nil || time.Since(since) > a.plan.Patience {
			return late
		}
	}
	return stallmeter.Conclusive(fmt.Errorf("%w, and %v later", late, time.Since(since).Round(time.Millisecond)))
}
