package main

import (
	"context"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/gateway"
)

const lsHelp = `Usage: fencelock ls [options]

Lists the names that are held, one line for each holder. EXPIRES IN is how long a hold lasts unless it is renewed. Names
that come or go meanwhile may be in the list or not.

Options:

{options}

Exit codes:

    0  done, also if nothing is held
   64  the command line makes no sense, or the backend cannot list
   69  the lock service cannot be reached, or is not fit for locks
   77  the rules of the lock service deny it
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
