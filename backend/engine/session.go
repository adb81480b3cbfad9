package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// Sessions, on which holds and waiters stand: one for each TTL, and beyond maxExact one for similar TTLs.

// maxExact bounds the sessions that are as long as requested. While there are more, each new TTL joins the next longer
// step of a ladder whose steps are a quarter longer than the one below.
const maxExact = 8

// session is one session of the service.
type session struct {
	kit.Session
	asked  time.Duration // the requested TTL
	own    Session       // the binding's, of TTL ttl; set before others see it
	ttl    time.Duration
	proofs Proofs // nil: only Prove proves it

	outgrown  chan struct{} // closed when another session replaces it
	outgrowOn sync.Once

	doubted chan struct{} // the loop has to look for doubts

	mu      sync.Mutex      // protects the following fields
	proved  backend.Instant // the validity of all holds counts from it
	proving chan struct{}   // not nil while a proof is in progress
	failed  error           // of the last proof
}

// sessions are the sessions of a driver.
type sessions struct {
	d      *Driver
	with   Sessions
	proofs Proofs // nil: only Prove proves a session
	table  *kit.Sessions[time.Duration, *session]

	mu       sync.Mutex           // protects the following fields
	holds    map[string]*hold     // by request id; each is one user of its session
	adopting map[string]*adoption // by request id
}

func newSessions(d *Driver, with Sessions) *sessions {
	proofs, _ := d.service.(Proofs)
	return &sessions{
		d: d, with: with, proofs: proofs, table: kit.NewSessions[time.Duration, *session](d.clock), holds: map[string]*hold{},
		adopting: map[string]*adoption{},
	}
}

// binding returns the binding's session, and nil for a service without sessions.
func (s *session) binding() Session {
	if s == nil {
		return nil
	}
	return s.own
}

func (s *session) provedAt() backend.Instant {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.learn()
	return s.proved
}

// learn takes over the proofs of other exchanges. session.mu is held.
func (s *session) learn() {
	if s.proofs != nil {
		s.proved = max(s.proved, s.proofs.Proved(s.own))
	}
}

func (s *session) isOutgrown() bool {
	select {
	case <-s.outgrown:
		return true
	default:
		return false
	}
}

func (s *session) outgrow() { s.outgrowOn.Do(func() { close(s.outgrown) }) }

// join returns the session for a TTL, with one user more. Without a session, one caller opens it for all. After an
// error no request of the caller was sent.
func (all *sessions) join(ctx context.Context, ttl time.Duration) (*session, error) {
	ttl = all.length(ttl)
	s, err := all.table.Join(ctx, ttl, func() *session {
		return &session{Session: all.table.New(), asked: ttl, proofs: all.proofs, outgrown: make(chan struct{}), doubted: make(chan struct{}, 1)}
	}, func(s *session) {
		if err := all.d.lost(); err != nil {
			all.table.Opened(s, err)
		} else if !all.d.gate.Go(func(context.Context) { all.run(s) }) {
			all.table.Opened(s, backend.ErrClosed)
		}
	})
	if err != nil && ctx.Err() == nil && !kit.Classified(err) && all.d.service.Classify(err) != Never {
		err = fmt.Errorf("%w: %w", backend.ErrUnavailable, err)
	}
	return s, err
}

// length returns the TTL of the session for a TTL.
func (all *sessions) length(ttl time.Duration) time.Duration {
	d := all.d.Describe()
	if d.TTLGranularity > 0 {
		ttl = ttl.Truncate(d.TTLGranularity)
	}
	if _, exact := all.table.Find(ttl); exact || len(all.table.Live()) < maxExact {
		return ttl
	}
	unit := max(d.TTLGranularity, time.Millisecond)
	step := unit
	for step < ttl {
		step += max((step / 4).Truncate(unit), unit)
	}
	if d.MaxTTL > 0 {
		return min(step, d.MaxTTL)
	}
	return step
}

