package nemesis

import (
	"context"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/check"
)

// soon bounds the time until a holder is notified of a forced release: a second, and the allowance of a busy machine.
const soon = 10 * time.Second

// forceRelease force-releases the victim's name. The victim is notified within a second. A forced release takes
// effect when the operator's call returns: until the notification, only tokens protect the data. A driver may have no
// time to find out that the release was forced.
func (a *attack) forceRelease(ctx context.Context) error {
	operator, ok := backend.As[backend.ForceReleaser](a.admin)
	if !ok {
		return fmt.Errorf("%w: the driver cannot", errNoFault)
	}
	began := time.Now()
	err := a.within(ctx, func(ctx context.Context) error {
		call := a.all.marks.Begin(ctx, "operator", check.OpForce, a.name)
		err := operator.ForceRelease(ctx, backend.ForceRequest{Name: a.name, Reason: "the nemesis wants it"})
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
		return fmt.Errorf("the holder was notified after %v that its lock was taken away", a.told)
	}
	a.unexplained = reason != reasonForced
	return a.goOn(ctx, began, true)
}

// lapse makes the service forget the victim's hold. The victim must be notified of the loss.
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
