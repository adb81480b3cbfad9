package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
)

// This file connects "fencelock run", acquires its locks and releases them.

const (
	// attemptTime bounds an attempt to connect, and an acquire that does not wait.
	attemptTime = 10 * time.Second
	// connectPause is the pause between two attempts to connect; it doubles up to maxConnectPause.
	connectPause    = 250 * time.Millisecond
	maxConnectPause = 2 * time.Second
	// forever waits indefinitely for a service.
	forever = time.Duration(math.MaxInt64)
)

// connect opens the lock service. With --wait it retries until the service is reachable.
func (s *runSettings) connect(ctx context.Context) (*fencelock.Client, error) {
	began := time.Now()
	for pause := connectPause; ; pause = min(2*pause, maxConnectPause) {
		limit := attemptTime
		if s.wait > 0 {
			limit = min(limit, max(s.wait-time.Since(began), time.Millisecond))
		}
		locks, err := s.open(ctx, limit)
		again := errors.As(err, new(*unansweredError)) || errors.Is(err, fencelock.ErrUnavailable)
		if !again || ctx.Err() != nil {
			return locks, err
		}
		left := s.wait - time.Since(began)
		switch {
		case left < pause:
			return nil, err
		case pause == connectPause && s.wait == forever:
			s.complain("%v; trying again", err)
		case pause == connectPause:
			s.complain("%v; trying again for %v", err, left.Round(100*time.Millisecond))
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(pause):
		}
	}
}

func (s *runSettings) open(ctx context.Context, limit time.Duration) (*fencelock.Client, error) {
	opening, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	locks, err := fencelock.Open(opening, underURL(s.backend, os.Getenv(underVariable)), s.tier, &fencelock.Options{
		TTL: s.ttl, Owner: s.owner, Observer: fencelock.ObserverFunc(s.observe),
		// The lease ends that much earlier, so that the time between TERM and KILL passes while no other client can hold the
		// lock. A lease that ends at the last moment would leave the command alive beside the next holder.
		StopEarly: s.killAfter,
	})
	if err != nil && opening.Err() != nil && ctx.Err() == nil {
		err = &unansweredError{s.listed(), limit.Round(time.Millisecond), err}
	}
	return locks, err
}

// underURL adds the holds that this process runs under to the URL of a cluster of the bundled server, the only
// service that searches for deadlocks.
func underURL(url, under string) string {
	if under == "" || !strings.HasPrefix(url, "fencelock://") && !strings.HasPrefix(url, "fencelocks://") {
		return url
	}
	separator := "?"
	if strings.Contains(url, "?") {
		separator = "&"
	}
	return url + separator + "under=" + under
}

// unansweredError means that the service did not answer in time.
type unansweredError struct {
	names  string
	within time.Duration
	err    error
}

func (e *unansweredError) Error() string {
	return fmt.Sprintf("lock %s: the service did not answer within %v, so it is unknown whether the lock is held: %v",
		e.names, e.within, e.err)
}

func (e *unansweredError) Unwrap() error { return e.err }

// acquire connects and acquires the locks. The client is nil on error.
func (s *runSettings) acquire(ctx context.Context) (*fencelock.Client, fencelock.Leases, error) {
	began := time.Now()
	locks, err := s.connect(ctx)
	if err != nil {
		return nil, nil, err
	}
	options := s.options
	switch {
	case s.try:
		trying, cancel := context.WithTimeout(ctx, attemptTime)
		defer cancel()
		ctx = trying
	case s.wait > 0:
		left := max(s.wait-time.Since(began), time.Millisecond)
		options = append(slices.Clone(options), fencelock.WaitAtMost(left))
	}
	leases, err := s.take(ctx, locks, options)
	if err != nil {
		s.close(locks, releaseTime)
		return nil, nil, err
	}
	return locks, leases, nil
}

