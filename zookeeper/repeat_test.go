package zookeeper_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/zookeeper"
)

// broken returns a driver with a breaker for a request.
func broken(t *testing.T, requestID string) (*zookeeper.Driver, *breaker) {
	t.Helper()
	b := &breaker{requestID: requestID, arrived: make(chan struct{}), deliver: make(chan struct{})}
	d := zookeeper.New([]string{sharedServer(t).Addr()}, &zookeeper.Options{Tick: containers.ZooKeeperTick, Dial: b.dial})
	t.Cleanup(func() { _ = d.Close(soon(t, 10*time.Second)) })
	return d, b
}

// awaitAll waits for each of the steps.
func (b *breaker) awaitAll(t *testing.T, steps ...string) {
	t.Helper()
	for _, step := range steps {
		if err := b.await(soon(t, 20*time.Second), step); err != nil {
			t.Fatal(err)
		}
	}
}

// acquiring acquires in the background. The grant is zero if ctx ends first.
func acquiring(ctx context.Context, t *testing.T, d *zookeeper.Driver, r backend.Request) <-chan backend.Grant {
	granted := make(chan backend.Grant, 1)
	go func() {
		g, err := d.Acquire(ctx, r)
		if err != nil && ctx.Err() == nil {
			t.Errorf("Acquire of %s = %v", r.Name, err)
		}
		granted <- g
	}()
	return granted
}

// isHeld fails unless an attempt by another client finds the name held.
func isHeld(t *testing.T, name string) {
	t.Helper()
	rival := driver(t, sharedServer(t).Addr())
	if _, err := rival.Acquire(soon(t, 20*time.Second), request(name, false)); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("an attempt beside the hold = %v, want ErrHeld", err)
	}
}

// stays fails unless g is held, by its driver, when all that another client had to do is done.
func stays(t *testing.T, other, d *zookeeper.Driver, g backend.Grant) {
	t.Helper()
	if err := other.Close(soon(t, 20*time.Second)); err != nil { // waits for its removals
		t.Errorf("Close = %v", err)
	}
	if err := d.Renew(soon(t, 20*time.Second), []backend.Grant{g})[0].Err; err != nil {
		t.Errorf("renewal of the hold of the repeat = %v", err)
	}
	isHeld(t, g.Name)
	if err := d.Release(soon(t, 20*time.Second), g); err != nil {
		t.Errorf("Release = %v", err)
	}
}