// open opens s. Sessions that it does not use, or may have opened, end.
func (all *sessions) open(s *session) bool {
	var mu sync.Mutex // protects the following fields
	var own Session   // the first session that opened
	var proved backend.Instant
	decided := false
	r, _ := hedge(all.d.gate.Closing(), all.d, func(ctx context.Context, _ bool) (r reply[struct{}]) {
		ctx, cancel := context.WithTimeout(ctx, all.d.timeout)
		defer cancel()
		r.sent = all.d.clock.Now()
		another, err := all.with.Open(ctx, s.asked)
		r.err = all.d.stepError(ctx, err)
		mu.Lock()
		if err == nil && own == nil && !decided {
			own, another, proved = another, nil, r.sent
		}
		mu.Unlock()
		if another != nil {
			all.discard(another)
			r.err = cmp.Or(r.err, backend.ErrUnavailable)
		}
		return r
	})
	mu.Lock()
	decided = true
	mu.Unlock()
	if own != nil {
		s.own, s.ttl, s.proved, r.err = own, own.TTL(), proved, nil
	} else if errors.Is(r.err, backend.ErrUnknown) {
		r.err = fmt.Errorf("%w: %v", backend.ErrUnavailable, r.err) // the request itself was not sent
	}
	if all.table.Opened(s, r.err) {
		return true
	}
	if own != nil {
		all.discard(own)
	}
	return false
}

// discard ends a session that is not used, in the background.
func (all *sessions) discard(own Session) {
	closing := all.d.gate.Closing()
	end := func(context.Context) {
		for all.end(context.WithoutCancel(closing), own) != nil {
			if kit.Sleep(closing, kit.RetryPause(exchangeTimeout)) != nil {
				return
			}
		}
	}
	if !all.d.gate.Go(end) {
		end(closing)
	}
}

func (all *sessions) end(ctx context.Context, own Session) error {
	ctx, cancel := context.WithTimeout(ctx, all.d.timeout)
	defer cancel()
	return all.with.End(ctx, own)
}

// run opens s, and proves it a third of its TTL after the last proof, until it has ended, it was unused for a TTL, or
// the driver closes. A failed proof does not end it: only the service's own answer does.
func (all *sessions) run(s *session) {
	closing := all.d.gate.Closing()
	if !all.open(s) {
		return
	}
	if follower, ok := all.d.service.(Follower); ok {
		following, stop := context.WithCancel(closing)
		defer stop()
		all.d.gate.Go(func(context.Context) { all.follow(following, follower, s) })
	}
	timer := time.NewTimer(s.ttl / 3)
	defer timer.Stop()
	doubts := false
	for {
		select {
		case <-timer.C:
		case <-s.doubted:
			if !doubts {
				doubts = true
				timer.Reset(s.ttl / 4)
			}
			continue
		case <-s.Over():
			return
		case <-closing.Done():
			return // Close ends it
		}
		if all.table.Retire(s, s.ttl) {
			_ = all.end(closing, s.own) // without proofs it expires
			return
		}
		next := s.ttl / 3
		err := all.keep(closing, s)
		switch {
		case err == nil:
			next = max(next-all.d.clock.Now().Sub(s.provedAt()), s.ttl/20)
		case errors.Is(err, ErrNoSession):
			return
		case !errors.Is(err, ErrOutgrown):
			next = all.d.retryPause(s.ttl)
		}
		if doubts = doubts && all.abandonDoubts(s); doubts || s.isOutgrown() {
			next = min(next, s.ttl/8)
		}
		timer.Reset(next)
	}
}

// follow forwards the service's notifications of s. Renewals find losses that it misses.
func (all *sessions) follow(ctx context.Context, follower Follower, s *session) {
	for !s.Ended() {
		if follower.Follow(ctx, s.own, all.d.notify) == nil && ctx.Err() == nil {
			_ = all.prove(ctx, s, -1) // whatever was proved before
		}
		if s.Ended() || kit.Sleep(ctx, all.d.retryPause(s.ttl)) != nil {
			return
		}
	}
}

// keep proves s. The holds and waits on an outgrown session have to last until they have moved.
func (all *sessions) keep(ctx context.Context, s *session) error {
	if !s.isOutgrown() {
		return all.prove(ctx, s, s.ttl/3-s.ttl/20)
	}
	ctx, cancel := context.WithTimeout(ctx, all.d.timeout)
	defer cancel()
	err := all.with.Prove(ctx, s.own)
	return all.judge(ctx, s, err)
}