// take acquires one name, or several in one call.
func (s *runSettings) take(
	ctx context.Context, locks *fencelock.Client, options []fencelock.AcquireOption,
) (fencelock.Leases, error) {
	if len(s.names) > 1 {
		if s.try {
			return locks.TryAcquireAll(ctx, s.names, options...)
		}
		return locks.AcquireAll(ctx, s.names, options...)
	}
	acquire := locks.Acquire
	if s.try {
		acquire = locks.TryAcquire
	}
	lease, err := acquire(ctx, s.names[0], options...)
	if err != nil {
		return nil, err
	}
	return fencelock.Leases{lease}, nil
}

// The time bounds of the cleanup. After a loss there is little to do: the service's leftovers end with a TTL that is
// almost over, and the service is likely unreachable.
const (
	releaseTime = 5 * time.Second
	lostTime    = 500 * time.Millisecond
)

// release releases the locks, whatever signals arrive meanwhile, and reports whether one had been lost.
func (s *runSettings) release(locks *fencelock.Client, leases fencelock.Leases) (lost bool) {
	ctx, cancel := context.WithTimeout(context.Background(), releaseTime)
	defer cancel()
	err := leases.Release(ctx)
	if errors.Is(err, fencelock.ErrLost) {
		s.close(locks, lostTime)
		return true
	}
	if closed := locks.Close(ctx); err != nil && closed != nil { // Close has retried
		s.complain("the release of %s was not confirmed, it ends with its TTL of %v: %v", s.listed(), s.ttl, err)
	}
	return false
}

// close closes a client without holds. If it fails, a request that may have reached the service ends with its TTL.
func (s *runSettings) close(locks *fencelock.Client, within time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	if err := locks.Close(ctx); err != nil {
		s.report("%v", err)
	}
}

// listed formats the names for a message.
func (s *runSettings) listed() string {
	quoted := make([]string, len(s.names))
	for i, name := range s.names {
		quoted[i] = fmt.Sprintf("%q", name)
	}
	return strings.Join(quoted, ", ")
}

// narrator turns events into few messages.
type narrator struct {
	mu      sync.Mutex             // protects the following fields
	waits   map[string]*time.Timer // by name: names the holder when the wait takes long
	suspect map[string]time.Duration
}

// waitingTime is the duration of a wait after which a message names the holder.
const waitingTime = time.Second

// observe reports what happens to the locks.
func (s *runSettings) observe(_ context.Context, e fencelock.Event) {
	n := &s.narrator
	n.mu.Lock()
	defer n.mu.Unlock()
	if t := n.waits[e.Name]; t != nil && e.Type != fencelock.EventWaiting {
		t.Stop()
		delete(n.waits, e.Name)
	}
	switch e.Type {
	case fencelock.EventWaiting:
		if n.waits == nil {
			n.waits = map[string]*time.Timer{}
		}
		n.waits[e.Name] = time.AfterFunc(waitingTime-e.Wait, func() {
			s.complain("waiting for lock %q, %s", e.Name, holderText(e.Holder, e.Time))
		})
	case fencelock.EventAcquired:
		s.report("lock %q was acquired after %v", e.Name, e.Wait.Round(time.Millisecond))
	case fencelock.EventSuspect:
		// Few lines, however many retries: the next one when half of the time is left.
		last, before := n.suspect[e.Name]
		if before && e.Left > last/2 {
			return
		}
		if n.suspect == nil {
			n.suspect = map[string]time.Duration{}
		}
		n.suspect[e.Name] = e.Left
		s.complain("lock %q cannot be renewed and is lost in %v: %v", e.Name, e.Left.Round(time.Millisecond), e.Err)
	case fencelock.EventRenewed:
		if _, before := n.suspect[e.Name]; before {
			delete(n.suspect, e.Name)
			s.complain("lock %q is renewed again", e.Name)
		}
	case fencelock.EventReleased:
		if e.Err == nil {
			s.report("lock %q was released after %v", e.Name, e.Held.Round(time.Millisecond))
		}
	}
}

// holderText names a holder.
func holderText(h *fencelock.Holder, now time.Time) string {
	switch {
	case h == nil:
		return "which somebody else holds"
	case h.Since.IsZero():
		return "held by " + h.Owner
	}
	return fmt.Sprintf("held by %s since %s (%v)", h.Owner, h.Since.Local().Format(time.RFC3339),
		max(0, now.Sub(h.Since)).Round(time.Second))
}
