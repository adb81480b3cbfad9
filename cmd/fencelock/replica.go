package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/gateway"
)

const (
	// replicaTTL is the time for which the lock of a replica outlives a dead process, in the range of the backend.
	replicaTTL = 10 * time.Second
	// replicaWait is the default of --replica-wait: enough for a replica that was killed.
	replicaWait = 30 * time.Second
)

// soleReplica is a replica where replicas do not share holds: it serves while it holds gateway.ReplicaLock.
type soleReplica struct {
	locks *fencelock.Client
	name  string
	log   *slog.Logger
	work  sync.WaitGroup

	mu    sync.Mutex // protects the following field
	lease *fencelock.Lease
}

// replicaError is the reason why a gateway does not start beside another one.
type replicaError struct {
	backend, other string
	wait           time.Duration
	held           error // wraps fencelock.ErrHeld
}

func (e *replicaError) Error() string {
	return fmt.Sprintf("another replica serves: %s. The %s backend ties a hold to the replica that was granted it, and no "+
		"other replica renews it, so one replica serves at a time, and this one has waited %v for its end (--replica-wait). "+
		"Stop it first, as a rolling restart of one replica does; or use a backend whose holds all replicas share: Redis or "+
		"the bundled server; or, for gateways that share no clients, give each a --replica-group", e.other, e.backend, e.wait)
}

func (e *replicaError) Unwrap() error { return e.held }

// replicaOwner names this process to another replica.
func replicaOwner(listen net.Addr) string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("gateway %s/%d, serving at %s", host, os.Getpid(), listen)
}

// replicaPatience is the time that a replica waits at its start for the end of another one, over all tries.
type replicaPatience struct {
	wait  time.Duration
	until time.Time // zero before the first refusal
}

// left returns how long the replica may still wait.
func (p *replicaPatience) left() time.Duration {
	if p.until.IsZero() {
		p.until = time.Now().Add(p.wait)
	}
	return time.Until(p.until)
}

// claimReplica makes this process the only replica of its group until ctx ends and release is called. It waits for the
// end of another replica, which it reports to waits, and returns a *replicaError when the wait times out.
func claimReplica(
	ctx context.Context, locks *fencelock.Client, group string, patience *replicaPatience, log *slog.Logger,
	waits func(error),
) (*soleReplica, error) {
	s := &soleReplica{locks: locks, name: gateway.ReplicaLock, log: log}
	if group != "" {
		s.name += " " + group
	}
	lease, err := locks.TryAcquire(ctx, s.name, s.ttl())
	if held := s.refusal(err, 0); held != nil {
		if left := patience.left(); left > 0 {
			log.Warn("another replica serves: this one waits for its end", "replica", held.other, "wait", left)
			waits(held)
			lease, err = locks.Acquire(ctx, s.name, s.ttl(), fencelock.WaitAtMost(left))
		}
	}
	if held := s.refusal(err, patience.wait); held != nil {
		return nil, held
	}
	if err != nil {
		return nil, err
	}
	s.lease = lease
	s.work.Go(func() { s.keep(ctx) })
	return s, nil
}

// checkReplica checks the options of replicas.
func (s *gatewaySettings) checkReplica() error {
	if s.patience.wait < 0 {
		return fmt.Errorf("--replica-wait %v: it is negative", s.patience.wait)
	}
	if s.replicaGroup == "" {
		return nil
	}
	if err := backend.ValidateName(gateway.ReplicaLock + " " + s.replicaGroup); err != nil {
		return fmt.Errorf("--replica-group: %w", err)
	}
	return nil
}

func (s *soleReplica) ttl() fencelock.AcquireOption {
	about := s.locks.Describe()
	ttl := max(replicaTTL, about.MinTTL)
	if about.MaxTTL > 0 {
		ttl = min(ttl, about.MaxTTL)
	}
	return fencelock.TTL(ttl)
}

// refusal returns the error for another replica that holds the lock; nil for other errors.
func (s *soleReplica) refusal(err error, waited time.Duration) *replicaError {
	var held *fencelock.HeldError
	if !errors.As(err, &held) {
		return nil
	}
	other := held.Holder
	if other == "" {
		other = "unknown"
	}
	return &replicaError{s.locks.Describe().Name, other, waited, err}
}

// current returns the lease that this replica got last.
func (s *soleReplica) current() *fencelock.Lease {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lease
}

// grants returns the reason why this replica grants no locks.
func (s *soleReplica) grants() error {
	if err := s.current().Err(); err != nil {
		return fmt.Errorf("this replica has lost %q, by which it knows that no other one serves, and waits for it: %w", s.name,
			err)
	}
	return nil
}

// keep acquires the lock again after each loss, until ctx ends.
func (s *soleReplica) keep(ctx context.Context) {
	for {
		select {
		case <-s.current().Context().Done():
		case <-ctx.Done():
			return
		}
		if ctx.Err() != nil {
			return
		}
		s.log.Error("not ready, and no locks are granted: this replica no longer knows that no other one serves",
			"lock", s.name, "err", s.current().Err())
		for pause := connectPause; ; pause = min(2*pause, maxConnectPause) {
			lease, err := s.locks.Acquire(ctx, s.name, s.ttl())
			if err == nil {
				s.mu.Lock()
				s.lease = lease
				s.mu.Unlock()
				break
			}
			s.log.Warn("the lock of this replica is not acquired", "lock", s.name, "err", err)
			select {
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
		}
		s.log.Info("this replica grants locks again", "lock", s.name)
	}
}

// release lets the next replica serve. The context of claimReplica has ended.
func (s *soleReplica) release() {
	s.work.Wait()
	closeQuietly(s.current().Release)
}
