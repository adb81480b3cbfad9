package redlock

// This file looks at the servers as a set: whether they are fit and a majority answers, before the first call, and
// whether they still are, every half minute. A single server is looked at by node.vet, on each of its connections.
//
// The two looks differ in their refusals. Before the first call one unfit server refuses the whole set, because a
// mistake of the configuration is best found immediately. Later an unfit server only loses its vote, because existing
// holds must be renewed and released.

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

const (
	// surveyTime bounds one survey, unless a URL says otherwise, whatever the callers' contexts allow.
	surveyTime = redisconn.ConnectTime
	// straggle is for the minority, once a majority has answered.
	straggle = 250 * time.Millisecond
)

// Ping connects to every server and refuses the set, with an error that wraps backend.ErrMisconfigured, if a server
// that answers is unfit (see the package comment); backend.ErrUnavailable if no majority answers, ErrClosed after
// Close. It returns within ctx, and may be called beside other calls.
func (d *Driver) Ping(ctx context.Context) error {
	return redisconn.CallError(ctx, driverName, "ping", "", d.probe.Ping(ctx, d.survey))
}

// look is the look before a call: the survey before the first calls, which wait for it, and another look beside all
// later ones.
func (d *Driver) look(ctx context.Context) error {
	if d.probe.Passed() {
		return d.lookAgain(ctx)
	}
	return d.survey(ctx)
}

// survey looks at all servers at once: connecting to one vets it. An unreachable minority is no obstacle: its servers
// are looked at when they come back, before their votes count. An unfit one is, since waiting does not mend it.
func (d *Driver) survey(ctx context.Context) error {
	steps, sink := d.toAll(d.keys("ping"), redisscript.Inform)
	for _, s := range steps {
		s.Deadline = time.Now().Add(d.patience)
		s.node.submit(s)
	}
	well, errs, unfit := 0, []error(nil), error(nil)
	answered := func(s *step) (done bool) {
		if s.Err == nil {
			well++
		} else {
			// Each error names its server: of five addresses one is wrong, as a rule.
			errs = append(errs, fmt.Errorf("server %s: %w", s.node.addr, s.Err))
			// One unfit server makes the whole set unfit: it would vote as soon as somebody restarts the driver
			// elsewhere.
			if s.Err.Fatal {
				unfit = errs[len(errs)-1]
			}
		}
		return unfit != nil || well+len(errs) == len(steps)
	}
	if !gather(ctx, sink, d.patience, d.patience, func(s *step) bool { return answered(s) || well == d.quorum }, nil) {
		errs = append(errs, fmt.Errorf("the others: %w", errSilent))
	} else if unfit == nil && well+len(errs) < len(steps) {
		// The minority has a little longer, so that an unfit server among them is found before the first vote. The rest
		// is looked at when it comes back, before its votes count.
		gather(ctx, sink, straggle, straggle, answered, nil)
	}
	switch {
	case unfit != nil:
		return &redisconn.Failure{Cause: unfit, Fatal: true}
	case well < d.quorum:
		return &redisconn.Failure{Cause: fmt.Errorf("%d of %d servers answer, but %d are needed: %w",
			well, len(d.nodes), d.quorum, errors.Join(errs...))}
	}
	d.probe.Note(d.clock.Now(), nil)
	return nil
}

// lookAgain looks at all servers that were seen before: their settings may have changed since. A server that is now
// unfit is asked for no more votes, and its votes can still be renewed and released. It runs beside the calls, one
// goroutine for each server, all of which it waits for.
func (d *Driver) lookAgain(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, d.patience)
	defer cancel()
	var all sync.WaitGroup
	for _, n := range d.nodes {
		all.Go(func() {
			err := n.vet(ctx, n.client)
			switch {
			// It is fit, and may vote, even if it was unfit before.
			case err == nil:
				n.misfit.Store(nil)
			case errors.Is(err, backend.ErrMisconfigured):
				// Not Fatal: the other servers may still have a majority.
				n.misfit.Store(&redisconn.Failure{Cause: err})
			}
		})
	}
	all.Wait()
	d.probe.Note(d.clock.Now(), nil)
	return nil
}

// ask submits steps. A step for a vote that would not count fails immediately, on the caller's goroutine.
func (n *node) ask(steps ...*step) {
	f := n.misfit.Load()
	if f == nil {
		n.submit(steps...)
		return
	}
	for _, s := range steps {
		switch s.Code {
		case redisscript.Set, redisscript.Try, redisscript.TryAgain, redisscript.Wait, redisscript.WaitAgain:
			s.Err = f
			s.sink <- s
		default:
			n.submit(s)
		}
	}
}
