package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/conformance/fault"
)

// partition cuts the holder off while a rival on a good network waits. The holder must be notified before the rival
// holds.
func partition(r *round) {
	ttl := r.ttl()
	proxy, o := r.proxy()
	cut, rival := r.open(1, o)[0], r.client(ttl)
	name := r.name("partition")
	lost := r.lock(cut, name).Context().Done()
	granted := r.granting(rival, name)
	phase := ttl / 2 // somewhere between two renewals
	if r.peer.renewEvery != nil {
		phase = r.peer.renewEvery(ttl)
	}
	sleep(r.ctx, 200*time.Millisecond+rand.N(phase))
	proxy.Drop(fault.Both)
	began := time.Now()

	timeout := time.After(2*ttl + time.Second)
	for r.s["notified-s"], r.s["rival-s"] = never, never; lost != nil || granted != nil; {
		select {
		case <-lost:
			r.s["notified-s"], lost = time.Since(began).Seconds(), nil
		case g := <-granted:
			r.must(g.err)
			r.s["rival-s"], granted = g.at.Sub(began).Seconds(), nil
		case <-timeout:
			if granted != nil {
				r.must(errors.New("the rival did not get the lock"))
			}
			lost = nil
		}
	}
	r.s["margin-ms"], r.s["late"] = 1000*(r.s["rival-s"]-r.s["notified-s"]), 0
	if r.s["margin-ms"] < 0 {
		r.s["late"] = 1
	}
}

// wipe deletes the holder's record behind the library, as a failover that lost data does.
func wipe(r *round) {
	ttl, name := r.ttl(), r.name("wipe")
	lost := r.lock(r.client(ttl), name).Context().Done()
	sleep(r.ctx, 200*time.Millisecond+rand.N(ttl/3))
	began := r.at.wipe(&r.scope, r.peer.key(name))
	select {
	case <-lost:
		r.s["notified-s"] = time.Since(began).Seconds()
	case <-time.After(2 * ttl):
		r.s["notified-s"] = never
	}
}

// stop measures calls with a context that ends after 1 s, while the server is stopped with its sockets open.
func stop(r *round) {
	c := r.client(longTTL)
	h := r.lock(c, r.name("stop"))
	r.later(r.at.resume) // before the client is closed
	r.must(r.at.pause())
	timed := func(call func(ctx context.Context) error) (took, ok float64) {
		ctx, cancel := context.WithTimeout(r.ctx, time.Second)
		defer cancel()
		var err error
		began := time.Now()
		if !patiently(ctx, r.length(7*time.Second, 3*time.Second), func() { err = call(ctx) }) {
			return never, 0
		}
		if err == nil {
			ok = 1
		}
		return time.Since(began).Seconds(), ok
	}
	var took, ok float64
	var all sync.WaitGroup
	all.Go(func() { took, ok = timed(h.Release) })
	r.s["lock-s"], _ = timed(func(ctx context.Context) error {
		_, err := c.lock(ctx, r.fresh("stop"))
		return err
	})
	all.Wait()
	r.s["unlock-s"], r.s["unlock-ok"] = took, ok
}

// crash kills the holder's process while another process waits.
func crash(r *round) {
	ttl, name := r.ttl(), r.name("crash")
	holder := r.child(part{TTL: ttl, Name: name})
	granted := r.granting(r.client(ttl), name)
	sleep(r.ctx, ttl/6+rand.N(ttl/2))
	killed := time.Now()
	holder.Close()
	took := r.await(granted).Sub(killed)
	r.s["grant-s"], r.s["beyond-ms"] = took.Seconds(), ms(took-ttl)
}

// dead is the cost of dead waiters to the waiters behind them.
func dead(r *round) {
	clients, name := r.open(2, clientOptions{ttl: longTTL}), r.name("dead")
	held := r.lock(clients[0], name)
	child := r.child(part{TTL: longTTL, Name: name, Waiters: r.size})
	granted := r.granting(clients[1], name)
	sleep(r.ctx, time.Second) // until it is in the queue
	child.Close()
	released := time.Now()
	r.must(held.Release(r.ctx))
	r.s["grant-s"] = r.await(granted).Sub(released).Seconds()
}

