package main

import (
	"context"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/gateway"
)

const holderHelp = `Usage: fencelock holder NAME [options]

Shows who holds the lock NAME. EXPIRES IN is how long a hold lasts unless it is renewed. The answer may be out of date
when it arrives: it is for people, and no reason to write anything.

Options:

{options}

Exit codes:

    0  somebody holds NAME
    1  nobody does
   64  the command line makes no sense, or the backend does not tell
   69  the lock service cannot be reached, or is not fit for locks
   77  the rules of the lock service deny it
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
