// Package newdriver is where a driver of your own begins: copy it, put your service's steps in the place of Service,
// and make the suite pass. It fences, waits by polling, and tells who holds a name; CONTRIBUTING.md says what comes
// next.
package newdriver

import (
	"context"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/fencing"
)

const driverName = "newdriver"

// Driver is a backend.FencingDriver on a Service. All methods are safe for concurrent use.
type Driver struct {
	service *Service
	clock   backend.Clock
	gate    *kit.Gate
}

var (
	_ backend.FencingDriver = (*Driver)(nil)
	_ backend.Inspector     = (*Driver)(nil)
)

// New returns a driver on a service. It does no I/O.
func New(service *Service, clock backend.Clock) *Driver {
	return &Driver{service: service, clock: clock, gate: kit.NewGate()}
}

// IssuesFencingTokens promises what backend.FencingDriver says: the token is made in the step that grants, from a
// counter that the service never loses.
func (d *Driver) IssuesFencingTokens() backend.Driver { return d }

// Describe says what the driver can do.
func (d *Driver) Describe() backend.Description {
	return backend.Description{
		Name: driverName, Clock: d.clock, Exclusion: backend.ExclusionInProcess,
		Capabilities: backend.CapFencing | backend.CapInspect,
		MinTTL:       100 * time.Millisecond, TTLGranularity: time.Nanosecond, TokenSpace: driverName,
	}
}

// Acquire takes a name, or tries again until it is free.
func (d *Driver) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	g, err := d.acquire(ctx, r)
	return g, kit.CallError(driverName, "acquire", r.Name, err, classOf)
}

func (d *Driver) acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	if err := kit.Validate(d.Describe(), r); err != nil {
		return backend.Grant{}, err
	}
	if len(r.Metadata) > 0 {
		return backend.Grant{}, backend.ErrUnsupported
	}
	if err := d.gate.Enter(); err != nil {
		return backend.Grant{}, err
	}
	defer d.gate.Leave()
	ctx, free := d.gate.Bind(ctx)
	defer free()
	for queued := false; ; queued = true {
		if ctx.Err() != nil {
			return backend.Grant{}, kit.Ended(ctx)
		}
		sent := d.clock.Now() // before anything is sent: the validity counts from here
		e, taken := d.service.take(r.Name, Entry{RequestID: r.RequestID, HoldID: r.HoldID, Owner: r.Owner}, r.TTL)
		if taken {
			g := r.Grant()
			g.Token, g.Incarnation = fencing.Token(e.Token), strconv.FormatUint(e.Token, 10)
			g.SentAt, g.Queued = sent, queued
			return g, nil
		}
		if !r.Wait {
			return backend.Grant{}, &backend.HeldError{
				Name: r.Name, Holder: e.Owner, HoldID: e.HoldID, RetryAfter: time.Until(e.Ends),
			}
		}
		// A service that can tell when the name becomes free lets the waiter sleep until then; polls are the fallback.
		if err := kit.Sleep(ctx, 10*time.Millisecond+rand.N(10*time.Millisecond)); err != nil {
			return backend.Grant{}, err
		}
	}
}

// Renew prolongs holds. Over a network it takes one round trip for all of them, or for a hundred.
func (d *Driver) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	all := make([]backend.Renewal, len(grants))
	err := d.gate.Enter()
	if err == nil {
		defer d.gate.Leave()
		err = ctx.Err()
	}
	for i, g := range grants {
		renewed, failed := backend.Renewal{SentAt: d.clock.Now(), TTL: g.TTL}, err
		if failed == nil && !d.service.prolong(g.Name, g.RequestID, uint64(g.Token), g.TTL) {
			failed = &backend.NotHeldError{Name: g.Name, Reason: backend.ReasonExpired}
		}
		renewed.Err = kit.CallError(driverName, "renew", g.Name, failed, classOf)
		all[i] = renewed
	}
	return all
}

// Release gives a hold back, or what one request may have left.
func (d *Driver) Release(ctx context.Context, g backend.Grant) error {
	return kit.CallError(driverName, "release", g.Name, d.release(ctx, g), classOf)
}

func (d *Driver) release(ctx context.Context, g backend.Grant) error {
	if err := d.gate.Enter(); err != nil {
		return err
	}
	defer d.gate.Leave()
	if err := ctx.Err(); err != nil {
		return err
	}
	if g.Kind != backend.KindExclusive {
		return backend.ErrUnsupported
	}
	token, _ := strconv.ParseUint(g.Incarnation, 10, 64) // none: whatever the request left
	if !d.service.remove(g.Name, g.RequestID, token) {
		return &backend.NotHeldError{Name: g.Name}
	}
	return nil
}

// Look tells who holds a name.
func (d *Driver) Look(ctx context.Context, name string) (backend.State, error) {
	state := backend.State{Name: name}
	err := backend.ValidateName(name)
	if err == nil {
		err = d.gate.Enter()
	}
	if err == nil {
		defer d.gate.Leave()
		err = ctx.Err()
	}
	if err != nil {
		return state, kit.CallError(driverName, "look", name, err, classOf)
	}
	if e, held := d.service.read(name); held {
		state.Held = true
		state.Holders = []backend.Holder{{
			Owner: e.Owner, HoldID: e.HoldID, Token: fencing.Token(e.Token), ExpiresIn: time.Until(e.Ends),
		}}
	}
	return state, nil
}

// Close ends waiters with backend.ErrClosed, and waits for the calls in flight.
func (d *Driver) Close(ctx context.Context) error {
	d.gate.Close()
	return kit.CallError(driverName, "close", "", d.gate.Wait(ctx), classOf)
}

// classOf gives the service's own errors their class: backend.ErrUnavailable if nothing was done,
// backend.ErrMisconfigured if only an administrator can help. Of what it does not know nothing is certain.
func classOf(error) error { return nil }
