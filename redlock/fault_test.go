package redlock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/stallmeter"
)

// TestSickMinority shows, for each fault of one or two of five servers, that calls keep working, take no longer than
// the timeout of an unresponsive server, and that a held lock stays held. Network faults affect one client only, so
// these tests share servers.
func TestSickMinority(t *testing.T) {
	t.Parallel()
	t.Run("gone", func(t *testing.T) {
		t.Parallel()
		s := start(t, 5)
		t.Run("dead", func(t *testing.T) {
			everyMinority(t, s, false, func(t *testing.T, _ fault.Links, which []int) func() {
				s.stop(t, which...)
				return func() { s.startAgain(t, which...) }
			})
		})
		t.Run("restarted empty", func(t *testing.T) {
			everyMinority(t, s, false, func(t *testing.T, _ fault.Links, which []int) func() {
				s.restart(t, which...)
				return func() {}
			})
		})
	})
	t.Run("hung", func(t *testing.T) {
		t.Parallel()
		s := start(t, 5)
		everyMinority(t, s, false, func(t *testing.T, _ fault.Links, which []int) func() {
			s.pause(t, which...)
			return func() { s.resume(t, which...) }
		})
	})
	t.Run("network", func(t *testing.T) {
		t.Parallel()
		s := start(t, 5)
		for name, act := range map[string]func(fault.Link){
			"slow":        func(l fault.Link) { l.Delay(fault.Both, 2*sickBound) },
			"partitioned": func(l fault.Link) { l.Drop(fault.Both) },
			"deaf":        func(l fault.Link) { l.Drop(fault.Replies) },
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				everyMinority(t, s, name != "slow", func(_ *testing.T, links fault.Links, which []int) func() {
					for _, i := range which {
						act(links[i])
					}
					return links.Pass
				})
			})
		}
	})
}

// everyMinority calls act for some minorities of s. If swallows is set, the fault drops sent requests, and leftovers
// end with their TTL.
func everyMinority(t *testing.T, s servers, swallows bool, act func(*testing.T, fault.Links, []int) (heal func())) {
	for _, which := range [][]int{{0}, {4}, {0, 1}, {1, 3}} {
		t.Run(fmt.Sprint(which), func(t *testing.T) {
			sickMinority(t, s, swallows, func(links fault.Links) func() { return act(t, links, which) })
		})
	}
}

// The maximum times of calls beside a sick minority: the timeout of unresponsive servers, and a margin for the
// machine. An intentionally slow server is slower than that.
const (
	sickTimeout = time.Second
	sickBound   = sickTimeout + 2*time.Second
)

func sickMinority(t *testing.T, s servers, swallows bool, act func(fault.Links) (heal func())) {
	const ttl = 3 * time.Second
	d, links := s.linked(t, &Options{TrustFresh: true, NodeTimeout: sickTimeout})
	client, err := fencelock.ForEfficiency(d, &fencelock.Options{TTL: ttl})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close(context.Background())
	w := stallmeter.Begin()
	defer w.End()
	kept := t.Name() + " kept"
	lease, err := client.Acquire(within(t, 30*time.Second), kept)
	if err != nil {
		t.Fatal(err)
	}
	queue(t, d, t.Name()+" warm") // makes the subscriptions
	heal := act(links)
	defer heal() // also after a failure: other subtests use the servers
	broken := time.Now()

	name := func(round int) string { return fmt.Sprint(t.Name(), " round ", round) }
	renewed := func() bool { return lease.Deadline().After(broken.Add(d.Describe().Validity(ttl))) }
	for round := 0; (round < 6 || !renewed() && lease.Err() == nil) && !t.Failed(); round++ {
		r := request(name(round))
		r.Wait = round%2 == 1
		var g backend.Grant
		timed(t, sickBound, "acquire", func(ctx context.Context) error { g, err = d.Acquire(ctx, r); return err })
		timed(t, sickBound, "renew", func(ctx context.Context) error { return d.Renew(ctx, []backend.Grant{g})[0].Err })
		timed(t, sickBound, "release", func(ctx context.Context) error { return d.Release(ctx, g) })
	}
	timed(t, 2*sickBound, "hand-over", func(context.Context) error { queue(t, d, t.Name()+" queue"); return nil })
	if err := lease.Err(); err != nil {
		w.Errorf(t, ttl/10, "the lock that was held all the time: %v", err)
	}
	heal()
	if err := lease.Release(within(t, 30*time.Second)); err != nil && !errors.Is(err, fencelock.ErrLost) {
		w.Errorf(t, sickTimeout/10, "release after the fault: %v", err)
	}
	if swallows {
		return
	}
	eventually(t, "no vote is left on any server", func() bool {
		return s.votes(t, kept) == 0 && s.votes(t, name(0)) == 0 && s.votes(t, t.Name()+" queue") == 0
	})
}

