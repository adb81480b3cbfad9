package redis

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/internal/testtier"
)

// waitInLine starts an Acquire and returns when it has its place, the n-th.
func waitInLine(t *testing.T, s *testServer, d *Driver, r backend.Request, n int64) <-chan backend.Grant {
	t.Helper()
	got := make(chan backend.Grant, 1)
	go func() {
		defer close(got)
		g, err := d.Acquire(within(t, 30*time.Second), r)
		if err != nil {
			t.Error(err)
			return
		}
		got <- g
	}()
	awaitQueue(t, s.admin(t), r.Name, n)
	return got
}

// Waiters are granted in the order of their arrival, also across clients, each release grants one, and no request
// overtakes another.
func TestFirstComeFirstServed(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	drivers := []*Driver{s.open(t), s.open(t), s.open(t)}
	outsider := s.open(t)
	g := mustAcquire(t, drivers[0], request("n", 20*time.Second, true))
	var line []<-chan backend.Grant
	for i := range 9 {
		line = append(line, waitInLine(t, s, drivers[i%3], request("n", 20*time.Second, true), int64(i+1)))
	}
	for i, next := range line {
		if _, err := outsider.Acquire(
			within(t, 30*time.Second), request("n", time.Minute, false),
		); !errors.Is(err, backend.ErrHeld) {
			t.Fatalf("barged before waiter %d: %v", i, err)
		}
		mustRelease(t, drivers[0], g)
		g = <-next
		for j, later := range line[i+1:] {
			select {
			case <-later:
				t.Fatalf("waiter %d was woken with %d", i+1+j, i)
			default:
			}
		}
	}
	mustRelease(t, drivers[0], g)
	eventually(t, "nothing is left", func() bool { return len(keys(t, s.admin(t))) == 0 })
}

// The number of commands at the server per grant, including those inside the script.
func TestCommandsPerGrant(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	admin := s.admin(t)
	const workers, rounds = 16, 100
	drivers := make([]*Driver, workers)
	for i := range drivers {
		drivers[i] = s.open(t)
		mustRelease(t, drivers[i], mustAcquire(t, drivers[i], request("warm-up", 10*time.Second, true)))
	}
	mustRelease(t, drivers[0], mustAcquire(t, drivers[0], request("lone", 10*time.Second, true)))
	lone, scripts := math.MaxInt, math.MaxInt
	for range 5 { // the other waiters probe their subscriptions meanwhile
		before, trips := commands(t, admin), calls(t, admin, "evalsha")
		mustRelease(t, drivers[0], mustAcquire(t, drivers[0], request("lone", 10*time.Second, true)))
		scripts = min(scripts, calls(t, admin, "evalsha")-trips)
		lone = min(lone, commands(t, admin)-before)
	}
	if scripts != 1 {
		t.Errorf("uncontended: %d calls of scripts, want that of the release alone", scripts)
	}
	if lone > 6 {
		t.Errorf("uncontended: %d commands", lone)
	}

	// The looks of long waits do not count, and on a busy machine all waits are long.
	least := math.Inf(1)
	w, began := stallmeter.Begin(), time.Now()
	defer w.End()
	for round := range 5 {
		if round > 0 && time.Since(began) > 20*time.Second {
			break
		}
		before := commands(t, admin)
		contend(t, drivers, rounds)
		least = min(least, float64(commands(t, admin)-before)/(workers*rounds))
		if least <= 21 { // 14 to 15, and some looks more on a busy machine; to wake one waiter too many would double it
			return
		}
	}
	w.Errorf(t, 50*time.Millisecond, "contended: %.2f commands a grant", least)
}

// contend has every driver acquire and release one name the given number of times.
func contend(t *testing.T, drivers []*Driver, rounds int) {
	t.Helper()
	var wg sync.WaitGroup
	inside := 0
	for _, d := range drivers {
		wg.Go(func() {
			for range rounds {
				g, err := d.Acquire(within(t, 30*time.Second), request("one", 30*time.Second, true))
				if err != nil {
					t.Error(err)
					return
				}
				inside++ // protected only by the lock
				mustRelease(t, d, g)
			}
		})
	}
	wg.Wait()
	if inside != len(drivers)*rounds {
		t.Errorf("%d times inside", inside)
	}
}

