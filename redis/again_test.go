package redis

import (
	"context"
	"errors"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// around is a hook that calls functions before and after each command of one step.
type around struct {
	name          string
	before, after func()
}

func (a around) ProcessHook(next goredis.ProcessHook) goredis.ProcessHook {
	return func(ctx context.Context, cmd goredis.Cmder) error {
		if cmd.Name() != "fencelock."+a.name {
			return next(ctx, cmd)
		}
		a.before()
		defer a.after()
		return next(ctx, cmd)
	}
}

func (around) DialHook(next goredis.DialHook) goredis.DialHook { return next }

func (around) ProcessPipelineHook(next goredis.ProcessPipelineHook) goredis.ProcessPipelineHook {
	return next
}

// The late cleanup of an abandoned attempt does not end the hold of a later attempt of the same request.
func TestLateCleanupSparesALaterAttempt(t *testing.T) {
	t.Parallel()
	for kind, as := range map[string]func(backend.Request) backend.Request{
		"exclusive": func(r backend.Request) backend.Request { return r },
		"permits":   func(r backend.Request) backend.Request { return taking(r, 1, 1) },
	} {
		s := startServer(t)
		client := goredis.NewClient(fitOptions(s.addr))
		t.Cleanup(func() { client.Close() })
		pass := make(chan struct{})
		client.AddHook(around{redisscript.Cancel, func() { <-pass }, func() {}})
		d := New(client, nil)
		other := s.open(t)
		subscribe(t, d)
		first := mustAcquire(t, other, as(request("n", time.Minute, false)))
		r := as(request("n", time.Minute, true))
		r.Fresh = false
		ctx, leave := context.WithCancel(context.Background())
		abandoned := make(chan error, 1)
		go func() {
			_, err := d.Acquire(ctx, r)
			abandoned <- err
		}()
		awaitWaiters(t, other, "n", 1)
		leave()
		if err := <-abandoned; !errors.Is(err, context.Canceled) {
			t.Errorf("%s: the first attempt: %v", kind, err)
		}
		mustRelease(t, other, first) // the name is offered to the place of the first attempt
		r.Wait = false
		g := mustAcquire(t, d, r)
		close(pass)
		if err := d.Close(within(t, slack)); err != nil { // the cleanup has ended
			t.Errorf("%s: Close = %v", kind, err)
		}
		if rival, err := other.Acquire(within(t, slack), as(request("n", time.Minute, false))); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("%s: beside hold %s a rival acquires %+v, %v", kind, g.Incarnation, rival, err)
		}
	}
}

// An acquire with a context that ends between its two steps fails with the context's error: nothing is wrong with the
// server.
func TestContextEndsBetweenSteps(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	other := s.open(t)
	first := mustAcquire(t, other, request("n", time.Minute, false))
	client := goredis.NewClient(fitOptions(s.addr))
	t.Cleanup(func() { client.Close() })
	ctx, cancel := context.WithCancel(context.Background())
	client.AddHook(around{redisscript.Take, func() {}, cancel})
	d := New(client, nil)
	defer d.Close(within(t, slack))
	if _, err := d.Acquire(ctx, request("n", time.Minute, true)); !errors.Is(err, context.Canceled) ||
		errors.Is(err, backend.ErrMisconfigured) || errors.Is(err, backend.ErrUnknown) {
		t.Errorf("Acquire = %v, want the context's error", err)
	}
	mustRelease(t, other, first)
	nothingLeft(t, s)
}

// A clock may count from any instant.
func TestClockOfGreatInstants(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	client := goredis.NewClient(fitOptions(s.addr))
	t.Cleanup(func() { client.Close() })
	d := New(client, &Options{Clock: shifted{backend.SystemClock(), 1 << 62}})
	defer d.Close(within(t, slack))
	subscribe(t, d)
	first := mustAcquire(t, d, request("n", time.Minute, false))
	next := inLine(t, d, d, request("n", time.Minute, true), 1)
	mustRelease(t, d, first)
	mustRelease(t, d, <-next)
	nothingLeft(t, s)
}

// shifted is a clock that is ahead of another one.
type shifted struct {
	backend.Clock
	by backend.Instant
}

func (s shifted) Now() backend.Instant { return s.Clock.Now() + s.by }

// A renewal of a grant without an incarnation prolongs no other hold.
func TestRenewalWithoutAHold(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d := s.open(t)
	mustAcquire(t, d, request("n", 10*time.Second, false))
	r := request("n", time.Hour, false)
	if err := d.Renew(within(t, slack), []backend.Grant{r.Grant()})[0].Err; !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("Renew = %v, want ErrNotHeld", err)
	}
	lock := redisscript.KeysOf("fencelock:", "n").Lock
	if left := s.admin(t).PTTL(context.Background(), lock).Val(); left > 10*time.Second {
		t.Errorf("the hold of another request lasts another %v", left)
	}
}
