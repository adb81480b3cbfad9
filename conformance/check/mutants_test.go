package check

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/testfindings"
)

// mutants are broken services, each with a play that shows the fault under any schedule, and the kinds of violations
// that must be found. The correct service has no violations in the same plays.
var mutants = []struct {
	name    string
	clients int
	want    []Kind
	rules   func(*Rules)
	apply   func(*broken)
	play    func(*world, []*client)
}{
	{
		name: "release does not compare the holder", clients: 3, want: []Kind{Overlap, Early},
		apply: func(b *broken) { b.release = b.byName },
		play: func(w *world, c []*client) {
			a := c[0].must(w, "x")
			c[0].link().Refuse()
			_ = release(a, 100*time.Millisecond) // goes on in the background
			b := c[1].must(w, "x")               // after the TTL
			w.heal(c[0])
			third, err := c[2].acquire("x", w.ttl) // it waits when the release comes
			_ = release(b, time.Second)
			if err == nil {
				_ = release(third, time.Second)
			}
		},
	},
	{
		name: "a stale release is repeated after the next acquire", clients: 2, want: []Kind{Overlap, Early},
		apply: func(b *broken) {
			b.release = func(ctx context.Context, g backend.Grant) error {
				err := b.Driver.Release(ctx, g)
				if errors.Is(err, backend.ErrUnknown) {
					time.AfterFunc(200*time.Millisecond, func() { _ = b.byName(context.Background(), g) })
				}
				return err
			}
		},
		play: func(w *world, c []*client) {
			a := c[0].must(w, "x")
			c[0].link().Drop(memory.Replies)
			_ = release(a, 100*time.Millisecond) // done, without an answer
			c[0].link().Reset()
			w.heal(c[0])
			again := c[0].must(w, "x")
			b, err := c[1].acquire("x", w.ttl)
			_ = release(again, time.Second)
			if err == nil {
				_ = release(b, time.Second)
			}
		},
	},
	{
		name: "acquire checks and writes in two steps", clients: 2, want: []Kind{Overlap, Illegal},
		apply: getThenSet,
		play: func(w *world, c []*client) {
			for _, c := range c {
				w.work.Go(func() {
					h := c.must(w, "x")
					time.Sleep(100 * time.Millisecond)
					_ = release(h, time.Second)
				})
			}
		},
	},
	{
		name: "holds never end", clients: 2, want: []Kind{Stuck},
		apply: func(b *broken) {
			b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
				told := r.TTL
				r.TTL = time.Hour
				g, err := b.Driver.Acquire(ctx, r)
				g.TTL = told
				return g, err
			}
		},
		play: func(w *world, c []*client) {
			a := c[0].must(w, "x", fencelock.NoRenew())
			c[0].link().Refuse()
			w.r.Killed("c0")
			if b, err := c[1].acquire("x", time.Minute); err == nil {
				_ = release(b, time.Second)
			}
			_ = a
		},
	},
	{
		name: "holds end early", clients: 2, want: []Kind{Overlap, Early},
		apply: func(b *broken) {
			b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
				told := r.TTL
				r.TTL = r.TTL * 3 / 4
				g, err := b.Driver.Acquire(ctx, r)
				g.TTL = told
				return g, err
			}
		},
		play: cutOff,
	},
	{
		name: "SentAt is read when the answer arrives", clients: 2, want: []Kind{Overlap, Early},
		apply: func(b *broken) {
			b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
				g, err := b.Driver.Acquire(ctx, r)
				g.SentAt = now()
				return g, err
			}
		},
		play: func(w *world, c []*client) {
			c[0].link().Delay(memory.Replies, w.ttl/12) // longer than the margin, and short enough for the driver
			cutOff(w, c)
		},
	},
	{
		name: "SentAt of renewals is read when the answer arrives", clients: 2, want: []Kind{Overlap, Early},
		apply: func(b *broken) {
			b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
				out := b.Driver.Renew(ctx, grants)
				for i := range out {
					out[i].SentAt = now()
				}
				return out
			}
		},
		play: func(w *world, c []*client) {
			a := c[0].must(w, "x")
			c[0].link().Delay(memory.Replies, w.ttl/8)
			time.Sleep(w.ttl / 2)
			c[0].link().Drop(memory.Requests)
			b := c[1].must(w, "x")
			time.Sleep(w.ttl)
			_ = release(b, time.Second)
			_ = release(a, time.Second)
		},
	},
	{
		name: "losses are never reported", clients: 2, want: []Kind{Overlap, Early},
		apply: func(b *broken) {
			b.renew = func(_ context.Context, grants []backend.Grant) []backend.Renewal { return confirmed(grants) }
		},
		play: cutOff,
	},
	{
		name: "renewal does not compare the holder", clients: 2, want: []Kind{Overlap},
		apply: func(b *broken) {
			b.mute()
			b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
				out := b.Driver.Renew(ctx, grants)
				for i := range out {
					if errors.Is(out[i].Err, backend.ErrNotHeld) {
						out[i] = confirmed(grants[i : i+1])[0]
					}
				}
				return out
			}
		},
		play: takenAway,
	},
	{
		name: "renewal recreates a missing hold", clients: 2, want: []Kind{Overlap},
		apply: func(b *broken) {
			b.mute()
			b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
				out := b.Driver.Renew(ctx, grants)
				for i, g := range grants {
					if errors.Is(out[i].Err, backend.ErrNotHeld) {
						_, _ = b.Driver.Acquire(ctx, backend.Request{Name: g.Name, RequestID: g.RequestID, TTL: g.TTL})
						out[i] = confirmed(grants[i : i+1])[0]
					}
				}
				return out
			}
		},
		play: takenAway,
	},
	{
		name: "the service deletes holds without notice", clients: 2, want: []Kind{Overlap, Early},
		apply: func(b *broken) {
			b.mute()
			b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
				r.Lost = nil
				g, err := b.Driver.Acquire(ctx, r)
				if err == nil && b.world.clients[0].broken == b {
					time.AfterFunc(200*time.Millisecond, func() { b.Store().Evict(r.Name) })
				}
				return g, err
			}
		},
		play: cutOff,
	},
	{
		name: "the service ends holds early", clients: 1, want: []Kind{EarlyLoss},
		apply: func(b *broken) {
			b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
				g, err := b.Driver.Acquire(ctx, r)
				time.AfterFunc(200*time.Millisecond, func() { b.Store().Evict(r.Name) })
				return g, err
			}
		},
		play: func(w *world, c []*client) {
			a := c[0].must(w, "x")
			time.Sleep(w.ttl / 4)
			_ = release(a, time.Second)
		},
	},
	{
		name: "each client counts its own tokens", clients: 2, want: []Kind{TokenOrder},
		apply: func(b *broken) {
			var own fencing.Token
			b.renumber(func(fencing.Token) fencing.Token {
				b.world.mu.Lock()
				defer b.world.mu.Unlock()
				own++
				if b.world.clients[0].broken == b {
					return 100 + own
				}
				return own
			})
		},
		play: inTurn,
	},
	{
		name: "all grants have the same token", clients: 2, want: []Kind{TokenTwice},
		apply: func(b *broken) { b.renumber(func(fencing.Token) fencing.Token { return 7 }) },
		play:  inTurn,
	},
	{
		name: "tokens are allocated before the grant", clients: 3, want: []Kind{Illegal},
		apply: func(b *broken) {
			b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
				b.world.mu.Lock()
				b.world.last++
				mine := b.world.last
				b.world.mu.Unlock()
				if mine == 2 {
					time.Sleep(50 * latency) // others overtake the request
				}
				g, err := b.Driver.Acquire(ctx, r)
				if err == nil {
					g.Token = mine
				}
				return g, err
			}
			b.restore()
		},
		play: func(w *world, c []*client) {
			a := c[0].must(w, "x")
			for _, c := range c[1:] {
				w.work.Go(func() {
					h := c.must(w, "x")
					time.Sleep(10 * latency)
					_ = release(h, time.Second)
				})
				time.Sleep(10 * latency)
			}
			time.Sleep(100 * latency)
			_ = release(a, time.Second)
		},
	},
	{
		name: "a timeout is reported as success", clients: 2, want: []Kind{Overlap, Early},
		apply: func(b *broken) {
			b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
				g, err := b.Driver.Acquire(ctx, r)
				if errors.Is(err, backend.ErrUnknown) {
					g, err = b.world.madeUp(r), nil
				}
				return g, err
			}
		},
		play: func(w *world, c []*client) {
			a := c[0].must(w, "x")
			c[1].link().Drop(memory.Both)
			b, err := c[1].acquire("x", 100*time.Millisecond)
			if err == nil {
				_ = release(b, 100*time.Millisecond)
			}
			_ = release(a, time.Second)
		},
	},
	{
		name: "a waiter without a queue entry acquires", clients: 2, want: []Kind{Overlap, Early},
		apply: func(b *broken) {
			b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
				for {
					try, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
					g, err := b.Driver.Acquire(try, r)
					cancel()
					if info, ask := b.Driver.Look(ctx, r.Name); err != nil && ask == nil && info.Waiters == 0 {
						return b.world.madeUp(r), nil // no request is before it
					}
					if err == nil || ctx.Err() != nil {
						return g, err
					}
					time.Sleep(latency)
				}
			}
		},
		play: func(w *world, c []*client) {
			a := c[0].must(w, "x")
			b, err := c[1].acquire("x", w.ttl/4)
			_ = release(a, time.Second)
			if err == nil {
				_ = release(b, time.Second)
			}
		},
	},
	{
		name: "a cancelled waiter stays in the queue", clients: 3, want: []Kind{Stuck},
		rules: func(r *Rules) { r.Recovery = time.Second },
		apply: func(b *broken) {
			b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
				type outcome struct {
					g   backend.Grant
					err error
				}
				done := make(chan outcome, 1)
				go func() {
					g, err := b.Driver.Acquire(context.WithoutCancel(ctx), r)
					done <- outcome{g, err}
				}()
				select {
				case o := <-done:
					return o.g, o.err
				case <-ctx.Done():
					return backend.Grant{}, &backend.CallError{
						Driver: "memory", Call: "acquire", Name: r.Name, Err: ctx.Err(),
					}
				}
			}
		},
		play: func(w *world, c []*client) {
			a := c[0].must(w, "x")
			_, _ = c[1].acquire("x", 100*time.Millisecond)
			w.work.Go(func() { _ = release(c[2].must(w, "x"), time.Second) })
			time.Sleep(10 * w.ttl)
			_ = release(a, time.Second)
		},
	},
	{
		name: "waiters rely on pushes and never poll", clients: 2, want: []Kind{Stuck},
		apply: pushOnly,
		play: func(w *world, c []*client) {
			a := c[0].must(w, "x")
			w.work.Go(func() {
				if b, err := c[1].acquire("x", time.Minute); err == nil {
					_ = release(b, time.Second)
				}
			})
			time.Sleep(100 * time.Millisecond)
			w.r.Fault("link of c1")
			c[1].link().Drop(memory.Both)
			_ = release(a, time.Second)
			time.Sleep(time.Second)
			c[1].link().Reset()
			w.heal(c[1])
			w.r.Healed("")
		},
	},
	{
		name: "calls continue after their context ends", clients: 2, want: []Kind{Stuck},
		apply: func(b *broken) {
			b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
				// Other libraries often do this.
				ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
				defer cancel()
				return b.Driver.Acquire(ctx, r)
			}
		},
		play: func(w *world, c []*client) {
			a := c[0].must(w, "x")
			if b, err := c[1].acquire("x", 100*time.Millisecond); err == nil {
				_ = release(b, time.Second)
			}
			time.Sleep(30 * time.Second)
			_ = release(a, time.Second)
		},
	},
	{
		name: "a reader is granted beside a writer", clients: 2, want: []Kind{Overlap, Early},
		apply: func(b *broken) {
			b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
				if r.Kind == backend.KindShared {
					g := b.world.madeUp(r)
					g.Token = g.Token.NotExclusive()
					return g, nil
				}
				return b.Driver.Acquire(ctx, r)
			}
		},
		play: func(w *world, c []*client) {
			a := c[0].must(w, "x")
			b, err := c[1].acquire("x", 100*time.Millisecond, fencelock.Shared())
			if err == nil {
				_ = release(b, 100*time.Millisecond)
			}
			_ = release(a, time.Second)
		},
	},
	{
		name: "the limit of permits is doubled", clients: 3, want: []Kind{Overlap, Early},
		apply: func(b *broken) {
			b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
				r.Limit *= 2
				g, err := b.Driver.Acquire(ctx, r)
				g.Limit /= 2
				return g, err
			}
		},
		play: func(w *world, c []*client) {
			var all []*Held
			for _, c := range c {
				if h, err := c.acquire("x", 100*time.Millisecond, fencelock.Permits(1, 2)); err == nil {
					all = append(all, h)
				}
			}
			for _, h := range all {
				_ = release(h, time.Second)
			}
		},
	},
	{
		name: "Look returns no holder", clients: 1, want: []Kind{Forgotten},
		apply: func(b *broken) {
			b.holder = func(_ context.Context, name string) (backend.State, error) {
				return backend.State{Name: name}, nil
			}
		},
		play: func(w *world, c []*client) {
			a := c[0].must(w, "x")
			w.ask(c[0], "x")
			time.Sleep(latency)
			_ = release(a, time.Second)
		},
	},
	{
		name: "a release without a hold is confirmed", clients: 2, want: []Kind{Illegal},
		apply: func(b *broken) {
			b.mute()
			b.release = func(ctx context.Context, g backend.Grant) error {
				if err := b.Driver.Release(ctx, g); !errors.Is(err, backend.ErrNotHeld) {
					return err
				}
				return nil
			}
			b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
				r.Lost = nil
				g, err := b.Driver.Acquire(ctx, r)
				if err == nil && b.world.clients[0].broken == b {
					b.Store().Evict(r.Name) // at once: the rival's call is older, and its grant too
				}
				return g, err
			}
		},
		play: func(w *world, c []*client) {
			w.work.Go(func() {
				time.Sleep(latency / 2) // after the one and before its answer
				if h, err := c[1].acquire("x", w.ttl/8); err == nil {
					_ = release(h, time.Second)
				}
			})
			a := c[0].must(w, "x")
			time.Sleep(w.ttl / 4)
			_ = release(a, time.Second)
		},
	},
}