// An attempt that ends removes its own node only, and no hold or place that a repeat of the request has taken over.
func TestEndedAttemptSparesItsRepeat(t *testing.T) {
	t.Parallel()
	t.Run("a wait, and a hold of another client", func(t *testing.T) {
		t.Parallel()
		holder := driver(t, sharedServer(t).Addr())
		front := take(t, holder, request("wait elsewhere", false))
		r := request(front.Name, true)
		a, b := broken(t, r.RequestID)
		release(t, a, take(t, a, request("wait before", false))) // its session reads nodes as well
		b.arm("watch another's", replyHeld)                      // it does not hear that its turn has come
		c, moving := broken(t, r.RequestID)
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		first := acquiring(ctx, t, a, r)
		<-b.arrived
		second := acquiring(soon(t, time.Minute), t, c, r)
		moving.awaitAll(t, "replace", "watch one's own")
		release(t, holder, front)
		g := <-second
		leave()
		<-first
		close(b.deliver)
		stays(t, a, c, g)
	})
	t.Run("a wait, and a place of the same client", func(t *testing.T) {
		t.Parallel()
		holder := driver(t, sharedServer(t).Addr())
		front := take(t, holder, request("wait beside", false))
		r := request(front.Name, true)
		a, b := broken(t, r.RequestID)
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		first := acquiring(ctx, t, a, r)
		stands(t, holder, r.Name, 1, 1)
		b.awaitAll(t, "watch another's")
		b.seen()
		second := acquiring(soon(t, time.Minute), t, a, r)
		b.awaitAll(t, "delete one's own", "get one's own", "watch one's own")
		leave()
		<-first
		next := request(r.Name, true)
		third := acquiring(soon(t, time.Minute), t, holder, next)
		stands(t, holder, r.Name, 1, 2)
		release(t, holder, front)
		select {
		case g := <-second:
			release(t, a, g)
			release(t, holder, <-third)
		case g := <-third:
			t.Error("the repeat lost its place to a later request")
			release(t, holder, g)
			release(t, a, <-second)
		}
	})
	t.Run("a refused attempt, and a place of another client", func(t *testing.T) {
		t.Parallel()
		holder := driver(t, sharedServer(t).Addr())
		front := take(t, holder, request("refused", false))
		r := request(front.Name, false)
		a, b := broken(t, r.RequestID)
		release(t, a, take(t, a, request("refused before", false))) // its session reads nodes as well
		b.arm("get another's", replyHeld)
		first := make(chan error, 1)
		go func() {
			_, err := a.Acquire(soon(t, time.Minute), r)
			first <- err
		}()
		<-b.arrived
		r.Wait = true
		c, moving := broken(t, r.RequestID)
		second := acquiring(soon(t, time.Minute), t, c, r)
		moving.awaitAll(t, "replace", "watch one's own")
		close(b.deliver)
		if err := <-first; !errors.Is(err, backend.ErrHeld) {
			t.Errorf("the first attempt = %v, want ErrHeld", err)
		}
		third := acquiring(soon(t, time.Minute), t, holder, request(r.Name, true))
		stands(t, holder, r.Name, 1, 2)
		release(t, holder, front)
		select {
		case g := <-second:
			release(t, c, g)
			release(t, holder, <-third)
		case g := <-third:
			t.Error("the repeat lost its place to a later request")
			release(t, holder, g)
			release(t, c, <-second)
		}
	})
	t.Run("a creation that is answered late, and what it left", func(t *testing.T) {
		t.Parallel()
		r := request("late", false)
		r.TTL = longTTL / 2
		a, b := broken(t, r.RequestID)
		warm := request("before late", false)
		warm.TTL = r.TTL
		kept := take(t, a, warm)
		b.arm("create", replyHeld)
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		first := make(chan error, 1)
		go func() {
			_, err := a.Acquire(ctx, r)
			first <- err
		}()
		<-b.arrived
		leave()
		if err := <-first; !errors.Is(err, backend.ErrUnknown) {
			t.Errorf("an acquire without an answer = %v, want ErrUnknown", err)
		}
		c := driver(t, sharedServer(t).Addr())
		g := take(t, c, r)
		close(b.deliver)
		release(t, a, kept)
		for ctx := soon(t, time.Minute); b.connections() > 0; time.Sleep(10 * time.Millisecond) { // no event announces it
			if ctx.Err() != nil {
				t.Fatalf("a driver that holds nothing has %d connections", b.connections())
			}
		}
		stays(t, a, c, g)
	})
}

// A move to the session of a longer TTL, of which the answer is lost, is no loss: the hold is renewed and released,
// whichever session it is on.
func TestMoveWithoutAnAnswerIsNoLoss(t *testing.T) {
	t.Parallel()
	for what, how := range map[string]loss{"the reply is lost": replyLost, "the request is lost": requestLost} {
		for _, then := range []string{"renewed as before", "renewed for longer", "released"} {
			t.Run(what+", then "+then, func(t *testing.T) {
				t.Parallel()
				r := request(what+" "+then, false)
				r.TTL = longTTL / 2
				lost := make(chan backend.Loss, 4)
				r.Lost = func(l backend.Loss) { lost <- l }
				d, b := broken(t, r.RequestID)
				other := request(r.Name+" too", false) // its session is there before the move
				take(t, d, other)
				g := take(t, d, r)
				b.awaitAll(t, "watch one's own")
				b.arm("replace", how)
				longer := g
				longer.TTL = longTTL
				err := d.Renew(soon(t, 20*time.Second), []backend.Grant{longer})[0].Err
				if errors.Is(err, backend.ErrNotHeld) || err == nil {
					t.Fatalf("renewal without an answer = %v, want a fault", err)
				}
				isHeld(t, r.Name)
				if then == "renewed for longer" {
					g = longer
				}
				for ctx := soon(t, 20*time.Second); then != "released"; {
					err := d.Renew(ctx, []backend.Grant{g})[0].Err
					if err == nil {
						break
					}
					if errors.Is(err, backend.ErrNotHeld) || ctx.Err() != nil {
						t.Fatalf("renewal after a move without an answer = %v", err)
					}
				}
				if err := d.Release(soon(t, 20*time.Second), g); err != nil {
					t.Errorf("Release = %v", err)
				}
				rival := driver(t, sharedServer(t).Addr())
				release(t, rival, take(t, rival, request(r.Name, false)))
				if err := d.Close(soon(t, 20*time.Second)); err != nil {
					t.Errorf("Close = %v", err)
				}
				if len(lost) > 0 {
					t.Errorf("the holder was notified of a loss: %+v", <-lost)
				}
			})
		}
	}
}
