package engine

import (
	"context"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// One of several endpoints of a service may not respond. A step without an answer for hedgeAfter is sent again, to
// another endpoint, and the first answer counts. Two sendings are not enough when the leader of a cluster stops: one may
// have lost its step to that leader, another one is that leader, and the third has no leader yet.
//
// The other steps may take effect at any later time. So steps are hedged only with Sessions, where Leave can forbid
// it, and never if a repetition would have another effect: Force. A second session that opens is ended.

// Replicated is for services with several endpoints and a client that sends each request to another one.
type Replicated interface {
	// Endpoints returns their number.
	Endpoints() int
}

const (
	// hedgeAfter is the time without an answer after which a step is repeated.
	hedgeAfter = 500 * time.Millisecond
	// hedgeRetry is that time when another sending has failed.
	hedgeRetry = hedgeAfter / 5
	// maxSendings bounds the sendings of a step, and maxUnanswered the sendings without an answer at a time.
	maxSendings   = 5
	maxUnanswered = 3
)

// hedges reports whether steps are sent again before they are answered.
func (d *Driver) hedges() bool {
	if d.sessions == nil {
		return false
	}
	r, ok := d.service.(Replicated)
	return ok && r.Endpoints() > 1
}

// reply is the answer to one sending of a step.
type reply[T any] struct {
	value T
	sent  backend.Instant
	err   error
}

// hedge calls ask, and calls it again whenever there is no answer within hedgeAfter. It returns the first reply that
// is an answer of the service, or the last one. late reports whether a sending is in doubt nevertheless. ask returns
// when its context ends.
func hedge[T any](
	ctx context.Context, d *Driver, ask func(ctx context.Context, again bool) reply[T],
) (r reply[T], late bool) {
	if !d.hedges() || ctx == d.gate.Work() { // cleanup is not urgent
		return ask(ctx, false), false
	}
	both, cancel := context.WithCancel(ctx)
	defer cancel()
	replies, sent, sending := make(chan reply[T], maxSendings), 0, 0
	send := func() {
		again := sent > 0
		if d.gate.Go(func(context.Context) { replies <- ask(both, again) }) {
			sending++
		}
		sent++
	}
	if send(); sending == 0 {
		r.err = backend.ErrClosed
		return r, false
	}
	timer := time.NewTimer(hedgeAfter)
	defer timer.Stop()
	var doubt *reply[T] // the first reply after which the step may take effect
	for {
		select {
		case <-timer.C:
			if sent < maxSendings && sending < maxUnanswered {
				send()
			}
			timer.Reset(hedgeAfter)
			continue
		case r = <-replies:
			sending--
		}
		class, final := d.classOf(r.err)
		switch {
		case r.err == nil || final || class == NoSession:
			return r, sending > 0 || doubt != nil
		case class == Unknown && !r.sent.IsZero() && doubt == nil:
			doubt = &reply[T]{r.value, r.sent, r.err}
		}
		if sending == 0 {
			if doubt != nil {
				return *doubt, true
			}
			return r, false
		}
		timer.Reset(hedgeRetry)
	}
}

// hedged is exchange for a step that may be repeated: see hedge.
func hedged[T any](
	ctx context.Context, d *Driver, step func(ctx context.Context, again bool) (T, error),
) (value T, sent backend.Instant, late bool, err error) {
	return hedgedUntil(ctx, d, d.prompt, step, func() {})
}

// hedgedUntil is hedged, and calls landed when the first sending is no longer in progress.
func hedgedUntil[T any](
	ctx context.Context, d *Driver, prompt bool, step func(ctx context.Context, again bool) (T, error), landed func(),
) (value T, sent backend.Instant, late bool, err error) {
	if !d.hedges() {
		value, sent, err = exchangeUntil(ctx, d, prompt, step, false, landed)
		return value, sent, false, err
	}
	r, late := hedge(ctx, d, func(ctx context.Context, again bool) (r reply[T]) {
		own := landed
		if again {
			own = func() {}
		}
		r.value, r.sent, r.err = exchangeUntil(ctx, d, prompt, step, again, own)
		return r
	})
	return r.value, r.sent, late, r.err
}