// prove returns when the session is proved by an exchange that was sent not more than age ago, or that was answered
// during the call: on a slow network that may be older. All callers that need a proof share one exchange.
func (all *sessions) prove(ctx context.Context, s *session, age time.Duration) error {
	s.mu.Lock()
	s.learn()
	switch {
	case s.Ended():
		s.mu.Unlock()
		return ErrNoSession
	// Before the check for outgrown: a proof is worth its full time, whatever came after it.
	case all.d.clock.Now().Sub(s.proved) <= age:
		s.mu.Unlock()
		return nil
	case s.isOutgrown():
		s.mu.Unlock()
		return ErrOutgrown
	}
	proved := s.proving
	if proved == nil {
		proved = make(chan struct{})
		s.proving = proved
		if !all.d.gate.Go(func(work context.Context) { all.proveOnce(work, s, proved) }) {
			s.proving = nil
			s.mu.Unlock()
			return backend.ErrClosed
		}
	}
	s.mu.Unlock()
	select {
	case <-proved:
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.failed
	case <-ctx.Done():
		return kit.Ended(ctx)
	}
}

// proveOnce is one exchange, for half of the TTL: without an answer there is time for another.
func (all *sessions) proveOnce(ctx context.Context, s *session, done chan struct{}) {
	ctx, cancel := context.WithTimeout(ctx, min(max(s.ttl/2, time.Second), all.d.timeout))
	defer cancel()
	defer context.AfterFunc(all.d.gate.Closing(), cancel)()
	r, _ := hedge(ctx, all.d, func(ctx context.Context, _ bool) reply[struct{}] {
		sent := all.d.clock.Now()
		return reply[struct{}]{sent: sent, err: all.with.Prove(ctx, s.own)}
	})
	err := all.judge(ctx, s, r.err)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil && r.sent > s.proved {
		s.proved = r.sent
	}
	s.failed, s.proving = err, nil
	close(done)
}

// judge acts on the result of a proof. A proof in doubt does no harm.
func (all *sessions) judge(ctx context.Context, s *session, err error) error {
	err = all.d.stepError(ctx, err)
	switch {
	case errors.Is(err, ErrNoSession):
		all.over(s, backend.ReasonSessionExpired)
	case errors.Is(err, ErrOutgrown):
		all.table.Abandon(s)
		s.outgrow()
	case err != nil && !kit.Classified(err) && all.d.service.Classify(err) == NoSession:
		all.over(s, backend.ReasonSessionExpired)
		return ErrNoSession
	case errors.Is(err, backend.ErrUnknown) || err != nil && !kit.Classified(err):
		return fmt.Errorf("%w: %v", backend.ErrUnavailable, err)
	}
	return err
}

// missing is called when the service does not know a session: it has ended, or the service has lost its history.
func (all *sessions) missing(ctx context.Context, s *session) {
	if prober, ok := all.d.service.(Prober); ok {
		_, _, _ = exchange(ctx, all.d, func(ctx context.Context) (struct{}, error) {
			return struct{}{}, prober.Probe(ctx)
		})
	}
	all.over(s, backend.ReasonSessionExpired)
}

// over notes that a session has ended, and notifies its holders.
func (all *sessions) over(s *session, reason backend.Reason) {
	if !all.table.End(s) {
		return
	}
	var lost []string
	all.mu.Lock()
	for id, h := range all.holds {
		if h.s != s {
			continue
		}
		if h.ended = reason; h.incarnation == "" {
			delete(all.holds, id) // late steps find no session
		} else {
			lost = append(lost, id)
		}
	}
	all.mu.Unlock()
	for _, id := range lost {
		all.d.notify(Push{What: PushLost, RequestID: id, Loss: backend.Loss{Reason: reason}})
	}
}

// overAll ends all sessions.
func (all *sessions) overAll(reason backend.Reason) {
	for _, s := range all.table.Live() {
		all.over(s, reason)
	}
}

// close ends all sessions, with one exchange each.
func (all *sessions) close(ctx context.Context) error {
	live := all.table.Live()
	errs := make([]error, len(live))
	var work sync.WaitGroup
	for i, s := range live {
		if all.table.End(s) && s.own != nil {
			work.Go(func() { errs[i] = all.end(ctx, s.own) })
		}
	}
	work.Wait()
	return errors.Join(errs...)
}
