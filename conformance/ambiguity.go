package conformance

import (
	"context"
	"errors"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
)

var ambiguityClauses = []Clause{
	{
		ID: "A1", Group: "ambiguity", Slug: "lost-request-is-no-success", needs: needLink,
		run:  lostRequestIsNoSuccess,
		Rule: "an acquire whose request is lost reports neither a grant nor ErrHeld: its outcome is unknown",
	},
	{
		ID: "A2", Group: "ambiguity", Slug: "lost-reply-is-resolved-by-repeating", needs: needLink,
		run:  lostReplyIsResolvedByRepeating,
		Rule: "after a lost reply, an acquire with the same request id returns the one hold that was granted, with its token",
	},
	{
		ID: "A3", Group: "ambiguity", Slug: "lost-reply-is-undone-by-request", needs: needLink,
		run:  lostReplyIsUndoneByRequest,
		Rule: "after a lost reply, Release(Request.Grant()) frees the name immediately",
	},
	{
		ID: "A4", Group: "ambiguity", Slug: "late-request-strands-nothing", needs: needLink,
		run:  lateRequestStrandsNothing,
		Rule: "an acquire that arrives after its context has ended holds the name for at most its TTL",
	},
	{
		ID: "A5", Group: "ambiguity", Slug: "repeated-release-spares-the-successor", needs: needLink,
		run:  repeatedReleaseSparesTheSuccessor,
		Rule: "a release repeated after a lost reply returns ErrNotHeld, and the successor keeps the lock",
	},
	{
		ID: "A6", Group: "ambiguity", Slug: "unanswered-renewal-is-no-loss", needs: needLink,
		run: unansweredRenewalIsNoLoss,
		Rule: "a renewal without an answer reports neither success nor a loss: " +
			"it does not return ErrNotHeld, and the hold remains",
	},
	{
		ID: "A7", Group: "ambiguity", Slug: "reset-is-no-contention", needs: needLink, run: resetIsNoContention,
		Rule: "if the connection breaks after the service granted an acquire, " +
			"the outcome is a grant or unknown, never ErrHeld",
	},
}

// warm lets d open the connections that it needs for an attempt.
func (t *trial) warm(d backend.Driver) {
	name := t.name()
	var g backend.Grant
	if err := t.settled(func(ctx context.Context) (err error) {
		g, err = d.Acquire(ctx, t.request(name))
		return err
	}); err != nil {
		t.Fatalf("acquire before the fault = %v", err)
	}
	t.release(d, g, "before the fault")
}

// unanswered acquires over a broken link, and fails the clause if the driver claims a definite answer. It reports
// whether the outcome is unknown. The outcome of an attempt over an open connection always is. A wait may need one
// more connection first, and has no effect if that cannot be opened.
func (t *trial) unanswered(d backend.Driver, link fault.Link, r backend.Request, how string) bool {
	r.Fresh = true // otherwise a driver may look first, and be cut off before it requests the lock
	err := t.sends(link, "acquire with "+how, func(ctx context.Context) error {
		_, err := d.Acquire(ctx, r)
		return err
	})
	unknown := errors.Is(err, backend.ErrUnknown)
	switch {
	case err == nil:
		t.Fatalf("acquire with %s reported a grant although no answer reached the driver", how)
	case errors.Is(err, backend.ErrHeld):
		t.Fatalf("acquire with %s = %v although no answer reached the driver", how, err)
	case !errors.Is(err, context.DeadlineExceeded):
		t.Errorf("acquire with %s = %v, want the context's error in the chain", how, err)
	case unknown && errors.Is(err, backend.ErrUnavailable):
		t.Errorf("acquire with %s = %v, which matches both ErrUnavailable and ErrUnknown", how, err)
	case !unknown && !r.Wait:
		// Lateness is no excuse here: the link has seen the request.
		t.Violatedf("acquire with %s = %v, want ErrUnknown, since the request was sent. Request.Fresh is set: a driver "+
			"that first queries whether the request holds the name is cut off during that query, which it may omit "+
			"where Fresh is set", how, err)
	}
	return unknown
}