// timed calls act, which must succeed within bound.
func timed(t *testing.T, bound time.Duration, what string, act func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	w, end := stallmeter.Begin(), stallmeter.Late(t)
	defer w.End()
	if err := act(ctx); err != nil {
		w.Errorf(t, bound/10, "%s: %v", what, err)
	}
	end(bound, what)
}

// queue hands a lock from one request of d to another that waits for it.
func queue(t *testing.T, d *Driver, name string) {
	t.Helper()
	g := take(t, d, request(name))
	got := make(chan backend.Grant, 1)
	go func() {
		r := request(name)
		r.Wait = true
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		g, err := d.Acquire(ctx, r)
		if err != nil {
			t.Errorf("waiter: %v", err)
		}
		got <- g
	}()
	eventually(t, "the waiter waits", func() bool {
		info, err := d.Look(context.Background(), name)
		return err == nil && info.Waiters > 0 || len(got) > 0
	})
	if err := d.Release(within(t, 30*time.Second), g); err != nil {
		t.Error(err)
	}
	if next := <-got; next.Name != "" {
		if err := d.Release(within(t, 30*time.Second), next); err != nil {
			t.Error(err)
		}
	}
}

// TestFiveServers has the tests that leave their servers unchanged, and so share five servers.
func TestFiveServers(t *testing.T) {
	t.Parallel()
	s := start(t, 5)
	for name, test := range map[string]func(*testing.T, servers){
		"majority gone":                         majorityGone,
		"clock jump":                            clockJump,
		"renewed for less":                      renewedForLess,
		"what is shown":                         shown,
		"quarantine":                            func(t *testing.T, s servers) { quarantine(t, s, true) },
		"without quarantine":                    func(t *testing.T, s servers) { quarantine(t, s, false) },
		"split votes":                           func(t *testing.T, s servers) { splitVotes(t, s, true) },
		"split votes, contenders that disagree": func(t *testing.T, s servers) { splitVotes(t, s, false) },
		"split attempts":                        splitAttempts,
	} {
		t.Run(name, func(t *testing.T) { test(t, s) })
	}
}

// majorityGone: without a majority no lock is granted and no hold is lost.
func majorityGone(t *testing.T, s servers) {
	d := s.driver(t, &Options{TrustFresh: true, NodeTimeout: time.Second})
	g := take(t, d, request("held"))
	s.stop(t, 0, 2, 4)
	defer s.startAgain(t, 0, 2, 4)
	if _, err := d.Acquire(within(t, 30*time.Second), request("other")); !errors.Is(err, backend.ErrUnavailable) &&
		!errors.Is(err, backend.ErrUnknown) {
		t.Errorf("acquire = %v, want ErrUnavailable or ErrUnknown", err)
	}
	err := d.Renew(within(t, 30*time.Second), []backend.Grant{g})[0].Err
	if err == nil || errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("renew = %v, want a fault that is no loss", err)
	}
	s.expire(t, 1, "held")
	err = d.Renew(within(t, 30*time.Second), []backend.Grant{g})[0].Err
	if err == nil || errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("renew when one of two servers lacks the hold = %v, want a fault that is no loss", err)
	}
}

