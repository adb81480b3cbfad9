package postgres

// This file is the binding of backend/engine: the parts that all exchanges use. Where to read on:
//
//	enter.go    Enter and EnterSet; leave.go: Leave and Extend; wait.go: Check
//	session.go  sessions, and the losses on them
//	push.go     the connection that listens, and the notifications to other clients
//	query.go    the statements; errors.go: the meaning of their errors; clock.go: the server's clock
//	probe.go    whether the server is fit; inspect.go: Look, Names, Force, Feed
//	driver.go   options and construction; open.go: URLs; migrate.go: the schema
//
// The functions of migrations/ decide who holds and who waits, under the lock of the name's row. Each exchange is one
// of them, hence one round trip and one transaction.
//
// A statement that was sent may commit although its answer never arrives, also after its caller has left. After a
// Leave, after a repetition that was answered, and after the end of its session it has no effect (migration 0008).
//
// The binding has goroutines, all in service.gate: one listens, since PostgreSQL pushes to a connection, and from time to
// time another one probes the server and removes the sessions of dead clients, beside the calls.

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
)

// service is the binding.
type service struct {
	pool  *pgxpool.Pool // the driver's own, see New
	unfit error         // why no call can work: bad arguments of New
	sql   queries
	clock backend.Clock
	log   *slog.Logger

	// id identifies this client: the ids of its sessions and its channel begin with it. It has 64 random bits, so that
	// clients need not know each other.
	id string

	described  atomic.Pointer[backend.Description] // of the last probe
	fit        atomic.Bool                         // the last probe found the server fit, and no other server has become primary since
	looked     atomic.Int64                        // when the last probe began, as an Instant
	tending    atomic.Bool                         // a goroutine probes
	noListen   bool
	listenAt   *pgx.ConnConfig // nil: as the pool connects
	unprepared atomic.Bool     // statements are not prepared
	unset      atomic.Bool     // connections are made without ourSettings
	ignored    []string        // Options.IgnoreStandbys
	gate       *kit.Gate       // of the binding's goroutines
	life       context.Context // of the statements that several callers share
	end        context.CancelFunc
	phase      time.Duration // of the checks of waiters
	time       serverClock

	others   chan struct{} // has the statements that do not renew, one fewer than the pool may have connections
	acquires *engine.Batch[[]any, shared]
	releases *engine.Batch[[]any, shared]
	notify   func(engine.Push)

	// Whether notifications arrive. unheard: the last try to listen failed, or has ended. hears: the connection stands,
	// and has heard its own notification. Both are false before the first try.
	unheard, hears atomic.Bool

	mu       sync.Mutex            // protects the following fields
	listens  bool                  // the goroutine that listens runs
	wakes    []string              // to notify: channel and hold id of each
	flushing bool                  // an exchange notifies
	live     map[*session]struct{} // sessions that are open
	paces    map[string]pace       // of the checks, by name
	here     int64                 // the greatest position that the server returned, see saw
	lost     error                 // the service has lost its history
	found    facts                 // of the last probe
}

const (
	// Description.MinTTL and MaxTTL.
	minTTL = time.Second
	maxTTL = 24 * time.Hour
	// mostCalls bounds the calls that share one statement.
	mostCalls = 64
	// probeEvery is the interval at which a client that acquires probes the server's settings, besides the first probe and
	// one after each promotion. It notices a new standby, or fsync switched off, within this time, whatever the TTL.
	probeEvery = 30 * time.Second
)

// Unfit is engine.Checked's.
func (s *service) Unfit() error { return s.unfit }

// OneEntry is engine.OneEntry's: a request has one row in a queue, whichever of its attempts asks.
func (s *service) OneEntry() {}

// Patience is engine.Patient's: to cancel a statement costs its connection, and connections are expensive.
func (s *service) Patience() time.Duration { return callTime }

// Describe is engine.Service's. Exclusion and TokenSpace are known after the first probe, and Exclusion may change with
// each probe; CapPushLoss is set while notifications arrive.
func (s *service) Describe() backend.Description { return *s.described.Load() }

// Classify is engine.Service's. A state that is not in the table, and a broken connection, leave the outcome open.
func (s *service) Classify(err error) engine.Class {
	switch {
	case unsent(err), rolledBack(err):
		return engine.NotDone
	case misconfigured(err):
		return engine.Never
	}
	return engine.Unknown
}

// Ping is engine.Service's. It works while acquires are refused, and admits the server once it is fit.
func (s *service) Ping(ctx context.Context) error { return s.probe(ctx) }

// Probe is engine.Prober's.
func (s *service) Probe(ctx context.Context) error { return s.probe(ctx) }

// attend makes sure that the server is fit for a grant. While it is not known to be, the exchange probes it. Later
// probes are made beside the calls.
func (s *service) attend(ctx context.Context) error {
	if err := s.history(); err != nil {
		return err
	}
	if !s.fit.Load() {
		err := s.probe(ctx)
		if err != nil && (errors.Is(err, backend.ErrUnknown) || !kit.Classified(err) && s.Classify(err) != engine.Never) {
			err = fmt.Errorf("%w: %v", backend.ErrUnavailable, err) // the request itself was not sent
		}
		return err
	}
	now := s.clock.Now()
	if last := s.looked.Load(); now.Sub(backend.Instant(last)) > probeEvery && s.looked.CompareAndSwap(last, int64(now)) {
		s.tend()
	}
	return nil
}

// tend probes the server, and ends sessions of clients that died, in the background.
func (s *service) tend() {
	if !s.tending.CompareAndSwap(false, true) {
		return
	}
	if !s.gate.Go(func(work context.Context) {
		defer s.tending.Store(false)
		ctx, cancel := context.WithTimeout(work, callTime)
		defer cancel()
		defer context.AfterFunc(s.gate.Closing(), cancel)()
		_ = s.probe(ctx) // a later exchange repeats a failed probe
		_ = s.exec(ctx, s.sql.reap, s.clockKnown())
		s.flush(ctx)
	}) {
		s.tending.Store(false)
	}
}

// Close is engine.Service's.
func (s *service) Close(ctx context.Context) error {
	s.gate.Close()
	err := s.gate.Wait(ctx)
	s.end()
	if s.pool == nil {
		return err
	}
	closed := make(chan struct{})
	go func() { // ends with the last connection: each exchange is bounded
		s.pool.Close()
		close(closed)
	}()
	select {
	case <-closed:
	case <-ctx.Done():
	}
	return err
}