// sends makes a call with a time limit over a link that does not answer. If the limit ends before the link has seen
// any byte of the call, the machine is busy: sends repeats the call with a longer limit.
func (t *trial) sends(link fault.Link, what string, call func(context.Context) error) error {
	for limit := 300 * time.Millisecond; ; limit *= 3 {
		seen := link.Seen(fault.Requests)
		err := call(t.within(limit))
		if link.Seen(fault.Requests) > seen {
			return err
		}
		if limit > slack || !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("%s sent nothing at all: %v", what, err)
		}
	}
}

func lostRequestIsNoSuccess(t *trial) {
	d, link := t.linked()
	rival := t.client()
	t.warm(d)
	r := t.request(t.name())
	link.Drop(fault.Requests)
	t.unanswered(d, link, r, "a lost request")
	t.mustBeFree(rival, r.Name, "after a request that got lost")
	link.Pass()
	if err := t.releaseSettled(d, r.Grant()); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("release of a request that got lost = %v, want ErrNotHeld", err)
	}
	t.mustBeFree(rival, r.Name, "after the release")
}

func lostReplyIsResolvedByRepeating(t *trial) {
	d, link := t.linked()
	rival := t.client()
	t.warm(d)
	r := t.request(t.name())
	link.Drop(fault.Replies)
	t.unanswered(d, link, r, "a lost reply")
	if !t.mustBeHeld(rival, r.Name, "after an acquire whose reply got lost") {
		return
	}
	link.Pass()
	acquire := func() backend.Grant {
		var g backend.Grant
		if err := t.settled(func(ctx context.Context) (err error) {
			g, err = d.Acquire(ctx, r)
			return err
		}); err != nil {
			t.Fatalf("the same request again = %v, want its hold", err)
		}
		return g
	}
	first := acquire()
	if second := acquire(); second.Token != first.Token {
		t.Errorf("the same request again: token %v, want %v as before", second.Token, first.Token)
	} else {
		first = second
	}
	t.mustBeHeld(rival, r.Name, "after the repeated acquire")
	t.release(d, first, "of the one hold")
	t.mustBeFree(rival, r.Name, "after one release")
}

func lostReplyIsUndoneByRequest(t *trial) {
	d, link := t.linked()
	rival := t.client()
	t.warm(rival)
	for _, wait := range []bool{false, true} {
		t.warm(d)
		r := t.request(t.name())
		r.Wait = wait
		link.Drop(fault.Replies)
		unknown := t.unanswered(d, link, r, "a lost reply")
		link.Pass()
		if !unknown {
			t.opensWithin(rival, r.Name, promptly, "after a wait that claims to have left nothing")
			continue
		}
		if err := t.releaseSettled(d, r.Grant()); err != nil && !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("release by request after a lost reply = %v, want nil or ErrNotHeld", err)
		}
		t.opensWithin(rival, r.Name, promptly, "after the release by request")
	}
}

func lateRequestStrandsNothing(t *trial) {
	d, link := t.linked()
	rival := t.client()
	for _, wait := range []bool{false, true} {
		t.warm(d)
		r := t.brief(t.name())
		r.Wait = wait
		link.Hold(fault.Requests)
		t.unanswered(d, link, r, "a request that is held back")
		t.mustBeFree(rival, r.Name, "while the request is held back")
		link.Pass()
		t.opensWithin(rival, r.Name, r.TTL+slack, "after the late delivery")
	}
}

// releasedUnanswered releases a hold over a link that drops the reply, and lets rival have the name. The releasing
// call goes on until rival has it: a service may cancel the request of a caller that leaves.
func (t *trial) releasedUnanswered(d backend.Driver, link fault.Link, rival backend.Driver) (g, next backend.Grant) {
	g = t.take(d, t.request(t.name()), "of a free name")
	link.Drop(fault.Replies)
	ctx, leave := context.WithCancel(t.within(2 * ample))
	defer leave()
	released := make(chan error, 1)
	go func() { released <- d.Release(ctx, g) }()
	next, err := t.settledTry(rival, g.Name)
	if err != nil {
		t.Fatalf("Acquire beside a release whose reply got lost = %v, want a grant", err)
	}
	leave()
	err = <-released
	if err == nil || errors.Is(err, backend.ErrNotHeld) || !errors.Is(err, backend.ErrUnknown) {
		t.Errorf("release whose reply got lost = %v, want ErrUnknown", err)
	}
	return g, next
}

