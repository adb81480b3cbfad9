package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
)

// rivals are clients that contend for all names until stop.
type rivals struct {
	clients []*fencelock.Client
	drivers []backend.FencingDriver // of the clients
	names   []string
	ttl     time.Duration
	record  *record

	ctx    context.Context // ends with stop
	cancel context.CancelFunc
	work   sync.WaitGroup
}

func startRivals(clients []*fencelock.Client, drivers []backend.FencingDriver, names []string, ttl time.Duration) *rivals {
	r := &rivals{clients: clients, drivers: drivers, names: names, ttl: ttl, record: newRecord()}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	for i := range clients {
		for _, name := range names {
			r.work.Go(func() { r.contend(i, name) })
		}
	}
	return r
}

// stop ends the contenders, and returns when the last one has released.
func (r *rivals) stop() {
	r.cancel()
	r.work.Wait()
}

// contend acquires, holds and releases one name for one client, most of the time briefly.
func (r *rivals) contend(client int, name string) {
	for r.ctx.Err() == nil {
		ctx, cancel := context.WithTimeout(r.ctx, r.ttl/4+rand.N(3*r.ttl))
		held, err := r.acquire(ctx, client, name)
		cancel()
		if err != nil {
			pause(r.ctx, rand.N(20*time.Millisecond)) // refused connections fail at once
			continue
		}
		length := rand.N(15 * time.Millisecond)
		long := rand.N(20) == 0
		if long {
			length = rand.N(r.ttl / 4)
		}
		held.during(r.ctx, length)
		if long {
			held.confirm(held.lease.Context())
		}
		held.release(context.Background(), r.ttl)
	}
}

// held is a lease that is recorded.
type held struct {
	*hold
	r      *rivals
	lease  *fencelock.Lease
	unhook func() bool
}

// acquire waits for a name. The one who gets it writes at once.
func (r *rivals) acquire(ctx context.Context, client int, name string) (*held, error) {
	l, err := r.clients[client].Acquire(ctx, name)
	if end, ok := ctx.Deadline(); ok && time.Since(end) > patience {
		r.record.failed("acquire", fmt.Errorf("client %d waited for %s until %v after its deadline", client, name, time.Since(end)), false)
	}
	if err != nil {
		r.record.failed("acquire", err, errors.Is(err, fencelock.ErrUnavailable) || errors.Is(err, fencelock.ErrUnknown) ||
			errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled))
		return nil, err
	}
	h := &held{hold: r.record.granted(client, name, l.Token(), l), r: r, lease: l}
	h.unhook = context.AfterFunc(l.Context(), func() { r.record.ended(h.hold, true) })
	r.record.write(h.hold)
	return h, nil
}

// during holds for d, unless the lock is lost before or ctx ends, and writes at the end.
func (h *held) during(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-h.lease.Context().Done():
	case <-ctx.Done():
	}
	h.r.record.write(h.hold)
}

// confirm asks the service who holds the name, if its driver can ask, and notes the answer, if one comes.
func (h *held) confirm(ctx context.Context) {
	inspector, ok := h.r.drivers[h.client].(backend.Inspector)
	if !ok {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, h.r.ttl)
	defer cancel()
	if info, err := inspector.Holder(ctx, h.name); err == nil {
		h.r.record.asked(h.hold, info)
	}
}

// release gives the lock back, for at most d. The belief ends before.
func (h *held) release(ctx context.Context, d time.Duration) error {
	h.r.record.ended(h.hold, !h.unhook()) // nothing is changed if the loss was told before
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	err := h.lease.Release(ctx)
	switch {
	case err == nil:
	case errors.Is(err, fencelock.ErrLost):
		h.r.record.lostAtRelease(h.hold)
	default:
		h.r.record.failed("release", err, errors.Is(err, fencelock.ErrUnavailable) || errors.Is(err, fencelock.ErrUnknown) ||
			errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled))
	}
	return err
}

// lost waits until the holder is told that the lock is lost.
func (h *held) lost(ctx context.Context) error {
	select {
	case <-h.lease.Context().Done():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%v was not told of its loss", h.hold)
	}
}

// survives waits until the hold was renewed for after the given time.
func (h *held) survives(ctx context.Context, at time.Time) error {
	for h.lease.Deadline().Before(at) {
		if err := h.lease.Err(); err != nil {
			return fmt.Errorf("%v did not survive: %w", h.hold, err)
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%v was not renewed", h.hold)
		}
		pause(ctx, 10*time.Millisecond) // nobody tells of a renewal
	}
	return h.lease.Err()
}

// turns waits until every condition has seen a grant from now on.
func (r *rivals) turns(ctx context.Context, what string, conditions map[string]func(turn) bool) error {
	before, _ := r.record.count()
	for {
		now, changed := r.record.count()
		missing := ""
		for name, fits := range conditions {
			met := false
			for k, n := range now {
				met = met || n > before[k] && fits(k)
			}
			if !met {
				missing = name
			}
		}
		if missing == "" {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%s: no grant for %s: %w", what, missing, ctx.Err())
		}
	}
}

// goOn waits until each of names is granted once more, to one of the clients that may fits.
func (r *rivals) goOn(ctx context.Context, names []string, fits func(client int) bool) error {
	conditions := map[string]func(turn) bool{}
	for _, name := range names {
		conditions["the name "+name] = func(k turn) bool { return k.name == name && fits(k.client) }
	}
	return r.turns(ctx, "during the fault", conditions)
}

// everybody waits until each client and each name had a turn.
func (r *rivals) everybody(ctx context.Context) error {
	conditions := map[string]func(turn) bool{}
	for _, name := range r.names {
		conditions["the name "+name] = func(k turn) bool { return k.name == name }
	}
	for i := range r.clients {
		conditions[fmt.Sprintf("client %d", i)] = func(k turn) bool { return k.client == i }
	}
	return r.turns(ctx, "after the fault", conditions)
}