// listen has another client subscribe to all channels, as monitoring tools do, so that Redis counts messages to dead
// waiters as received.
func listen(r *round) {
	for addr := range strings.SplitSeq(r.at.addr(), ",") {
		c := goredis.NewClient(&goredis.Options{Addr: addr})
		r.closing(c)
		_, err := c.PSubscribe(r.ctx, "*").Receive(r.ctx)
		r.must(err)
	}
}

// failover ends the leader with end, and asks for the next grant.
func failover(r *round, end func(*process)) {
	c := r.open(1, clientOptions{addr: r.at.endpoints(), ttl: 10 * time.Second})[0]
	leader, err := r.at.leader(r.ctx)
	r.must(err)
	server := r.at.servers[leader]
	sleep(r.ctx, rand.N(100*time.Millisecond)) // somewhere between two heartbeats
	var succeeded, ended time.Time
	var others sync.WaitGroup
	r.later(func() { // even without a grant: the next round needs all members
		others.Wait()
		r.err = errors.Join(r.err, server.start(), r.at.serving(context.WithoutCancel(r.ctx), leader))
	})
	began := time.Now()
	end(server)
	others.Go(func() { server.awaitEnd(); ended = time.Now() })
	others.Go(func() {
		for next := leader; next == leader && r.ctx.Err() == nil; succeeded = time.Now() {
			next, _ = r.at.leader(r.ctx)
		}
	})
	r.s["grant-ms"] = ms(r.grantOne(c).Sub(began))
	others.Wait()
	r.s["leader-ms"], r.s["end-ms"] = ms(succeeded.Sub(began)), ms(ended.Sub(began))
}

// frozen stops a member with its sockets open: the leader, or a random follower. A client that has used the members
// asks for the next grants. Requests to the stopped member wait for an answer.
func frozen(r *round, leads bool) {
	c := r.open(1, clientOptions{addr: r.at.endpoints(), ttl: 10 * time.Second})[0]
	member, err := r.at.leader(r.ctx)
	r.must(err)
	if n := len(r.at.servers); !leads {
		member = (member + 1 + rand.N(n-1)) % n
	}
	r.grantOne(c)
	server := r.at.servers[member]
	r.later(func() {
		r.err = errors.Join(r.err, server.child.Resume(), r.at.serving(context.WithoutCancel(r.ctx), member))
	})
	r.must(server.child.Pause())
	r.s["next-ms"], r.s["tries"] = 0, 0
	r.s["grant-ms"] = r.soon(c)
	for range 5 { // over other connections, if the client alternates
		r.s["next-ms"] = max(r.s["next-ms"], r.soon(c))
	}
}

// soon returns the time that a client needs for a free name, which it keeps, in milliseconds. It repeats and counts
// calls that fail.
func (r *round) soon(c *client) float64 {
	ctx, cancel := context.WithTimeout(r.ctx, frozenWait)
	defer cancel()
	for began := time.Now(); ; r.s["tries"]++ {
		if _, err := c.lock(ctx, r.fresh("frozen")); err == nil {
			return ms(time.Since(began))
		}
		if ctx.Err() != nil {
			r.must(r.ctx.Err())
			return never
		}
		sleep(ctx, 10*time.Millisecond)
	}
}

// frozenWait is the maximum time for a grant while a member is stopped.
const frozenWait = 10 * time.Second

// grantOne acquires a free name, and returns the time of the grant. It repeats and counts calls that fail.
func (r *round) grantOne(c *client) time.Time {
	name := r.name("failover")
	for r.s["tries"] = 0; ; r.s["tries"]++ {
		h, err := c.lock(r.ctx, name)
		at := time.Now()
		if err == nil {
			r.must(h.Release(r.ctx))
			return at
		}
		r.must(r.ctx.Err())
		sleep(r.ctx, 10*time.Millisecond)
	}
}