// 200 waiters of one client cost the server almost nothing, and a renewal wakes no waiter.
func TestIdleWaiters(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	s := startServer(t)
	holder, d, admin := s.open(t), s.open(t), s.admin(t)
	g := mustAcquire(t, holder, request("n", 30*time.Second, true))
	renew := func() {
		if answer := holder.Renew(within(t, 30*time.Second), []backend.Grant{g})[0]; answer.Err != nil {
			t.Error(answer.Err)
		}
	}
	renew() // the first one may load the script
	alone := commands(t, admin)
	renew()
	renewal := commands(t, admin) - alone
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			if _, err := d.Acquire(ctx, request("n", 30*time.Second, true)); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
		if i == 0 { // wait for the subscription, or the others would enter twice
			awaitQueue(t, admin, "n", 1)
		}
	}
	awaitQueue(t, admin, "n", 200)
	start, before := time.Now(), commands(t, admin)
	for range 4 {
		select {
		case <-time.After(2 * time.Second):
		case <-t.Context().Done():
		}
		renew()
	}
	n := commands(t, admin) - before - 4*renewal
	rate := float64(n) / time.Since(start).Seconds()
	t.Logf("%.1f commands a second; a renewal takes %d", rate, renewal)
	if rate > 10 { // alone it is 2 to 4
		t.Errorf("%.1f commands a second", rate)
	}
	cancel()
	wg.Wait()
	awaitQueue(t, admin, "n", 0)
	mustRelease(t, holder, g)
}

// Waiters of one client, each for its own name, cost the server little, on a cluster as well.
func TestIdleWaitersOnManyNames(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	s := startServer(t)
	idleOnManyNames(t, 200, 40, 5*time.Second, s.open(t), s.open(t), s.admin(t))
}

// TestIdleWaiters for longer than a TTL.
func TestIdleWaitersForLong(t *testing.T) {
	testtier.Only(t)
	const window = time.Minute
	t.Run("200", func(t *testing.T) {
		t.Parallel()
		s := startServer(t)
		idleOnManyNames(t, 200, 40, window, s.open(t), s.open(t), s.admin(t))
	})
	t.Run("10000", func(t *testing.T) {
		t.Parallel()
		s := startServer(t)
		idleOnManyNames(t, 10_000, 500, window, s.open(t), s.open(t), s.admin(t))
	})
	t.Run("200-cluster", func(t *testing.T) {
		t.Parallel()
		nodes := startCluster(t)
		var admins []*goredis.Client
		for _, n := range nodes {
			admins = append(admins, n.admin(t))
		}
		// A look is six commands, and comes when the hold it saw would end: after 21 s at the earliest, as a renewal of
		// the TTL of 30 s comes every 9 s.
		const most = 6 * 200 / 21
		idleOnManyNames(t, 200, most, window, openCluster(t, nodes), openCluster(t, nodes), admins...)
	})
}

