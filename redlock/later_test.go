package redlock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/stallmeter"
)

// patient returns a driver that asks the remaining servers for their votes after d.
func (s servers) patient(t testing.TB, d time.Duration) *Driver {
	driver := s.driver(t, &Options{TrustFresh: true, MaxTTL: time.Hour, NodeTimeout: 10 * time.Second})
	driver.service.laterTime, driver.service.hedgeTime = d, 5*time.Second // a busy machine must not ask the others
	if err := driver.Ping(within(t, 30*time.Second)); err != nil {
		t.Fatal(err)
	}
	return driver
}

// keys returns the number of keys on all servers.
func (s servers) keys(t testing.TB) (n int64) {
	t.Helper()
	for i := range s {
		s.admin(t, i, func(ctx context.Context, c *goredis.Client) error {
			size, err := c.DBSize(ctx).Result()
			n += size
			return err
		})
	}
	return n
}

// age returns a request with a long TTL, so that leftover votes stay.
func age(name string) backend.Request {
	r := request(name)
	r.TTL = time.Hour
	return r
}

// The servers that a grant did not need vote for it soon afterwards, or before its first renewal, with the same
// content as the others. They get no request for a hold that is released by then.
func TestVotesFollow(t *testing.T) {
	t.Parallel()
	s := start(t, 5)
	r := age("soon")
	r.Metadata = map[string]string{"job": "7"}
	take(t, s.patient(t, laterTime), r)
	eventually(t, "all servers vote", func() bool { return s.votes(t, r.Name) == 5 })
	if values := s.values(t, r.Name); len(slices.Compact(values)) != 1 {
		t.Errorf("the servers know %q", values)
	}

	d := s.patient(t, time.Hour)
	g := take(t, d, age("renewed"))
	if n := s.votes(t, "renewed"); n != 3 {
		t.Errorf("%d servers have voted at once, want 3", n)
	}
	if _, err := s.driver(t, nil).Acquire(
		within(t, 30*time.Second), request("renewed"),
	); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("a rival of a hold with 3 votes = %v, want ErrHeld", err)
	}
	eventually(t, "the rival's votes are released", func() bool { return s.votes(t, "renewed") == 3 })
	if err := d.Renew(within(t, 30*time.Second), []backend.Grant{g})[0].Err; err != nil {
		t.Error(err)
	}
	eventually(t, "all servers vote", func() bool { return s.votes(t, "renewed") == 5 })
	for range 10 {
		if err := d.Release(within(t, 30*time.Second), take(t, d, age("never"))); err != nil {
			t.Error(err)
		}
	}
	if n := s.votes(t, "never"); n > 0 || len(d.service.later.holds) > 0 {
		t.Errorf("%d servers still vote, %d holds are to follow", n, len(d.service.later.holds))
	}
	for i := range 2 {
		s.admin(t, 3+i, func(ctx context.Context, c *goredis.Client) error {
			return c.ConfigResetStat(ctx).Err()
		})
	}
	for range 10 {
		if err := d.Release(within(t, 30*time.Second), take(t, d, age("never"))); err != nil {
			t.Error(err)
		}
	}
	for i := range 2 {
		s.admin(t, 3+i, func(ctx context.Context, c *goredis.Client) error {
			stats, err := c.InfoMap(ctx, "commandstats").Result()
			for _, of := range []string{"cmdstat_set", "cmdstat_evalsha", "cmdstat_eval"} {
				if calls := stats["Commandstats"][of]; calls != "" {
					t.Errorf("server %d was asked: %s %s", 3+i, of, calls)
				}
			}
			return err
		})
	}
}

// A late vote is not requested after the end of its hold, as on a machine that slept: it would close the name on that
// server.
func TestNoVoteForAnEndedHold(t *testing.T) {
	t.Parallel()
	s := start(t, 5)
	d := s.patient(t, 2*time.Second)
	r := request("ended")
	r.TTL = 500 * time.Millisecond
	take(t, d, r)
	eventually(t, "the votes are due", func() bool {
		o := &d.service.later
		o.mu.Lock()
		defer o.mu.Unlock()
		return len(o.holds) == 0
	})
	if err := d.Ping(within(t, 30*time.Second)); err != nil { // comes after the votes on each server that answers
		t.Fatal(err)
	}
	if n := s.votes(t, r.Name); n > 0 {
		t.Errorf("%d servers vote for a hold that has ended", n)
	}
}