// clockJump: one server expires a lock too early, as after a forward jump of its clock. The holder keeps the lock, no
// other client gets it, and the next renewal restores the vote.
func clockJump(t *testing.T, s servers) {
	a, b := s.driver(t, nil), s.driver(t, nil)
	r := request(t.Name())
	r.Metadata = map[string]string{"job": "7"}
	g := take(t, a, r)
	eventually(t, "all servers vote", func() bool { return s.votes(t, t.Name()) == 5 })
	before := s.values(t, t.Name())[1]
	s.expire(t, 1, t.Name())
	if _, err := b.Acquire(within(t, 30*time.Second), request(t.Name())); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("acquire by a rival = %v, want ErrHeld", err)
	}
	eventually(t, "the rival's vote is released", func() bool { return s.votes(t, t.Name()) == 4 })
	eventually(t, "renewal refills", func() bool {
		if err := a.Renew(within(t, 30*time.Second), []backend.Grant{g})[0].Err; err != nil {
			t.Fatalf("renew = %v", err)
		}
		return s.votes(t, t.Name()) == 5
	})
	if after := s.values(t, t.Name())[1]; after != before {
		t.Errorf("refilled with %q, it was %q", after, before)
	}
	for i := range 3 {
		s.expire(t, i, t.Name())
	}
	if err := a.Renew(within(t, 30*time.Second), []backend.Grant{g})[0].Err; !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("renew without a majority = %v, want ErrNotHeld", err)
	}
	if n := s.votes(t, t.Name()); n != 2 {
		t.Errorf("%d votes after the loss, want the 2 that were left: nothing is created", n)
	}
}

// renewedForLess: a renewal for less than the remaining time at the servers changes nothing.
func renewedForLess(t *testing.T, s servers) {
	d := s.driver(t, nil)
	g := take(t, d, request(t.Name()))
	short := g
	short.TTL = time.Second
	if answer := d.Renew(within(t, 30*time.Second), []backend.Grant{short})[0]; answer.Err != nil {
		t.Errorf("renew = %v", answer.Err)
	}
	state, err := d.Look(within(t, 30*time.Second), t.Name())
	if err != nil || len(state.Holders) != 1 || state.Holders[0].ExpiresIn < 10*time.Second {
		t.Errorf("renewed for less: %+v, %v", state, err)
	}
}

// shown: looks at a lock show the hold's id, and never the key that moves the hold.
func shown(t *testing.T, s servers) {
	d, other := s.driver(t, nil), s.driver(t, nil)
	r := request(t.Name())
	r.HoldID, r.Metadata = "shown-to_all", map[string]string{"a": "|\n"}
	g := take(t, d, r)
	state, err := other.Look(within(t, 30*time.Second), r.Name)
	if err != nil || len(state.Holders) != 1 || state.Holders[0].HoldID != r.HoldID ||
		state.Holders[0].Metadata["a"] != "|\n" {
		t.Errorf("Look = %+v, %v", state, err)
	}
	_, err = other.Acquire(within(t, 30*time.Second), request(r.Name))
	var refused *backend.HeldError
	if !errors.As(err, &refused) || refused.HoldID != r.HoldID {
		t.Errorf("a rival gets %+v", refused)
	}
	if text := fmt.Sprintf("%+v %v %#v", state, err, refused); strings.Contains(text, r.RequestID) {
		t.Errorf("the key is shown: %s", text)
	}
	// A late release affects only the attempt for which it was sent.
	late := r
	late.RequestID = backend.NewRequestID()
	if err := other.Release(within(t, 30*time.Second), late.Grant()); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("a release of another attempt = %v", err)
	}
	if answer := d.Renew(within(t, 30*time.Second), []backend.Grant{g})[0]; answer.Err != nil {
		t.Errorf("renew = %v", answer.Err)
	}
}

