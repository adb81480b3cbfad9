// Package newdriver is where a driver of your own begins: copy it, put your service's steps in the place of Service,
// and make the suite pass. It is a binding of backend/engine: it fences, waits by polling, and shows who holds a name.
// CONTRIBUTING.md says what comes next.
package newdriver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/fencing"
)

// Driver is a backend.FencingDriver on a Service.
type Driver struct{ *engine.Driver }

var _ backend.FencingDriver = (*Driver)(nil)

// New returns a driver for the service at a URL. It does no I/O.
func New(url string) *Driver {
	return &Driver{engine.New(&binding{url: url, http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 16}}})}
}

// IssuesFencingTokens promises what backend.FencingDriver says: the token is made in the step that grants, from a
// counter that the service never loses.
func (d *Driver) IssuesFencingTokens() backend.Driver { return d }

// binding says what one exchange with the service does. Everything else is the engine's.
type binding struct {
	url  string
	http *http.Client

	mu    sync.Mutex // protects the following field
	space string     // of the first answer
}

func (b *binding) Describe() backend.Description {
	b.mu.Lock()
	defer b.mu.Unlock()
	return backend.Description{
		Name: "newdriver", Clock: backend.SystemClock(), Exclusion: backend.ExclusionDurableServer,
		Capabilities: backend.CapFencing | backend.CapInspect,
		MinTTL:       100 * time.Millisecond, TTLGranularity: time.Nanosecond, TokenSpace: b.space,
		Polling: 100 * time.Millisecond, // the service cannot notify
		Shows:   backend.Shows{Look: backend.StateFields{ExpiresIn: true}},
	}
}

// Classify knows the errors that rule out any effect: the connection was never made. The effect of others is unknown.
func (b *binding) Classify(err error) engine.Class {
	if op := (*net.OpError)(nil); errors.As(err, &op) && op.Op == "dial" {
		return engine.NotDone
	}
	return engine.Unknown
}

func (b *binding) Ping(ctx context.Context) error {
	_, err := b.send(ctx)
	return err
}

// Enter takes the name, or finds who has it. The nonce is that of a new hold.
func (b *binding) Enter(ctx context.Context, r engine.Entering) (p engine.Position, err error) {
	if len(r.Metadata) > 0 {
		return p, backend.ErrUnsupported
	}
	mine := Entry{RequestID: r.RequestID, HoldID: r.HoldID, Owner: r.Owner, Nonce: fencing.NewNonce()}
	all, err := b.send(ctx, step{Do: "take", Name: r.Name, Entry: mine, TTL: r.TTL})
	switch {
	case err != nil:
		return p, err
	case all[0].Done:
		e := all[0].Entry
		return engine.Position{
			Held: true, Token: fencing.Token(e.Token), Nonce: e.Nonce, Incarnation: strconv.FormatUint(e.Token, 10),
		}, nil
	}
	p.Holder = &backend.HeldError{Holder: all[0].Entry.Owner, HoldID: all[0].Entry.HoldID, RetryAfter: all[0].Left}
	return p, nil
}

func (b *binding) Leave(ctx context.Context, l engine.Leaving) (engine.Left, error) {
	all, err := b.send(ctx, stepOf("remove", l.Grant))
	return engine.Left{Was: err == nil && all[0].Done}, err
}

func (b *binding) Extend(ctx context.Context, _ engine.Session, holds []engine.Holding) ([]engine.Outcome, error) {
	steps := make([]step, len(holds))
	for i, h := range holds {
		steps[i] = stepOf("prolong", h.Grant)
	}
	all, err := b.send(ctx, steps...)
	out := make([]engine.Outcome, len(all))
	for i := range all {
		out[i] = engine.Outcome{Gone: !all[i].Done}
	}
	return out, err
}

func stepOf(do string, g backend.Grant) step {
	token, _ := strconv.ParseUint(g.Incarnation, 10, 64) // without one: any entry of the request
	return step{Do: do, Name: g.Name, Entry: Entry{RequestID: g.RequestID, Token: token}, TTL: g.TTL}
}

func (b *binding) Look(ctx context.Context, name string) (backend.State, error) {
	state := backend.State{Name: name}
	all, err := b.send(ctx, step{Do: "read", Name: name})
	if err == nil && all[0].Done {
		e := all[0].Entry
		state.Held, state.Holders = true, []backend.Holder{
			{Owner: e.Owner, HoldID: e.HoldID, Token: fencing.Token(e.Token), Nonce: e.Nonce, ExpiresIn: all[0].Left},
		}
	}
	return state, err
}

func (b *binding) Names(context.Context, string, string) ([]backend.State, string, error) {
	return nil, "", backend.ErrUnsupported
}

func (b *binding) Close(context.Context) error {
	b.http.CloseIdleConnections()
	return nil
}

// send is one exchange. net/http repeats no POST of which anything was written.
func (b *binding) send(ctx context.Context, steps ...step) ([]answer, error) {
	b.mu.Lock()
	known := b.space
	b.mu.Unlock()
	body, err := json.Marshal(request{known, steps})
	if err != nil {
		return nil, err
	}
	post, err := http.NewRequestWithContext(ctx, http.MethodPost, b.url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	response, err := b.http.Do(post)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	var out answers
	if err := json.NewDecoder(response.Body).Decode(&out); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.space != "" && b.space != out.Space {
		return nil, &backend.HistoryError{What: "token space", Was: b.space, Now: out.Space}
	}
	if len(out.All) != len(steps) {
		return nil, fmt.Errorf("%s, and %d answers to %d steps", response.Status, len(out.All), len(steps))
	}
	b.space = out.Space
	return out.All, nil
}
