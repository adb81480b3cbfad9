package zookeeper_test

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/zookeeper"
)

// scene is one use of the recipe by the driver whose connection breaks, and what must come of it.
type scene struct {
	name string
	play func(*play) error
	// needs are the steps that come each time. Others come by the clock: a waiter's look, a proof between two calls,
	// the removal of a name that has not been used for a while.
	needs []string
	kinds []backend.Kind // of the driver's request
}

var (
	allKinds = []backend.Kind{backend.KindExclusive, backend.KindShared, backend.KindPermits}
	lesser   = []backend.Kind{backend.KindShared, backend.KindPermits}
)

// play is a scene with its actors.
type play struct {
	t     *testing.T
	d     backend.Driver    // its connection breaks
	b     *breaker          // of d
	rival *zookeeper.Driver // its does not
	r     backend.Request   // of d
	arm   func()            // from now on
}

var scenes = []scene{
	{
		name:  "an attempt at a free name",
		kinds: allKinds,
		needs: []string{"make the name's node", "create", "list", "watch one's own", "delete one's own"},
		play: func(p *play) error {
			p.arm()
			return p.holdAndRelease(false)
		},
	},
	{
		name:  "a wait",
		kinds: allKinds,
		needs: []string{
			"make the name's node", "create", "list", "watch another's", "watch one's own", "delete one's own",
		},
		play: func(p *play) error {
			g, err := p.rival.Acquire(soon(p.t, 20*time.Second), p.other())
			if err != nil {
				return err
			}
			p.arm()
			done := make(chan error, 1)
			go func() { done <- p.holdAndRelease(true) }()
			if err := p.b.await(soon(p.t, 20*time.Second), "watch another's"); err != nil {
				return err
			}
			if err := p.rival.Release(soon(p.t, 20*time.Second), g); err != nil {
				return fmt.Errorf("release by the rival: %w", err)
			}
			return <-done
		},
	},
	{
		name:  "an attempt at a name that is held",
		kinds: allKinds,
		needs: []string{"make the name's node", "create", "list", "get another's", "delete one's own"},
		play: func(p *play) error {
			g, err := p.rival.Acquire(soon(p.t, 20*time.Second), p.other())
			if err != nil {
				return err
			}
			p.arm()
			_, err = p.d.Acquire(soon(p.t, 20*time.Second), p.r)
			if !errors.Is(err, backend.ErrHeld) && !errors.Is(err, backend.ErrUnknown) {
				return fmt.Errorf("acquire = %w, want ErrHeld or ErrUnknown", err)
			}
			if err := p.rival.Release(soon(p.t, 20*time.Second), g); err != nil {
				return fmt.Errorf("release by the rival: %w", err)
			}
			return p.opens()
		},
	},
	{
		name:  "an attempt behind one that waits",
		kinds: lesser,
		needs: []string{"make the name's node", "create", "list", "get another's", "delete one's own"},
		play: func(p *play) error {
			g, err := p.rival.Acquire(soon(p.t, 20*time.Second), p.alike())
			if err != nil {
				return err
			}
			ctx, giveUp := context.WithCancel(soon(p.t, 20*time.Second))
			defer giveUp()
			waits := make(chan error, 1)
			go func() {
				r := p.other()
				r.Wait = true
				_, err := p.rival.Acquire(ctx, r)
				waits <- err
			}()
			if err := queued(soon(p.t, 20*time.Second), p.rival, p.r.Name); err != nil {
				return err
			}
			p.arm()
			_, err = p.d.Acquire(soon(p.t, 20*time.Second), p.r)
			if !errors.Is(err, backend.ErrHeld) && !errors.Is(err, backend.ErrUnknown) {
				return fmt.Errorf("acquire = %w, want ErrHeld or ErrUnknown", err)
			}
			giveUp()
			if err := <-waits; !errors.Is(err, context.Canceled) {
				return fmt.Errorf("the abandoned wait = %w", err)
			}
			if err := p.rival.Release(soon(p.t, 20*time.Second), g); err != nil {
				return fmt.Errorf("release by the rival: %w", err)
			}
			return p.opens()
		},
	},
	{
		name:  "a request for a name that is in use otherwise",
		kinds: lesser,
		needs: []string{"make the name's node", "create", "list", "get another's", "delete one's own", "prove"},
		play: func(p *play) error {
			g, err := p.rival.Acquire(soon(p.t, 20*time.Second), p.odd())
			if err != nil {
				return err
			}
			p.arm()
			r := p.r
			r.Wait = true
			if _, err = p.d.Acquire(soon(p.t, 20*time.Second), r); !errors.Is(err, backend.ErrLimitMismatch) {
				return fmt.Errorf("acquire = %w, want ErrLimitMismatch", err)
			}
			if err := p.rival.Release(soon(p.t, 20*time.Second), g); err != nil {
				return fmt.Errorf("release by the rival: %w", err)
			}
			return p.opens()
		},
	},
	{
		name:  "a hold that another client has",
		kinds: allKinds,
		needs: []string{
			"make the name's node", "create", "list", "get one's own", "replace", "prove",
			"watch one's own", "delete one's own",
		},
		play: func(p *play) error {
			g, err := p.rival.Acquire(soon(p.t, 20*time.Second), p.r)
			if err != nil {
				return err
			}
			p.arm()
			again, err := p.d.Acquire(soon(p.t, 20*time.Second), p.r)
			if err != nil {
				return fmt.Errorf("acquire again: %w", err)
			}
			if again.Token != g.Token {
				return fmt.Errorf("token %v, want %v as before", again.Token, g.Token)
			}
			return p.held(again)
		},
	},
}