// settledTry makes attempts until one returns something other than ErrHeld, at most for the time that a release may
// take.
func (t *trial) settledTry(d backend.Driver, name string) (g backend.Grant, err error) {
	for ctx := t.within(slack); ; pause(ctx, 10*time.Millisecond) {
		g, err = t.try(d, t.request(name))
		if !errors.Is(err, backend.ErrHeld) || ctx.Err() != nil {
			return g, err
		}
	}
}

func repeatedReleaseSparesTheSuccessor(t *trial) {
	d, link := t.linked()
	rival := t.client()
	g, successor := t.releasedUnanswered(d, link, rival)
	link.Pass()
	if err := t.releaseSettled(d, g); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("repeated release = %v, want ErrNotHeld", err)
	}
	t.mustBeHeld(t.client(), g.Name, "after the repeated release")
	if r := t.renew(rival, successor); r.Err != nil {
		t.Errorf("renewal by the successor = %v, want nil", r.Err)
	}
	t.release(rival, successor, "by the successor")
}

func unansweredRenewalIsNoLoss(t *trial) {
	for how, breakLink := range map[string]func(fault.Link){
		"a lost reply":   func(l fault.Link) { l.Drop(fault.Replies) },
		"a lost request": func(l fault.Link) { l.Drop(fault.Requests) },
		"no connection":  func(l fault.Link) { l.Refuse() },
	} {
		d, link := t.linked()
		g := t.take(d, t.request(t.name()), "of a free name")
		breakLink(link)
		r := t.renewIn(t.within(300*time.Millisecond), d, g)
		if r.Err == nil {
			t.Errorf("renewal with %s = nil although no answer reached the driver", how)
		}
		if errors.Is(r.Err, backend.ErrNotHeld) {
			t.Errorf("renewal with %s = %v: a fault is no loss", how, r.Err)
		}
		if !errors.Is(r.Err, backend.ErrUnknown) && !errors.Is(r.Err, backend.ErrUnavailable) {
			t.Errorf("renewal with %s = %v, want ErrUnknown or ErrUnavailable", how, r.Err)
		}
		link.Pass()
		if err := t.renewSettled(d, g); err != nil {
			t.Errorf("renewal after %s = %v, want nil", how, err)
		}
		t.release(d, g, "after "+how)
	}
}

func resetIsNoContention(t *trial) {
	d, link := t.linked()
	rival := t.client()
	for _, wait := range []bool{false, true} {
		t.warm(d)
		r := t.request(t.name())
		link.Hold(fault.Replies)
		seen := link.Seen(fault.Replies)
		type outcome struct {
			g   backend.Grant
			err error
		}
		done := make(chan outcome, 1)
		ctx := t.within(3 * slack)
		again := r
		again.Wait = wait
		go func() {
			g, err := d.Acquire(ctx, again)
			done <- outcome{g, err}
		}()
		replied := t.within(slack)
		for link.Seen(fault.Replies) == seen && replied.Err() == nil {
			pause(replied, 5*time.Millisecond)
		}
		if link.Seen(fault.Replies) == seen {
			t.FatalLatef("the service did not reply")
		}
		pause(ctx, 50*time.Millisecond) // the first reply may belong to an earlier request of the acquire
		link.Reset()
		link.Pass()
		got := <-done
		switch {
		case got.err == nil:
			t.mustBeHeld(rival, r.Name, "after a grant over a connection that broke")
			t.release(d, got.g, "after a grant over a connection that broke")
		case errors.Is(got.err, backend.ErrHeld):
			t.Errorf("acquire over a connection that broke = %v: the request's own hold refused it", got.err)
		case !errors.Is(got.err, backend.ErrUnknown):
			t.Errorf("acquire over a connection that broke = %v, want a grant or ErrUnknown", got.err)
		}
		if err := t.releaseSettled(d, r.Grant()); err != nil &&
			!errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("release by request = %v, want nil or ErrNotHeld", err)
		}
		t.opensWithin(rival, r.Name, promptly, "in the end")
	}
}
