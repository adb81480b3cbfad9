package main

import (
	"context"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/gateway"
)

const holderHelp = `Usage: fencelock holder NAME [options]

Shows who holds the lock NAME. EXPIRES IN is the time after which a hold expires unless it is renewed. The output may
already be out of date: use it for information only, and never to decide whether to write.

Options:

{options}

Exit codes:

    0  NAME is held
    1  NAME is free
   64  the command line is invalid, or the backend cannot show holders
   69  the lock service cannot be reached, or is not configured for locks
   77  the rules of the lock service deny the request
`

func defineHolder(o *options) func([]string) error {
	s := o.look("holder")
	o.BoolVar(&s.stale, "stale", false, staleUsage)
	return func(args []string) error {
		return s.run(s.parse(args, "NAME"), func(ctx context.Context) error { return s.holder(ctx, s.args[0]) })
	}
}

func (s *lookSettings) holder(ctx context.Context, name string) error {
	if s.stale {
		return s.staleHolder(ctx, name)
	}
	return with(ctx, s, backend.CapInspect, func(ctx context.Context, d backend.Inspector) error {
		info, err := d.Look(ctx, name)
		if err != nil {
			return err
		}
		return s.printHolder(lock{State: gateway.StateOf(&info)})
	})
}

func (s *lookSettings) printHolder(l lock) error {
	if err := s.printOne(lockTitles, l, l.rows()...); err != nil || l.Locked {
		return err
	}
	return nobodyError(l.LockKey)
}