func idleOnManyNames(
	t *testing.T, names int, most float64, window time.Duration, holder, d *Driver, admins ...*goredis.Client,
) {
	var grants []backend.Grant
	for i := range names {
		grants = append(grants, mustAcquire(t, holder, request(fmt.Sprint("n", i), 30*time.Second, false)))
	}
	subscribe(t, d)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, g := range grants {
		wg.Go(func() {
			if _, err := d.Acquire(ctx, request(g.Name, 30*time.Second, true)); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
	}
	count := func() (n int) {
		for _, c := range admins {
			n += commands(t, c)
		}
		return n
	}
	for _, g := range grants {
		eventually(t, "all wait", func() bool {
			n, err := d.service.client.LLen(ctx, redisscript.KeysOf("fencelock:", g.Name).Queue).Result()
			return err == nil && n == 1
		})
	}
	<-time.After(time.Second) // the requests at the beginning of a wait are over
	start, spent := time.Now(), 0
	for left := window; left > 0; left = window - time.Since(start) {
		before := count()
		<-time.After(min(left, 9*time.Second))
		spent += count() - before
		for _, answer := range holder.Renew(within(t, 30*time.Second), grants) {
			if answer.Err != nil {
				t.Error(answer.Err)
			}
		}
	}
	rate := float64(spent) / time.Since(start).Seconds()
	t.Logf("%d waiters on as many names, %d servers: %.1f commands a second", names, len(admins), rate)
	if rate > most {
		t.Errorf("more than %.0f", most)
	}
	cancel()
	wg.Wait()
	for _, g := range grants {
		mustRelease(t, holder, g)
	}
}

// A cancelled waiter leaves the queue soon.
func TestCancelledWaiterLeaves(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, other := s.open(t), s.open(t)
	g := mustAcquire(t, d, request("n", 20*time.Second, true))
	ctx, cancel := context.WithCancel(context.Background())
	gone := make(chan error, 1)
	go func() {
		_, err := other.Acquire(ctx, request("n", 20*time.Second, true))
		gone <- err
	}()
	awaitQueue(t, s.admin(t), "n", 1)
	next := waitInLine(t, s, d, request("n", 20*time.Second, true), 2)
	cancel()
	end := stallmeter.Late(t)
	if err := <-gone; !errors.Is(err, context.Canceled) || errors.Is(err, backend.ErrUnknown) {
		t.Error(err)
	}
	awaitQueue(t, s.admin(t), "n", 1)
	end(slack, "leaving the queue")
	mustRelease(t, d, g)
	mustRelease(t, d, <-next)
}

// The holder dies: the next client has the lock soon after the TTL, and not before.
func TestHolderDies(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	s := startServer(t)
	d := s.open(t)
	const ttl = time.Second
	g := mustAcquire(t, s.open(t), request("n", ttl, true))
	end := stallmeter.Late(t)
	next := mustAcquire(t, d, request("n", 10*time.Second, true))
	end(ttl+300*time.Millisecond+slack, "the next grant after the last sign of the holder")
	if now := backend.SystemClock().Now(); now < g.SentAt.Add(ttl) {
		t.Errorf("granted %v before the end of the first hold", g.SentAt.Add(ttl).Sub(now))
	}
	mustRelease(t, d, next)
}

// A waiter whose process has died, with its connections, is skipped.
func TestCrashedWaiterIsPassedBy(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	s := startServer(t)
	holder, d := s.open(t), s.open(t)
	g := mustAcquire(t, holder, request("n", 30*time.Second, true))
	crashed, link := s.linked(t)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	gone := make(chan error, 1)
	go func() {
		_, err := crashed.Acquire(ctx, request("n", 30*time.Second, true))
		gone <- err
	}()
	awaitQueue(t, s.admin(t), "n", 1)
	next := waitInLine(t, s, d, request("n", 30*time.Second, true), 2)
	link.Refuse()
	channel := redisscript.Channel("fencelock:", crashed.service.identity)
	eventually(t, "the subscription is gone", func() bool {
		n, err := s.admin(t).PubSubNumSub(context.Background(), channel).Result()
		return err == nil && n[channel] == 0
	})
	end := stallmeter.Late(t)
	mustRelease(t, holder, g)
	got := <-next
	end(slack, "the hand-over")
	mustRelease(t, d, got)
	cancel()
	<-gone
}

// The push is lost: the waiter still gets the lock, immediately if it notices the loss, and otherwise by its next
// look.
func TestLostPush(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	holder, admin := s.open(t), s.admin(t)
	d, link := s.linked(t)
	g := mustAcquire(t, holder, request("n", 30*time.Second, true))
	next := waitInLine(t, s, d, request("n", 30*time.Second, true), 1)
	if err := admin.ClientKillByFilter(context.Background(), "TYPE", "pubsub").Err(); err != nil {
		t.Fatal(err)
	}
	mustRelease(t, holder, g)
	g = <-next

	next = waitInLine(t, s, holder, request("n", 30*time.Second, true), 1)
	mustRelease(t, d, g)
	g = <-next
	next = waitInLine(t, s, d, request("n", 30*time.Second, true), 1)
	link.Drop(fault.Replies)
	mustRelease(t, holder, g)
	eventually(t, "the lock is handed over", func() bool {
		info, err := holder.Look(context.Background(), "n")
		return err == nil && info.Held && info.Waiters == 0
	})
	link.Pass()
	mustRelease(t, d, <-next)
}

// A release that finds another hold than its own leaves the hold and the queue as they were.
func TestStaleReleaseHasNoEffect(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	g := mustAcquire(t, d, request("n", time.Minute, true))
	next := waitInLine(t, s, d, request("n", time.Minute, true), 1)
	k := redisscript.KeysOf("fencelock:", "n")
	rival := redisscript.Hold{PX: 30 * time.Second, Client: "c", Nonce: "1", Request: "r", Owner: "o"}.Value()
	if err := admin.Set(context.Background(), k.Lock, rival, 30*time.Second).Err(); err != nil {
		t.Fatal(err)
	}
	if err := d.Release(within(t, 30*time.Second), g); !errors.Is(err, backend.ErrNotHeld) {
		t.Error(err)
	}
	if v, err := admin.Get(context.Background(), k.Lock).Result(); err != nil || v != rival {
		t.Errorf("holder %q, %v", v, err)
	}
	if left := pttl(t, admin, "n"); left <= 0 || left > 30*time.Second {
		t.Errorf("%v left", left)
	}
	awaitQueue(t, admin, "n", 1)
	if err := admin.Del(context.Background(), k.Lock).Err(); err != nil {
		t.Fatal(err)
	}
	// The key was deleted: the release comes too late, and the waiter gets the lock.
	if err := d.Release(within(t, 30*time.Second), g); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("deleted: %v", err)
	}
	mustRelease(t, d, <-next)
}

// A repeated request of a waiter keeps its place.
func TestWaitingAgainKeepsThePlace(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	g := mustAcquire(t, d, request("n", 20*time.Second, true))
	r := request("n", 20*time.Second, true)
	ctx, cancel := context.WithCancel(context.Background())
	first := make(chan error, 1)
	go func() {
		_, err := d.Acquire(ctx, r)
		first <- err
	}()
	awaitQueue(t, admin, "n", 1)
	behind := waitInLine(t, s, d, request("n", 20*time.Second, true), 2)
	r.Fresh = false
	second := waitInLine(t, s, s.open(t), r, 2)
	value, err := admin.LIndex(context.Background(), redisscript.KeysOf("fencelock:", "n").Queue, 0).Result()
	if h, ok := redisscript.ParseHold(value); err != nil || !ok || h.Request != r.RequestID {
		t.Errorf("first in the queue: %q, %v", value, err)
	}
	eventually(t, "the place has its new owner", func() bool {
		v, err := admin.LIndex(context.Background(), redisscript.KeysOf("fencelock:", "n").Queue, 0).Result()
		h, ok := redisscript.ParseHold(v)
		return err == nil && ok && h.Client != d.service.identity
	})
	cancel()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	mustRelease(t, d, g)
	mustRelease(t, d, <-second)
	mustRelease(t, d, <-behind)
	// A release by request id alone also removes a place.
	g = mustAcquire(t, d, request("n", 20*time.Second, true))
	r = request("n", 20*time.Second, true)
	ctx, cancel = context.WithCancel(context.Background())
	defer cancel()
	go func() {
		_, err := d.Acquire(ctx, r)
		first <- err
	}()
	awaitQueue(t, admin, "n", 1)
	mustRelease(t, d, r.Grant())
	awaitQueue(t, admin, "n", 0)
	cancel()
	<-first
	mustRelease(t, d, g)
}

// A queue of dead waiters does not close the name, neither for attempts nor for waiters.
func TestDeadQueue(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	mustRelease(t, d, mustAcquire(t, d, request("warm-up", time.Minute, true)))
	k := redisscript.KeysOf("fencelock:", "n")
	for _, wait := range []bool{false, true} {
		for i := range 3 {
			ghost := redisscript.Hold{
				PX: time.Minute, Client: fmt.Sprint("ghost", i), Nonce: "1", Request: "r", Owner: "o",
			}
			if err := admin.RPush(context.Background(), k.Queue, ghost.Value()).Err(); err != nil {
				t.Fatal(err)
			}
		}
		end := stallmeter.Late(t)
		mustRelease(t, d, mustAcquire(t, d, request("n", 10*time.Second, wait)))
		took := end(slack, fmt.Sprintf("an acquire with wait %v", wait))
		t.Logf("wait %v: acquired after %v", wait, took)
	}
	eventually(t, "nothing is left", func() bool { return len(keys(t, admin)) == 0 })
}

// A free lock is acquired without a subscription, even by a request that would wait: the server accepts no more
// connections, or the user may not subscribe.
func TestFreeLockNeedsNoSubscription(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	admin := s.admin(t)
	ctx := within(t, 20*time.Second)
	acquires := func(what string, d *Driver) {
		t.Helper()
		for _, kind := range []func(backend.Request) backend.Request{
			func(r backend.Request) backend.Request { return r }, reading,
		} {
			end := stallmeter.Late(t)
			mustRelease(t, d, mustAcquire(t, d, kind(request(what, 10*time.Second, true))))
			end(2*time.Second, what+": an acquire")
		}
	}
	if err := admin.ACLSetUser(
		ctx, "worker", "on", ">pw", "~fencelock:*", "resetchannels", "+@all", "-subscribe",
	).Err(); err != nil {
		t.Fatal(err)
	}
	d, err := Open(ctx, "redis://worker:pw@"+s.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close(ctx)
	acquires("without +subscribe", d)

	d = s.open(t)
	mustRelease(t, d, mustAcquire(t, d, request("warm-up", time.Minute, false)))
	if err := admin.ConfigSet(ctx, "maxclients", "1").Err(); err != nil {
		t.Fatal(err)
	}
	acquires("maxclients reached", d)
}
