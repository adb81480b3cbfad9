package fencelock_test

import (
	"context"
	"errors"
	"testing"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/fencing"
)

// mute is the in-process driver with a network that loses the answers to the first calls of ForceRelease.
type mute struct {
	*memory.Driver
	lose  int
	calls []backend.ForceRequest
}

func (d *mute) ForceRelease(ctx context.Context, r backend.ForceRequest) error {
	d.calls = append(d.calls, r)
	err := d.Driver.ForceRelease(ctx, r)
	if len(d.calls) <= d.lose {
		err = backend.ErrUnknown
	}
	return err
}

func TestForceReleaseAfterALostAnswer(t *testing.T) {
	for _, test := range []struct {
		name  string
		lose  int
		opts  func(h fencelock.Holder) []fencelock.ForceOption
		want  error
		calls int
	}{
		{"with a nonce", 1, func(h fencelock.Holder) []fencelock.ForceOption {
			return []fencelock.ForceOption{fencelock.OnlyHold(h.Nonce), fencelock.ForcedBy("Ann")}
		}, nil, 2},
		{"with a nonce, and no answer", 9, func(h fencelock.Holder) []fencelock.ForceOption {
			return []fencelock.ForceOption{fencelock.OnlyHold(h.Nonce)}
		}, fencelock.ErrUnknown, 4},
		{"with a token", 1, func(h fencelock.Holder) []fencelock.ForceOption {
			return []fencelock.ForceOption{fencelock.OnlyToken(h.Token)}
		}, fencelock.ErrUnknown, 1},
		{"of all", 1, func(fencelock.Holder) []fencelock.ForceOption { return nil }, fencelock.ErrUnknown, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			d := &mute{Driver: memory.New(nil), lose: test.lose}
			c, err := fencelock.ForEfficiency(d, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close(context.Background())
			lease := mustAcquire(t, c, "x")
			state, err := c.Look(t.Context(), "x")
			if err != nil {
				t.Fatal(err)
			}
			err = c.ForceRelease(t.Context(), "x", "gone", test.opts(state.Holders[0])...)
			if !errors.Is(err, test.want) {
				t.Errorf("ForceRelease = %v, want %v", err, test.want)
			}
			if len(d.calls) != test.calls {
				t.Errorf("the driver was called %d times, want %d", len(d.calls), test.calls)
			}
			<-lease.Context().Done()
		})
	}
}

func TestForceReleaseOfAnotherHold(t *testing.T) {
	c, err := fencelock.ForEfficiency(memory.New(nil), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(context.Background())
	lease := mustAcquire(t, c, "x")
	wantErr(t, c.ForceRelease(t.Context(), "x", "gone", fencelock.OnlyHold(fencing.NewNonce())), fencelock.ErrNotHeld)
	wantErr(t, c.ForceRelease(t.Context(), "x", "gone", fencelock.ForcedBy("a\nb")), fencelock.ErrInvalidOption)
	if err := lease.Err(); err != nil {
		t.Errorf("the hold that was not named: %v, want nil", err)
	}
	release(t, lease)
}