// other returns a request that cannot be granted beside the driver's.
func (p *play) other() backend.Request {
	r := p.alike()
	switch r.Kind {
	case backend.KindShared:
		r.Kind = backend.KindExclusive
	case backend.KindPermits:
		r.Permits = r.Limit
	}
	return r
}

// alike returns a request for the same that the driver asks for.
func (p *play) alike() backend.Request {
	r := p.r
	r.RequestID = backend.NewRequestID()
	return r
}

// odd returns a request with which the driver's does not mix.
func (p *play) odd() backend.Request {
	r := p.alike()
	r.Kind, r.Permits, r.Limit = backend.KindPermits, 1, r.Limit+1
	return r
}

// holdAndRelease takes the name, which must work whatever happens to the connection.
func (p *play) holdAndRelease(wait bool) error {
	r := p.r
	r.Wait = wait
	g, err := p.d.Acquire(soon(p.t, 20*time.Second), r)
	if err != nil {
		return fmt.Errorf("acquire: %w", err)
	}
	return p.held(g)
}

// held checks a hold from outside, and releases it.
func (p *play) held(g backend.Grant) error {
	if _, err := p.rival.Acquire(soon(p.t, 20*time.Second), p.other()); !errors.Is(err, backend.ErrHeld) {
		return fmt.Errorf("an attempt by another request = %w, want ErrHeld", err)
	}
	info, err := p.rival.Look(soon(p.t, 20*time.Second), p.r.Name)
	if err != nil || len(info.Holders) != 1 || info.Holders[0].HoldID != p.r.HoldID || info.Waiters != 0 {
		return fmt.Errorf("the queue is %+v, %w; want the one node of the request", info, err)
	}
	err = p.again(func(ctx context.Context) error { return p.d.Renew(ctx, []backend.Grant{g})[0].Err },
		backend.ErrUnavailable, backend.ErrUnknown)
	if err != nil {
		return fmt.Errorf("renew: %w", err)
	}
	err = p.again(func(ctx context.Context) error { return p.d.Release(ctx, g) }, backend.ErrUnavailable)
	if err != nil {
		return fmt.Errorf("release: %w", err)
	}
	return p.opens()
}

// again calls f once more if its error is one of those, which the connection explains.
func (p *play) again(f func(context.Context) error, explained ...error) error {
	err := f(soon(p.t, 20*time.Second))
	for _, e := range explained {
		if errors.Is(err, e) {
			return f(soon(p.t, 20*time.Second))
		}
	}
	return err
}

