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
	"github.com/fencelock/fencelock/conformance/check"
)

// rivals are clients that contend for all names until stop. Their calls are recorded for package check.
type rivals struct {
	names    []string
	ttl      time.Duration
	recorder *check.Recorder
	register *register

	mu      sync.Mutex // protects the following fields
	clients []contender
	forgets bool // the service loses its data, and reports that to earlier clients

	ctx    context.Context // ends with stop
	cancel context.CancelFunc
	work   sync.WaitGroup
}

// rival is a client, with its driver.
type rival struct {
	*fencelock.Client
	driver backend.FencingDriver
}

// contender is a rival's client with recorded calls, and its driver.
type contender struct {
	*check.Locker
	driver backend.FencingDriver
}

func startRivals(clients []rival, names []string, ttl time.Duration) *rivals {
	r := &rivals{names: names, ttl: ttl, recorder: check.NewRecorder(check.Options{}), register: newRegister()}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	for i, c := range clients {
		r.clients = append(r.clients, contender{r.recorder.Wrap(label(i), c), c.driver})
	}
	for i := range clients {
		for _, name := range names {
			r.work.Go(func() { r.contend(i, name) })
		}
	}
	return r
}

// label is a client's name in the history.
func label(client int) string { return fmt.Sprintf("client-%d", client) }

// stop ends the contenders, and returns when the last contender has released.
func (r *rivals) stop() {
	r.cancel()
	r.work.Wait()
}

// contend acquires, holds and releases one name for one client, mostly briefly.
func (r *rivals) contend(client int, name string) {
	for r.ctx.Err() == nil {
		ctx, cancel := context.WithTimeout(r.ctx, r.ttl/4+rand.N(3*r.ttl))
		held, err := r.acquire(ctx, client, name)
		cancel()
		if err != nil {
			pause(r.ctx, rand.N(20*time.Millisecond)) // refused connections fail immediately
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

// forgetting announces that the service will lose its data, and will report that.
func (r *rivals) forgetting() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.forgets = true
}

// succeed replaces all clients with new clients, like programs that restart after their service has lost its data.
// The former clients keep their holds.
func (r *rivals) succeed(client func() rival) {
	for i := range r.clients {
		c := client()
		r.mu.Lock()
		r.clients[i] = contender{r.recorder.Wrap(label(i), c), c.driver}
		r.mu.Unlock()
	}
}

// client returns the current client with a number.
func (r *rivals) client(number int) contender {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.clients[number]
}

// held is a lease of a rival.
type held struct {
	turn
	r        *rivals
	driver   backend.FencingDriver
	recorded *check.Held
	lease    *fencelock.Lease
	unhook   func() bool
}

func (h *held) String() string {
	return fmt.Sprintf("the hold of %s by %s with token %v", h.name, label(h.client), h.lease.Token())
}

// acquire waits for a name. When it is granted, the client writes immediately.
func (r *rivals) acquire(ctx context.Context, client int, name string) (*held, error) {
	c := r.client(client)
	recorded, err := c.Acquire(ctx, name)
	if err != nil {
		r.register.failed("acquire", err, r.explains(err))
		return nil, err
	}
	h := &held{turn: turn{client, name}, r: r, driver: c.driver, recorded: recorded, lease: recorded.Lease()}
	h.unhook = context.AfterFunc(h.lease.Context(), func() { r.register.lost(name, h.lease.Token()) })
	r.register.granted(h.turn)
	h.write()
	return h, nil
}

// explains reports whether a fault may cause err.
func (r *rivals) explains(err error) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return errors.Is(err, fencelock.ErrUnavailable) || errors.Is(err, fencelock.ErrUnknown) ||
		errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) ||
		r.forgets && errors.Is(err, fencelock.ErrHistoryLost)
}

func (h *held) write() { h.r.register.write(h.name, h.lease.Token(), h.lease.Err) }

// during holds for d, or until the lock is lost or ctx ends, and then writes.
func (h *held) during(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-h.lease.Context().Done():
	case <-ctx.Done():
	}
	h.write()
}

// confirm inspects the name, if the driver can. The recorder keeps the answer.
func (h *held) confirm(ctx context.Context) {
	inspector, ok := h.driver.(backend.Inspector)
	if !ok {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, h.r.ttl)
	defer cancel()
	if _, err := h.r.recorder.Ask(ctx, label(h.client), inspector, h.name); err == nil && h.lease.Err() == nil {
		h.r.register.answered()
	}
}

// release releases the lock, and takes at most d.
func (h *held) release(ctx context.Context, d time.Duration) error {
	told := !h.unhook()
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	err := h.recorded.Release(ctx)
	switch {
	case err == nil:
	case errors.Is(err, fencelock.ErrLost):
		// A lost lease alone is no violation: a repeated release, after a lost answer, finds no hold.
		if !told {
			h.r.register.lost(h.name, h.lease.Token())
		}
	default:
		h.r.register.failed("release", err, h.r.explains(err))
	}
	return err
}

// lost waits until the holder is notified of the loss.
func (h *held) lost(ctx context.Context) error {
	select {
	case <-h.lease.Context().Done():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%v was not notified of its loss", h)
	}
}

// survives waits until the hold has been renewed beyond the given time.
func (h *held) survives(ctx context.Context, at time.Time) error {
	for h.lease.Deadline().Before(at) {
		if err := h.lease.Err(); err != nil {
			return fmt.Errorf("%v did not survive: %w", h, err)
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%v was not renewed", h)
		}
		pause(ctx, 10*time.Millisecond) // no notification of a renewal
	}
	return h.lease.Err()
}

// turns waits until a later grant has met every condition.
func (r *rivals) turns(ctx context.Context, what string, conditions map[string]func(turn) bool) error {
	before, _ := r.register.count()
	for {
		now, changed := r.register.count()
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

// goOn waits until each of names is granted again, to a client that fits accepts.
func (r *rivals) goOn(ctx context.Context, names []string, fits func(client int) bool) error {
	conditions := map[string]func(turn) bool{}
	for _, name := range names {
		conditions["the name "+name] = func(k turn) bool { return k.name == name && fits(k.client) }
	}
	return r.turns(ctx, "during the fault", conditions)
}

// everybody waits until each client and each name has had a turn.
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
