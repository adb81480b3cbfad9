package main

import (
	"context"
	"errors"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/gateway"
)

const forceReleaseHelp = `Usage: fencelock force-release NAME --reason TEXT [options]

Releases the lock NAME against the will of its holder. The next waiter gets the lock immediately, while the former holder may still
be working: only a fencing token stops its writes. Make sure that the holder is dead, or that this is better than
waiting. With --nonce or --token, only the hold with that nonce or token ends, and never the hold of a successor.

Options:

{options}

Exit codes:

    0  the lock was released
    1  NAME is free, or no hold has that nonce and token
   64  the command line is invalid, or the backend does not support forced releases
   69  the lock service cannot be reached, is not configured for locks, or did not answer in time: the lock may
       have been released
   77  the rules of the lock service deny the request
`

func defineForceRelease(o *options) func([]string) error {
	reason := o.String("reason", "", "a `TEXT` that is shown to the holder and kept in the history")
	by := o.String("by", "", "a `TEXT` that names the person or program that asks; shown to the holder")
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