// opens takes the name for a rival: nothing that was left behind may close it while the driver lives.
func (p *play) opens() error {
	r := p.other()
	r.Wait = true
	g, err := p.rival.Acquire(soon(p.t, 20*time.Second), r)
	if err != nil {
		return fmt.Errorf("the name does not open: %w", err)
	}
	return p.rival.Release(soon(p.t, 20*time.Second), g)
}

// TestConnectionLossAtEveryStep breaks the connection at each request that the recipe makes, in turn and in each way.
func TestConnectionLossAtEveryStep(t *testing.T) {
	t.Parallel()
	server := containers.ZooKeeper(t)
	admin := newAdmin(t, server.Addr())
	rival := driver(t, server.Addr())
	var mu sync.Mutex
	failed := map[string]bool{} // whose rival may have kept something
	once := func(t *testing.T, s scene, r backend.Request, step string, how loss) (steps []string, err error) {
		b := &breaker{requestID: r.RequestID}
		d := zookeeper.New([]string{server.Addr()}, &zookeeper.Options{Tick: containers.ZooKeeperTick, Dial: b.dial})
		defer func() { err = errors.Join(err, d.Close(soon(t, 20*time.Second))) }()
		warm := r
		warm.RequestID, warm.Name = backend.NewRequestID(), r.Name+" before" // opens the session
		g, err := d.Acquire(soon(t, 20*time.Second), warm)
		if err == nil {
			err = d.Release(soon(t, 20*time.Second), g)
		}
		if err != nil {
			return nil, fmt.Errorf("before: %w", err)
		}
		b.seen()
		p := &play{t: t, d: d, b: b, rival: rival, r: r, arm: func() { b.arm(step, how) }}
		if err := s.play(p); err != nil {
			return nil, err
		}
		if slices.Contains(s.needs, step) && !b.hasBroken() {
			return nil, errors.New("the step did not come")
		}
		return b.seen(), nil
	}
	run := func(t *testing.T, s scene, kind backend.Kind, step string, how loss) (steps []string) {
		n := 0
		excused, err := stallmeter.Fairly(500*time.Millisecond, func() (err error) {
			n++
			name := fmt.Sprintf("%s (%v), %s: %s, %d", s.name, kind, step, how, n)
			r := request(strings.ReplaceAll(name, "'", ""), false)
			r.TTL = 4 * time.Second
			if r.Kind = kind; kind == backend.KindPermits {
				r.Permits, r.Limit = 1, 2
			}
			if steps, err = once(t, s, r, step, how); err != nil {
				mu.Lock()
				defer mu.Unlock()
				failed["/fencelock/lock:"+escaped(r.Name)] = true
			}
			return err
		})
		stallmeter.Report(t, fmt.Sprintf("where at %q %s", step, how), excused, err)
		return steps
	}
	play := func(s scene, kind backend.Kind) {
		t.Run(fmt.Sprintf("%s/%v", s.name, kind), func(t *testing.T) {
			steps := run(t, s, kind, "", "")
			if steps == nil {
				return // it has said why
			}
			for _, need := range s.needs {
				if !slices.Contains(steps, need) {
					t.Errorf("the steps %q lack %q", steps, need)
				}
			}
			var all sync.WaitGroup
			seats := make(chan struct{}, 8)
			for _, step := range steps {
				for _, how := range losses {
					seats <- struct{}{}
					all.Go(func() {
						defer func() { <-seats }()
						run(t, s, kind, step, how)
					})
				}
			}
			all.Wait()
			t.Logf("%d steps, each lost in %d ways: %q", len(steps), len(losses), steps)
		})
	}
	for _, s := range scenes {
		for _, kind := range s.kinds {
			play(s, kind)
		}
	}
	left, err := admin.ephemerals("/fencelock")
	left = slices.DeleteFunc(left, func(node string) bool { return failed[path.Dir(node)] })
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %q, %v", left, err)
	}
}
