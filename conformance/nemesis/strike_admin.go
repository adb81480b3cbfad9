package nemesis

import (
	"context"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/check"
)

// soon is how fast a holder must learn that somebody took its lock away, a second, with what a busy machine adds.
const soon = 10 * time.Second

// forceRelease takes away what the victim keeps. The victim is told within a second, and may be mistaken until then:
// what an operator takes away is over when the operator says so, and the tokens alone protect the data. That it was
// done by force a driver may have no time to find out.
func (a *attack) forceRelease(ctx context.Context) error {
	operator, ok := backend.As[backend.ForceReleaser](a.admin)
	if !ok {
		return fmt.Errorf("%w: the driver cannot", errNoFault)
	}
	began := time.Now()
	err := a.within(ctx, func(ctx context.Context) error {
		call := a.all.marks.Begin(ctx, "operator", check.OpForce, a.name)
		err := operator.ForceRelease(ctx, a.name, "the nemesis wants it")
		if err == nil {
			call.Return(check.OK, nil)
		} else {
			call.Return(check.Unknown, err)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("force-release: %w", err)
	}
	reason, err := a.lost(ctx)
	if err != nil {
		return err
	}
	if a.told = time.Since(began); a.told > soon {
		return fmt.Errorf("the holder was told after %v that its lock was taken away", a.told)
	}
	a.unexplained = reason != reasonForced
	return a.goOn(ctx, began, true)
}

// lapse lets the service forget what the victim keeps. The victim must learn of it in the end.
func (a *attack) lapse(ctx context.Context, forget func(ctx context.Context, name string) error) error {
	began := time.Now()
	if err := a.within(ctx, func(ctx context.Context) error { return forget(ctx, a.name) }); err != nil {
		return err
	}
	if _, err := a.lost(ctx); err != nil {
		return err
	}
	a.told = time.Since(began)
	return a.goOn(ctx, began, true)
}
