package main

import (
	"context"
	"errors"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/gateway"
)

const forceReleaseHelp = `Usage: fencelock force-release NAME --reason TEXT [options]

Takes the lock NAME away from all who hold it. Whoever waits for it gets it at once, while the former holder may still
be at work: only a fencing token keeps its writes out. Make sure that it is dead, or that this is better than waiting.
With --nonce or --token only the hold that has it ends, and never the hold of a successor.

Options:

{options}

Exit codes:

    0  the lock was taken away
    1  nobody holds NAME, or no hold has that nonce and token
   64  the command line makes no sense, or the backend cannot do it
   69  the lock service cannot be reached, or is not fit for locks; or no answer in time: the
       lock may have been released
   77  the rules of the lock service deny it
`

func defineForceRelease(o *options) func([]string) error {
	reason := o.String("reason", "", "a `TEXT` for the holder and for later readers of the history")
	by := o.String("by", "", "the person or program that asks, a `TEXT` for the holder")
	nonce := o.String("nonce", "", "end only the hold with this `NONCE`, as holder --json shows it")
	token := o.String("token", "", "end only the hold with this fencing `TOKEN`")
	s := o.look("force-release")
	return func(args []string) error {
		err := s.parse(args, "NAME")
		if err == nil && *reason == "" {
			err = errors.New("--reason is missing")
		}
		r := backend.ForceRequest{Reason: *reason, By: *by}
		if err == nil && *nonce != "" {
			r.Nonce, err = fencing.ParseNonce(*nonce)
		}
		if err == nil && *token != "" {
			r.Token, err = fencing.ParseToken(*token)
		}
		return s.run(err, func(ctx context.Context) error {
			return with(ctx, s, backend.CapForceRelease, func(ctx context.Context, d backend.ForceReleaser) error {
				r.Name = s.args[0]
				return s.forceRelease(ctx, d, r)
			})
		})
	}
}

func (s *lookSettings) forceRelease(ctx context.Context, d backend.ForceReleaser, r backend.ForceRequest) error {
	err := d.ForceRelease(ctx, r)
	switch {
	case errors.Is(err, backend.ErrNotHeld) && r.Conditional():
		return noMatchError(r.Name)
	case errors.Is(err, backend.ErrNotHeld):
		return nobodyError(r.Name)
	case err != nil:
		return err
	}
	done := gateway.Change{Type: string(backend.ChangeForceReleased), LockKey: r.Name, Reason: r.Reason}
	return s.printOne([]string{"NAME", "EVENT", "REASON"}, done, []string{r.Name, done.Type, done.Reason})
}
