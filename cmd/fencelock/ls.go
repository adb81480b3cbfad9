package main

import (
	"context"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/gateway"
)

const lsHelp = `Usage: fencelock ls [options]

Lists held locks, one line for each holder. EXPIRES IN is the time after which a hold expires unless it is renewed. A
lock that is acquired or released meanwhile may be missing or listed.

Options:

{options}

Exit codes:

    0  success, even if no lock is held
   64  the command line is invalid, or the backend cannot list
   69  the lock service cannot be reached, or is not configured for locks
   77  the rules of the lock service deny the request
`

func defineLs(o *options) func([]string) error {
	prefix := o.String("prefix", "", "list only names that start with `TEXT`")
	s := o.look("ls")
	o.BoolVar(&s.stale, "stale", false, staleUsage)
	return func(args []string) error {
		return s.run(s.parse(args), func(ctx context.Context) error { return s.list(ctx, *prefix) })
	}
}

func (s *lookSettings) list(ctx context.Context, prefix string) error {
	if s.stale {
		return s.staleList(ctx, prefix)
	}
	d, closeDriver, err := open[backend.Lister](ctx, s, backend.CapList)
	if err != nil {
		return err
	}
	defer closeDriver()
	out := s.newPrinter(lockTitles...)
	for info, err := range d.List(ctx, prefix) {
		if err != nil {
			return err
		}
		l := lock{State: gateway.StateOf(&info)}
		if err := out.print(l, l.rows()...); err != nil {
			return err
		}
	}
	return out.flush()
}