// A late vote never comes after the release, however close they are: it would close the name on that server for a TTL.
func TestNoVoteBehindARelease(t *testing.T) {
	t.Parallel()
	s := start(t, 5)
	d := s.patient(t, 0)
	var all sync.WaitGroup
	for worker := range 4 {
		all.Go(func() {
			for round := range 300 {
				ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
				g, err := d.Acquire(ctx, age(fmt.Sprintf("%d %d", worker, round)))
				if err == nil {
					time.Sleep(rand.N(60 * time.Microsecond))
					err = d.Release(ctx, g)
				}
				cancel()
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	eventually(t, "no vote is left", func() bool { return s.keys(t) == 0 })
	d.service.later.mu.Lock()
	defer d.service.later.mu.Unlock()
	if len(d.service.later.holds) > 0 {
		t.Errorf("%d holds are still to follow", len(d.service.later.holds))
	}
}

// A hold that began with three votes is released with two answers if the third server hangs, as a hold with five votes
// would be: two servers were never asked, and two have removed it.
func TestReleaseOfAFirstMajority(t *testing.T) {
	t.Parallel()
	s := start(t, 5)
	d := s.patient(t, time.Hour)
	g := take(t, d, age("hung"))
	s.pause(t, 1)
	d.service.hedgeTime = hedgeTime
	end := stallmeter.Late(t)
	if err := d.Release(within(t, 30*time.Second), g); err != nil {
		t.Error(err)
	}
	end(5*time.Second, "the release") // the driver waits twice as long for servers
	s.resume(t, 1)
	eventually(t, "the vote is given back", func() bool { return s.keys(t) == 0 })

	d = s.patient(t, time.Hour)
	g = take(t, d, age("forgotten"))
	s.expire(t, 0, "forgotten")
	s.expire(t, 1, "forgotten")
	if err := d.Release(within(t, 30*time.Second), g); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("release of a hold of which two of three votes are gone = %v, want ErrNotHeld", err)
	}
	eventually(t, "the vote is given back", func() bool { return s.keys(t) == 0 })
}

// Hung servers are asked last: the first call that meets them also asks the others, and later calls ask the others
// first.
func TestHungFirstMajority(t *testing.T) {
	t.Parallel()
	s := start(t, 5)
	d := s.patient(t, laterTime)
	d.service.hedgeTime = hedgeTime
	if err := d.Release(within(t, 30*time.Second), take(t, d, request("warm-up"))); err != nil {
		t.Fatal(err)
	}
	s.pause(t, 0, 1)
	defer s.resume(t, 0, 1)
	var took []time.Duration
	for range 50 {
		began, end := time.Now(), stallmeter.Late(t)
		if err := d.Release(within(t, 30*time.Second), take(t, d, request("name"))); err != nil {
			t.Error(err)
		}
		took = append(took, time.Since(began))
		end(5*time.Second, "acquire and release") // the driver waits twice as long for servers
	}
	slices.Sort(took)
	t.Logf("acquire and release, two of five servers hung: median %v, longest %v", took[len(took)/2], took[len(took)-1])
}

// With WaitForAll a hold begins with all votes.
func TestWaitForAll(t *testing.T) {
	t.Parallel()
	s := start(t, 5)
	d := s.driver(t, &Options{TrustFresh: true, WaitForAll: true, NodeTimeout: 30 * time.Second})
	d.service.laterTime = time.Hour // no vote follows the grant
	for i := range 20 {
		g := take(t, d, request(fmt.Sprint(i)))
		if n := s.votes(t, g.Name); n != 5 {
			t.Errorf("a hold begins with %d votes", n)
		}
		if err := d.Release(within(t, 30*time.Second), g); err != nil {
			t.Error(err)
		}
	}
	eventually(t, "no vote is left", func() bool { return s.keys(t) == 0 })
}

// A driver that is closed right after a release ends the hold also on a server to which it is not connected yet.
func TestCloseSendsReleases(t *testing.T) {
	t.Parallel()
	s := start(t, 3)
	var clients []goredis.UniversalClient
	for i, server := range s {
		options := &goredis.Options{Addr: server.Addr()}
		if i == 2 {
			options.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				conn, err := new(net.Dialer).DialContext(ctx, network, addr)
				time.Sleep(300 * time.Millisecond) // the network is slow
				return conn, err
			}
		}
		c := goredis.NewClient(options)
		defer c.Close()
		clients = append(clients, c)
	}
	d := New(clients, &Options{TrustFresh: true, WaitForAll: true, MaxTTL: time.Hour})
	g := take(t, d, age("n"))
	if err := d.Release(within(t, 30*time.Second), g); err != nil {
		t.Error(err)
	}
	if err := d.Close(within(t, 30*time.Second)); err != nil {
		t.Error(err)
	}
	if n := s.votes(t, "n"); n > 0 {
		t.Errorf("%d servers still have the hold", n)
	}
}

// contended returns a driver with holds of names, which writes slowly to the servers from first on while slow is set.
// Until leave, a waiter of another driver is in the queue of the last server for the first name.
func (s servers) contended(t *testing.T, slow *atomic.Bool, first int, names ...string) (
	d *Driver, holds []backend.Grant, leave func(),
) {
	t.Helper()
	var clients, reversed []goredis.UniversalClient
	for i, server := range s {
		options := &goredis.Options{Addr: server.Addr()}
		plain := goredis.NewClient(options)
		t.Cleanup(func() { plain.Close() })
		if reversed = append([]goredis.UniversalClient{plain}, reversed...); i >= first {
			options.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				conn, err := new(net.Dialer).DialContext(ctx, network, addr)
				return slowConn{conn, slow}, err
			}
		}
		c := goredis.NewClient(options)
		t.Cleanup(func() { c.Close() })
		clients = append(clients, c)
	}
	o := &Options{TrustFresh: true, WaitForAll: true, MaxTTL: time.Hour}
	d, other := New(clients, o), New(reversed, o)
	for _, name := range names {
		holds = append(holds, take(t, d, age(name)))
	}
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		r := age(names[0])
		r.Wait = true
		g, err := other.Acquire(ctx, r)
		if err == nil {
			err = other.Release(within(t, 30*time.Second), g)
		} else if errors.Is(err, context.Canceled) {
			err = nil
		}
		left <- err
	}()
	eventually(t, "the waiter stands in the queue of the last server", func() bool {
		var n int64
		s.admin(t, len(s)-1, func(ctx context.Context, c *goredis.Client) (err error) {
			n, err = c.Exists(ctx, d.service.keys(names[0]).Queue).Result()
			return err
		})
		return n == 1
	})
	return d, holds, func() {
		cancel()
		if err := <-left; err != nil {
			t.Error(err)
		}
		if err := other.Close(within(t, 30*time.Second)); err != nil {
			t.Error(err)
		}
	}
}

