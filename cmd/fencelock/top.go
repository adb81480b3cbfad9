package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/gateway"
)

const topHelp = `Usage: fencelock top [options]

Shows the locks with the longest queues, and among equal queues the locks held longest. It repeats until it is
interrupted. If the backend does not report the start of a hold, its age counts as 0.

Options:

{options}

Exit codes:

    0  done
   64  the command line is invalid, or the backend cannot list
   69  the lock service cannot be reached, or is not configured for locks
`

// topSettings are the options of top.
type topSettings struct {
	*lookSettings
	once   bool
	every  time.Duration
	lines  int
	prefix string
	age    bool
}

func defineTop(o *options) func([]string) error {
	s := &topSettings{lookSettings: o.look("top")}
	o.BoolVar(&s.once, "once", false, "print the list once and exit")
	o.DurationVar(&s.every, "every", 2*time.Second, "the `DURATION` between two lists, at least 100ms")
	o.IntVar(&s.lines, "lines", 20, "the maximum number `N` of locks in the list")
	o.StringVar(&s.prefix, "prefix", "", "list only names that start with `TEXT`")
	o.BoolVar(&s.age, "by-age", false, "sort by age first")
	return func(args []string) error {
		err := s.parse(args)
		switch {
		case err != nil:
		case s.every < 100*time.Millisecond:
			err = fmt.Errorf("--every %v: want at least 100ms", s.every)
		case s.lines < 1:
			err = fmt.Errorf("--lines %d: want at least 1", s.lines)
		}
		return s.run(err, s.top)
	}
}

func (s *topSettings) top(ctx context.Context) error {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	d, closeDriver, err := open[backend.Lister](ctx, s.lookSettings, backend.CapList)
	if err != nil {
		return err
	}
	defer closeDriver()
	tick := time.NewTicker(s.every)
	defer tick.Stop()
	for {
		locks, total, err := s.first(ctx, d)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		}
		if err := s.show(locks, total); err != nil || s.once {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// first returns the shown locks, in their order, and the number of all.
func (s *topSettings) first(ctx context.Context, d backend.Lister) (locks []lock, total int, err error) {
	for info, err := range d.List(ctx, s.prefix) {
		if err != nil {
			return nil, 0, err
		}
		total++
		locks = append(locks, lock{State: gateway.StateOf(&info)})
		if len(locks) >= 2*s.lines+1000 {
			locks = s.sorted(locks)
		}
	}
	return s.sorted(locks), total, nil
}

// sorted returns the first of locks in the chosen order.
func (s *topSettings) sorted(locks []lock) []lock {
	queue := func(a, b lock) int { return cmp.Compare(b.Waiters, a.Waiters) }
	age := func(a, b lock) int { return cmp.Compare(b.age(), a.age()) }
	slices.SortStableFunc(locks, func(a, b lock) int {
		if s.age {
			return cmp.Or(age(a, b), queue(a, b), cmp.Compare(a.LockKey, b.LockKey))
		}
		return cmp.Or(queue(a, b), age(a, b), cmp.Compare(a.LockKey, b.LockKey))
	})
	return locks[:min(len(locks), s.lines)]
}

// age returns how long the first holder has held the lock; 0 if unknown.
func (l *lock) age() time.Duration {
	if len(l.Holders) == 0 || l.Holders[0].Since == 0 {
		return 0
	}
	return time.Since(time.UnixMilli(l.Holders[0].Since))
}

func (s *topSettings) show(locks []lock, total int) error {
	if info, err := os.Stdout.Stat(); !s.once && !s.json && err == nil && info.Mode()&os.ModeCharDevice != 0 {
		fmt.Print("\x1b[H\x1b[2J") // the list replaces the last one
	}
	if !s.json {
		fmt.Printf("%d of %d locks\n", len(locks), total)
	}
	out := s.newPrinter(lockTitles...)
	for i := range locks {
		if err := out.print(locks[i], locks[i].rows()...); err != nil {
			return err
		}
	}
	return out.flush()
}