// quarantine: the holder has the votes of servers 0 to 2, and server 2 loses its state in a restart. Without the
// quarantine, its vote grants the lock a second time.
func quarantine(t *testing.T, s servers, on bool) {
	holder, link := s.linked(t, nil)
	rival := s.driver(t, &Options{TrustFresh: true, NodeTimeout: time.Second})
	holder.service.quarantine, rival.service.quarantine = on, on
	for _, d := range []*Driver{holder, rival} { // both have examined all servers
		if err := d.Ping(within(t, 30*time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	link[3].Refuse()
	link[4].Refuse()
	take(t, holder, request(t.Name()))
	s.restart(t, 2)
	_, err := rival.Acquire(within(t, 30*time.Second), request(t.Name()))
	if on && err == nil {
		t.Errorf("a second holder was granted the lock with the vote of a server that forgot the first")
	}
	if !on && err != nil {
		t.Errorf("without the quarantine = %v, want the second grant that it prevents", err)
	}
	var quarantined *QuarantineError
	if on && rival.service.nodes[2].client.Ping(within(t, 30*time.Second)).Err() == nil {
		t.Errorf("the restarted server is not in quarantine")
	} else if on && !errors.As(rival.service.nodes[2].client.Ping(within(t, 30*time.Second)).Err(), &quarantined) {
		t.Errorf("no *QuarantineError tells why the server does not vote")
	}
}

// TestQuarantineEnds: after MaxTTL a restarted server votes again.
func TestQuarantineEnds(t *testing.T) {
	t.Parallel()
	s := start(t, 3)
	d := s.driver(t, &Options{TrustFresh: true, MaxTTL: 10 * time.Second}) // a busy machine pings within it
	if err := d.Ping(within(t, 30*time.Second)); err != nil {
		t.Fatal(err)
	}
	s.restart(t, 1)
	ping := func() error { return d.service.nodes[1].client.Ping(within(t, 30*time.Second)).Err() }
	eventually(t, "the restart is noticed", func() bool {
		var quarantined *QuarantineError
		return errors.As(ping(), &quarantined)
	})
	eventually(t, "the quarantine ends", func() bool { return ping() == nil })
}

// TestFreshServers: without TrustFresh, servers that have just started grant no locks, and the error has the reason.
func TestFreshServers(t *testing.T) {
	t.Parallel()
	s := start(t, 3)
	strict := s.driver(t, &Options{})
	r := request("name")
	_, err := strict.Acquire(within(t, 30*time.Second), r)
	var quarantined *QuarantineError
	if !errors.Is(err, backend.ErrUnavailable) || !errors.As(err, &quarantined) {
		t.Errorf("acquire on fresh servers = %v, want ErrUnavailable with a *QuarantineError", err)
	}
	durable := start(t, 3, "--appendonly", "yes", "--appendfsync", "always")
	take(t, durable.driver(t, &Options{}), r)
}

// splitVotes: contenders that start together all get their turn, even if they do not agree on the leader.
func splitVotes(t *testing.T, s servers, agree bool) {
	const clients, contenders = 5, 50
	var drivers []*Driver
	for i := range clients {
		d, links := s.linked(t, &Options{TrustFresh: true})
		if !agree {
			links[i].Refuse() // client 0 has another leader than the others, and clients 2 to 4 have one vote less
		}
		drivers = append(drivers, d)
	}
	var inside atomic.Int32
	var all sync.WaitGroup
	began := time.Now()
	gun := make(chan struct{})
	for i := range contenders {
		all.Go(func() {
			<-gun
			d := drivers[i%clients]
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
			defer cancel()
			r := request(t.Name())
			r.Wait = true
			g, err := d.Acquire(ctx, r)
			if err != nil {
				t.Errorf("contender %d: %v", i, err)
				return
			}
			if inside.Add(1) > 1 {
				t.Error("two hold the lock")
			}
			inside.Add(-1)
			err = d.Release(ctx, g)
			for errors.Is(err, backend.ErrUnknown) && ctx.Err() == nil { // the answer of a busy machine comes too late
				if err = d.Release(ctx, g); errors.Is(err, backend.ErrNotHeld) {
					err = nil // an earlier release has ended the hold, as the core assumes, too
				}
			}
			if err != nil {
				t.Errorf("contender %d: release: %v", i, err)
			}
		})
	}
	close(gun)
	all.Wait()
	t.Logf("%d contenders in %v", contenders, time.Since(began))
}

// splitAttempts: one of several simultaneous attempts is granted the lock, although the first votes are often split.
func splitAttempts(t *testing.T, s servers) {
	drivers := []*Driver{s.driver(t, nil), s.driver(t, nil), s.driver(t, nil), s.driver(t, nil)}
	for _, d := range drivers {
		take(t, d, request(backend.NewRequestID()))
	}
	none := 0
	const rounds = 50
	w := stallmeter.Begin() // a stalled server answers no request in time
	defer w.End()
	for round := range rounds {
		var granted atomic.Int32
		var all sync.WaitGroup
		for _, d := range drivers {
			all.Go(func() {
				_, err := d.Acquire(within(t, 30*time.Second), request(fmt.Sprint("round ", round)))
				if err == nil {
					granted.Add(1)
				} else if !errors.Is(err, backend.ErrHeld) {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if granted.Load() > 1 {
			t.Errorf("round %d: %d were granted the lock", round, granted.Load())
		}
		if granted.Load() == 0 {
			none++
		}
	}
	if none > 0 {
		w.Errorf(t, 100*time.Millisecond, "in %d of %d rounds nobody was granted a free lock", none, rounds)
	}
}

// TestUnfit: a server that cannot keep votes is refused with a typed error.
func TestUnfit(t *testing.T) {
	t.Parallel()
	s := start(t, 3)
	client := func(addr string) goredis.UniversalClient {
		c := goredis.NewClient(&goredis.Options{Addr: addr})
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	a, b, c := s[0].Addr(), s[1].Addr(), s[2].Addr()
	try := func(want error, clients []goredis.UniversalClient) (wrong error) {
		d := New(clients, &Options{TrustFresh: true})
		defer d.Close(context.Background())
		if err := d.Ping(within(t, 30*time.Second)); !errors.Is(err, want) {
			wrong = fmt.Errorf("Ping = %v, want %v", err, want)
		}
		ctx, r := within(t, 30*time.Second), request("name")
		_, acquire := d.Acquire(ctx, r)
		_, look := d.Look(ctx, r.Name)
		for call, err := range map[string]error{
			"Acquire": acquire, "Look": look, "Release": d.Release(ctx, r.Grant()),
			"Renew": d.Renew(ctx, []backend.Grant{r.Grant()})[0].Err,
		} {
			if call == "Release" && errors.Is(err, backend.ErrNotHeld) { // a release does not wait for an examination
				continue
			}
			if !errors.Is(err, want) || strings.Contains(err.Error(), "%!") {
				wrong = errors.Join(wrong, fmt.Errorf("%s = %v, want %v", call, err, want))
			}
		}
		return wrong
	}
	check := func(what string, want error, clients ...goredis.UniversalClient) {
		t.Helper()
		// A server that answers 250 ms after the majority is examined later.
		excused, err := stallmeter.Fairly(straggle/2, func() error { return try(want, clients) })
		stallmeter.Report(t, what, excused, err)
	}
	check("two servers", backend.ErrInvalidOption, client(a), client(b))
	check("one server", backend.ErrInvalidOption, client(a))
	check("none", backend.ErrInvalidOption)
	check("four servers", backend.ErrInvalidOption, client(a), client(b), client(c), client(c))
	check("nil", backend.ErrInvalidOption, client(a), client(b), nil)
	check("a nil client", backend.ErrInvalidOption, client(a), (*goredis.Client)(nil), client(c))
	check("the same server twice", backend.ErrMisconfigured, client(a), client(b), client(b))
	cluster := goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: []string{c}})
	defer cluster.Close()
	check("a cluster client", backend.ErrMisconfigured, client(a), client(b), cluster)
	sentinel := goredis.NewFailoverClient(&goredis.FailoverOptions{MasterName: "m", SentinelAddrs: []string{c}})
	defer sentinel.Close()
	check("a client of Sentinel", backend.ErrMisconfigured, client(a), client(b), sentinel)
	check("a node of a cluster", backend.ErrMisconfigured,
		client(a), client(b), client(containers.Redis(t, containers.Args("--cluster-enabled", "yes")).Addr()))

	s.admin(t, 2, func(ctx context.Context, c *goredis.Client) error {
		if err := c.ConfigSet(ctx, "maxmemory", "100mb").Err(); err != nil {
			return err
		}
		return c.ConfigSet(ctx, "maxmemory-policy", "allkeys-lru").Err()
	})
	check("a server that evicts", backend.ErrMisconfigured, client(a), client(b), client(c))
	s.admin(t, 2, func(ctx context.Context, c *goredis.Client) error {
		if err := c.ConfigSet(ctx, "maxmemory", "0").Err(); err != nil {
			return err
		}
		return c.ReplicaOf(ctx, "127.0.0.1", "1").Err()
	})
	check("a replica", backend.ErrMisconfigured, client(a), client(b), client(c))
}

// TestLateServer: a server that is down or does not answer at the start of the driver joins when it comes back.
func TestLateServer(t *testing.T) {
	t.Parallel()
	s := start(t, 3)
	for _, way := range []struct {
		what           string
		leave, comeOut func(testing.TB, ...int)
	}{
		{"dead", s.stop, s.startAgain},
		{"hung", s.pause, s.resume},
	} {
		t.Run(way.what, func(t *testing.T) {
			way.leave(t, 1)
			defer way.comeOut(t, 1)
			d := s.driver(t, nil)
			g := take(t, d, request(t.Name()))
			way.comeOut(t, 1)
			eventually(t, "the server joins", func() bool {
				if err := d.Renew(within(t, 30*time.Second), []backend.Grant{g})[0].Err; err != nil {
					t.Fatal(err)
				}
				return s.votes(t, t.Name()) == 3
			})
		})
	}
}

// TestLateUnfitServer: a server that comes back unfit is examined before it votes.
func TestLateUnfitServer(t *testing.T) {
	t.Parallel()
	s := start(t, 3)
	d := s.driver(t, nil)
	take(t, d, request("name"))
	s.restart(t, 1)
	s.admin(t, 1,
		func(ctx context.Context, c *goredis.Client) error { return c.ReplicaOf(ctx, "127.0.0.1", "1").Err() })
	other := s.driver(t, nil)
	if err := other.Ping(within(t, 30*time.Second)); !errors.Is(err, backend.ErrMisconfigured) {
		t.Errorf("Ping = %v, want ErrMisconfigured", err)
	}
	take(t, d, request("another")) // the running driver continues with the two others
	if err := d.service.nodes[1].client.Ping(within(t, 30*time.Second)).Err(); !errors.Is(err, backend.ErrMisconfigured) {
		t.Errorf("the replica was accepted: %v", err)
	}
}

// TestScriptsFlushed: a request by the script's hash to a server without the script is repeated with the whole script.
func TestScriptsFlushed(t *testing.T) {
	t.Parallel()
	s := start(t, 3)
	d := s.driver(t, nil)
	var grants []backend.Grant
	for i := range 200 { // more than the 128 that one call carries
		grants = append(grants, take(t, d, request(fmt.Sprint("name ", i))))
	}
	flush := func() {
		for i := range s {
			s.admin(t, i, func(ctx context.Context, c *goredis.Client) error { return c.ScriptFlush(ctx).Err() })
		}
	}
	flush()
	for i, r := range d.Renew(within(t, 30*time.Second), grants) {
		if r.Err != nil {
			t.Errorf("grant %d: %v", i, r.Err)
		}
	}
	flush()
	if err := d.Release(within(t, 30*time.Second), grants[0]); err != nil {
		t.Error(err)
	}
}
