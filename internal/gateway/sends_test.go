package gateway

import (
	"context"
	"iter"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/internal/principal"
	"github.com/fencelock/fencelock/internal/rules"
)

// deciding is a lock service with rules, which gets the principal of each call. It records the principals of the calls
// that require a right.
type deciding struct {
	*memory.Driver
	all *rules.Rules

	mu      sync.Mutex // protects the following field
	callers []principal.Principal
}

// taken returns the principals of the calls since the previous taken.
func (d *deciding) taken() []principal.Principal {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := d.callers
	d.callers = nil
	return all
}

// may decides as the bundled server does for a gateway that may act for others with every name.
func (d *deciding) may(ctx context.Context, v rules.Verb, names ...string) error {
	who := principal.CallsFor(ctx)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.callers = append(d.callers, who)
	for _, name := range names {
		if who == "" || v == rules.Force || !d.all.Decide(who, v, name).Allowed {
			return backend.ErrDenied
		}
	}
	return nil
}

func (d *deciding) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	if err := d.may(ctx, rules.Acquire, r.Name); err != nil {
		return backend.Grant{}, err
	}
	return d.Driver.Acquire(ctx, r)
}

func (d *deciding) AcquireAll(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	for i := range rs {
		if err := d.may(ctx, rules.Acquire, rs[i].Name); err != nil {
			return nil, err
		}
	}
	return d.Driver.AcquireAll(ctx, rs)
}

func (d *deciding) Look(ctx context.Context, name string) (backend.State, error) {
	if err := d.may(ctx, rules.Read, name); err != nil {
		return backend.State{}, err
	}
	return d.Driver.Look(ctx, name)
}

func (d *deciding) List(ctx context.Context, prefix string) iter.Seq2[backend.State, error] {
	return func(yield func(backend.State, error) bool) {
		for s, err := range d.Driver.List(ctx, prefix) {
			if err == nil && d.may(ctx, rules.Read, s.Name) != nil {
				continue
			}
			if !yield(s, err) {
				return
			}
		}
	}
}

func (d *deciding) Watch(ctx context.Context, name string, since uint64) iter.Seq2[backend.Change, error] {
	if err := d.may(ctx, rules.Read, name); err != nil {
		return func(yield func(backend.Change, error) bool) { yield(backend.Change{}, err) }
	}
	return d.Driver.Watch(ctx, name, since)
}

func (d *deciding) ForceRelease(ctx context.Context, r backend.ForceRequest) error {
	if err := d.may(ctx, rules.Force, r.Name); err != nil {
		return err
	}
	return d.Driver.ForceRelease(ctx, r)
}

// If the lock service decides, it gets the principal of each call that requires a right, and the client gets its
// answer.
func TestServiceGetsThePrincipal(t *testing.T) {
	names := []string{"acquirer", "reader", "forcer", "peer", "other", "auditor"}
	for _, name := range append([]string{""}, names...) {
		withRulesAt(t, matrixRules, names, true, func(t *testing.T, d *ruled) {
			for pattern, row := range matrix {
				if strings.HasPrefix(row.path, "/v1") {
					d.sends(pattern, name)
				}
			}
		})
	}
}

// sends uses a route of the matrix with the token of a name.
func (d *ruled) sends(pattern, name string) {
	t, row := d.t, matrix[pattern]
	sent := principal.Principal("token:" + name)
	if name == "" {
		sent = "address:127.0.0.1"
	}
	for _, s := range d.state(t) {
		if err := d.driver.ForceRelease(t.Context(), backend.ForceRequest{Name: s.Name, Reason: "the next route"}); err != nil {
			t.Fatal(err)
		}
	}
	held := d.granted(d.as("acquirer", "POST", "/v1/locks/a%2Fheld/acquire", acquireOf("holder", "")))
	d.service.taken()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second) // ends a watch
	defer cancel()
	got := d.send(ctx, row.method, row.path, strings.ReplaceAll(row.body, "TOKEN", held.LockToken), d.bears(name))
	may := row.may == nil || slices.Contains(row.may, name)
	switch pattern {
	case "GET /v1/locks", "DELETE /v1/locks/{name}/waits/{requestId}":
		may = true // it shows or ends only what belongs to the client
	case "POST /v1/locks/{name}/force-release":
		may = false
	}
	if denied := got.status == http.StatusForbidden; denied == may {
		t.Errorf("%s for %q: %d %s", pattern, name, got.status, got.text)
	}
	reads := slices.Contains([]string{"reader", "peer", "auditor"}, name)
	if !reads && strings.Contains(got.text, "holder") {
		t.Errorf("%s tells %q who holds what: %s", pattern, name, got.text)
	}
	for _, who := range d.service.taken() {
		if who != sent {
			t.Errorf("%s for %q: the service gets %q, want %q", pattern, name, who, sent)
		}
	}
}
