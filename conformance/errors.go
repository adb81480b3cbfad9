package conformance

import (
	"context"
	"errors"
	"time"

	"github.com/fencelock/fencelock/backend"
)

var errorClauses = []Clause{
	{
		ID: "E1", Group: "errors", Slug: "errors-name-the-call", run: errorsNameTheCall,
		Rule: "an error identifies the call that failed: a *CallError with Driver, Call and Name is in its chain",
	},
	{
		ID: "E2", Group: "errors", Slug: "answers-are-distinct", run: answersAreDistinct,
		Rule: "held, not held, unavailable, unknown, unsupported and the end of the context are distinct errors",
	},
	{
		ID: "E3", Group: "errors", Slug: "refused-is-unavailable", needs: needLink, run: refusedIsUnavailable,
		Rule: "if the driver cannot connect, it has sent no request, and the error is ErrUnavailable",
	},
	{
		ID: "E4", Group: "errors", Slug: "closed-answers-closed", run: closedAnswersClosed,
		Rule: "Close ends waiters with ErrClosed, later calls return ErrClosed, and a second Close has no effect",
	},
}

func (t *trial) namesCall(err error, call, name string) {
	var e *backend.CallError
	switch {
	case err == nil:
		t.Errorf("%s of %q succeeded, want an error", call, name)
	case !errors.As(err, &e):
		t.Errorf("%s of %q = %v, without a *CallError in the chain", call, name, err)
	case e.Call != call || e.Name != name || e.Driver == "":
		t.Errorf("%s of %q: CallError says driver %q, call %q, name %q", call, name, e.Driver, e.Call, e.Name)
	}
}

func errorsNameTheCall(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()
	g := t.take(a, t.request(name), "of a free name")
	_, err := t.try(b, t.request(name))
	t.namesCall(err, "acquire", name)
	r := t.request(name)
	r.Wait = true
	_, err = b.Acquire(t.within(100*time.Millisecond), r)
	t.namesCall(err, "acquire", name)
	t.namesCall(b.Release(t.within(slack), t.request(name).Grant()), "release", name)
	forged := g
	forged.RequestID = backend.NewRequestID()
	t.namesCall(t.renew(b, forged).Err, "renew", name)
	t.release(a, g, "by the holder")
}

// answers are the error classes; each error has exactly one.
var answers = map[string]error{
	"ErrHeld": backend.ErrHeld, "ErrNotHeld": backend.ErrNotHeld, "ErrUnavailable": backend.ErrUnavailable,
	"ErrUnsupported": backend.ErrUnsupported, "ErrClosed": backend.ErrClosed,
	"context.DeadlineExceeded": context.DeadlineExceeded, "context.Canceled": context.Canceled,
	"ErrMisconfigured": backend.ErrMisconfigured, "ErrDeadlock": backend.ErrDeadlock,
	"ErrLimitMismatch": backend.ErrLimitMismatch, "ErrQueueFull": backend.ErrQueueFull,
}

func (t *trial) only(err error, want, when string) {
	for name, class := range answers {
		switch is := errors.Is(err, class); {
		case name == want && !is:
			t.Errorf("%s = %v, want %s", when, err, want)
		case name != want && is:
			t.Errorf("%s = %v, which is %s beside %s", when, err, name, want)
		}
	}
}

func answersAreDistinct(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()
	g := t.take(a, t.request(name), "of a free name")
	_, err := t.try(b, t.request(name))
	t.only(err, "ErrHeld", "attempt at a held name")
	if held := (*backend.HeldError)(nil); !errors.As(err, &held) {
		t.Errorf("attempt at a held name = %v, without a *HeldError in the chain", err)
	} else if held.Holder != "" && held.Holder != g.Owner {
		t.Errorf("HeldError.Holder = %q, want %q", held.Holder, g.Owner)
	} else if held.RetryAfter < 0 || held.RetryAfter > g.TTL+time.Second {
		t.Errorf("HeldError.RetryAfter = %v with a TTL of %v", held.RetryAfter, g.TTL)
	}
	if errors.Is(err, backend.ErrUnknown) {
		t.Errorf("attempt at a held name = %v, which is ErrUnknown beside ErrHeld", err)
	}
	r := t.request(name)
	r.Wait = true
	_, err = b.Acquire(t.within(time.Second), r) // long enough for every server of a healthy service to answer
	t.only(err, "context.DeadlineExceeded", "waiter past its deadline")
	err = b.Release(t.within(slack), t.request(name).Grant())
	t.only(err, "ErrNotHeld", "release of a request that does not hold")
	forged := g
	forged.RequestID = backend.NewRequestID()
	t.only(t.renew(b, forged).Err, "ErrNotHeld", "renewal of a request that does not hold")
	t.release(a, g, "by the holder")
}

func refusedIsUnavailable(t *trial) {
	d, link := t.linked()
	link.Refuse()
	for _, wait := range []bool{false, true} {
		r := t.request(t.name())
		r.Wait = wait
		began := time.Now()
		_, err := d.Acquire(t.within(slack), r)
		if !errors.Is(err, backend.ErrUnavailable) || errors.Is(err, backend.ErrUnknown) {
			t.Errorf("acquire (wait %v) without a connection = %v, want ErrUnavailable", wait, err)
		}
		if took := time.Since(began); took > slack+grace {
			t.Latef("acquire (wait %v) without a connection took %v", wait, took)
		}
		t.namesCall(err, "acquire", r.Name)
	}
	link.Pass()
	if err := t.settled(func(ctx context.Context) error {
		g, err := d.Acquire(ctx, t.request(t.name()))
		if err == nil {
			t.release(d, g, "after the connection came back")
		}
		return err
	}); err != nil {
		t.Errorf("acquire after the connection came back = %v", err)
	}
}

func closedAnswersClosed(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()
	g := t.take(a, t.request(name), "of a free name")
	h := t.take(b, t.request(t.name()), "of a free name")
	w := t.wait(t.within(10*slack), b, t.request(name))
	t.queued(a, name, 1)
	if err := closeWithin(b, slack); err != nil {
		t.Errorf("Close = %v", err)
	}
	if !w.ended(slack) {
		t.FatalLatef("Close did not end a waiter")
	}
	if !errors.Is(w.err, backend.ErrClosed) {
		t.Errorf("waiter of a closed driver = %v, want ErrClosed", w.err)
	}
	if err := closeWithin(b, slack); err != nil {
		t.Errorf("second Close = %v, want nil", err)
	}
	if _, err := t.try(b, t.request(name)); !errors.Is(err, backend.ErrClosed) {
		t.Errorf("acquire after Close = %v, want ErrClosed", err)
	}
	if r := t.renew(b, h); !errors.Is(r.Err, backend.ErrClosed) {
		t.Errorf("renewal after Close = %v, want ErrClosed", r.Err)
	}
	if err := b.Release(t.within(slack), h); !errors.Is(err, backend.ErrClosed) {
		t.Errorf("release after Close = %v, want ErrClosed", err)
	}
	t.release(a, g, "by a holder of another driver")
	t.opensWithin(a, name, promptly, "after the waiter's driver was closed")
	// Close does not release the driver's hold; a releases it.
	if err := a.Release(t.within(slack), h); err != nil && !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("release of the closed driver's hold = %v", err)
	}
}