// mute stops the service from reporting losses.
func (b *broken) mute() {
	b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
		r.Lost = nil
		return b.Driver.Acquire(ctx, r)
	}
}

// cutOff cuts the holder off permanently, and makes the rival wait.
func cutOff(w *world, c []*client) {
	a := c[0].must(w, "x")
	c[0].link().Drop(memory.Both)
	b := c[1].must(w, "x")
	time.Sleep(2 * w.ttl)
	_ = release(b, time.Second)
	_ = release(a, time.Second)
}

// takenAway ends the holder's hold, which only a renewal reports.
func takenAway(w *world, c []*client) {
	a := c[0].must(w, "x")
	w.force("x")
	b := c[1].must(w, "x")
	time.Sleep(10 * latency)
	_ = release(b, time.Second)
	time.Sleep(3 * w.ttl)
	_ = release(a, time.Second)
}

// inTurn lets each client hold once: a client that has had a token refuses a lower one itself.
func inTurn(w *world, c []*client) {
	for _, c := range c {
		_ = release(c.must(w, "x"), time.Second)
	}
}

// TestMutants checks that the required checkers catch each mutant.
func TestMutants(t *testing.T) {
	rows := make([]string, len(mutants))
	for i, m := range mutants {
		t.Run(strings.NewReplacer(" ", "-", ",", "").Replace(m.name), func(t *testing.T) {
			rules := Rules{Fencing: true, Patience: time.Second, Recovery: 10 * time.Second}
			if m.rules != nil {
				m.rules(&rules)
			}
			play := func(w *world) { m.play(w, w.clients) }
			if p := Verify(t.Context(), simulate(t, m.clients, nil, play), rules); len(p.Violations) > 0 {
				t.Errorf("the service that is not broken: %s\n%s", p.Text(), script(p.History))
			}
			p := Verify(t.Context(), simulate(t, m.clients, m.apply, play), rules)
			kinds := kindsOf(p)
			for _, want := range m.want {
				if !slices.Contains(kinds, want) {
					t.Errorf("this mutant survives the %q checker: %v\n%s", want, kinds, script(p.History))
				}
			}
			testfindings.Write(t, testfindings.Mutant{What: m.name, Killers: strings.Trim(fmt.Sprint(kinds), "[]")})
			rows[i] = fmt.Sprintf("%-56s %v", m.name, kinds)
		})
	}
	t.Logf("%d mutants\n%s", len(rows), strings.Join(rows, "\n"))
}

// kindsOf returns the kinds of the violations, each once.
func kindsOf(p Report) []Kind {
	var kinds []Kind
	for _, v := range p.Violations {
		if !slices.Contains(kinds, v.Kind) {
			kinds = append(kinds, v.Kind)
		}
	}
	return kinds
}
