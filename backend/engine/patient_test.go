package engine_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
)

// patient is a service that needs three seconds for each step but Enter.
type patient struct{ service }

func (*patient) Prompt()  {}
func (*patient) Patient() {}

func answer[T any](ctx context.Context, value T) (T, error) {
	if _, how := engine.Await(ctx, time.After(3*time.Second), nil); how != engine.Answered {
		return value, &engine.Unanswered{}
	}
	return value, nil
}

func (*patient) Leave(ctx context.Context, _ engine.Leaving) (engine.Left, error) {
	return answer(ctx, engine.Left{Was: true})
}

func (*patient) Look(ctx context.Context, name string) (backend.State, error) {
	return answer(ctx, backend.State{Name: name, Held: true})
}

func (p *patient) Names(ctx context.Context, _, _ string) ([]backend.State, string, error) {
	s, err := p.Look(ctx, "x")
	return []backend.State{s}, "", err
}

func (*patient) Force(ctx context.Context, _ backend.ForceRequest) (int, error) {
	return answer(ctx, 1)
}

// A release, and calls that look, last as long as their callers' contexts allow, and no longer.
func TestPatientService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := engine.New(&patient{})
		g, err := d.Acquire(t.Context(), request("x"))
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Release(within(t, 2500*time.Millisecond), g); !errors.Is(err, backend.ErrUnknown) {
			t.Errorf("Release within 2.5 s = %v, want ErrUnknown", err)
		}
		if err := d.Release(within(t, time.Minute), g); err != nil {
			t.Errorf("Release within a minute = %v", err)
		}
		if err := d.Release(t.Context(), g); err != nil {
			t.Errorf("Release without a deadline = %v", err)
		}
		if s, err := d.Look(within(t, time.Minute), "x"); err != nil || !s.Held {
			t.Errorf("Look = %+v, %v", s, err)
		}
		for s, err := range d.List(within(t, time.Minute), "") {
			if err != nil || !s.Held {
				t.Errorf("List = %+v, %v", s, err)
			}
		}
		closed(t, d)
	})
}