// A driver that is closed right after a release ends the hold also on a server with a waiter, where the short script
// refuses.
func TestCloseSendsWholeReleases(t *testing.T) {
	t.Parallel()
	s := start(t, 3)
	var slow atomic.Bool
	d, holds, leave := s.contended(t, &slow, 2, "n")
	slow.Store(true)
	if err := d.Release(within(t, 30*time.Second), holds[0]); err != nil {
		t.Error(err)
	}
	if err := d.Close(within(t, 30*time.Second)); err != nil {
		t.Error(err)
	}
	leave()
	if n := s.votes(t, "n"); n > 0 {
		t.Errorf("%d servers still have the hold", n)
	}
}

// Releases whose callers return before servers have answered end the holds on these servers too, even if the driver is
// closed right after them: a release that waits behind another request, and a release that the short script refuses.
func TestCloseSendsAbandonedReleases(t *testing.T) {
	t.Parallel()
	s := start(t, 3)
	tries := 0
	excused, err := stallmeter.Fairly(500*time.Millisecond, func() (err error) { // the timeout of a server is a second
		tries++
		var slow atomic.Bool
		d, holds, leave := s.contended(t, &slow, 1, fmt.Sprint("n", tries), fmt.Sprint("behind", tries))
		slow.Store(true)
		for _, g := range holds {
			if err := d.Release(within(t, 50*time.Millisecond), g); !errors.Is(err, backend.ErrUnknown) {
				t.Errorf("a release without an answer: %v", err)
			}
		}
		if err := d.Close(within(t, 30*time.Second)); err != nil {
			t.Error(err)
		}
		leave()
		for _, g := range holds {
			if n := s.votes(t, g.Name); n > 0 {
				err = errors.Join(err, fmt.Errorf("%d servers still have the hold of %s", n, g.Name))
			}
		}
		return err
	})
	stallmeter.Report(t, "abandoned releases", excused, err)
}

// slowConn delays what it writes while slow is set.
type slowConn struct {
	net.Conn
	slow *atomic.Bool
}

func (c slowConn) Write(p []byte) (int, error) {
	if c.slow.Load() {
		time.Sleep(300 * time.Millisecond)
	}
	return c.Conn.Write(p)
}
