package conformance_test

import (
	"context"
	"errors"
	"iter"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// mutants are in the order of the clauses that they break.
var mutants = []mutant{
	{name: "release does not compare the holder", breaks: []string{"O1", "O3", "O4", "A5"}, apply: func(b *broken) {
		b.release = func(ctx context.Context, g backend.Grant) error {
			info, err := b.Look(ctx, g.Name)
			if err != nil || !info.Held {
				return b.Driver.Release(ctx, g)
			}
			return b.Driver.Release(ctx,
				backend.Request{Name: g.Name, RequestID: b.world.request(info.Holders[0])}.Grant())
		}
	}},
	{name: "release compares the owner instead of the request", breaks: []string{"O1", "O4"}, apply: func(b *broken) {
		b.release = func(ctx context.Context, g backend.Grant) error {
			info, err := b.Look(ctx, g.Name)
			if err == nil && info.Held && info.Holders[0].Owner == g.Owner {
				g = backend.Request{Name: g.Name, RequestID: b.world.request(info.Holders[0])}.Grant()
			}
			return b.Driver.Release(ctx, g)
		}
	}},
	{name: "release ignores the incarnation", breaks: []string{"O5"}, apply: func(b *broken) {
		b.release = func(ctx context.Context, g backend.Grant) error {
			return b.Driver.Release(ctx, backend.Request{Name: g.Name, RequestID: g.RequestID}.Grant())
		}
	}},
	{name: "a second release succeeds", breaks: []string{"O2"}, apply: func(b *broken) {
		b.release = func(ctx context.Context, g backend.Grant) error {
			if err := b.Driver.Release(ctx, g); !errors.Is(err, backend.ErrNotHeld) {
				return err
			}
			return nil
		}
	}},
	{name: "a release by request does nothing", breaks: []string{"O7", "A3", "D9"}, apply: func(b *broken) {
		b.release = func(ctx context.Context, g backend.Grant) error {
			if g.Token == 0 {
				return nil
			}
			return b.Driver.Release(ctx, g)
		}
	}},
	{name: "a release without an answer is reported as success", breaks: []string{"A5"}, apply: func(b *broken) {
		b.release = func(ctx context.Context, g backend.Grant) error {
			if err := b.Driver.Release(ctx, g); !errors.Is(err, backend.ErrUnknown) {
				return err
			}
			return nil
		}
	}},
	{name: "acquire checks and writes in two steps", breaks: []string{"X1", "X3"}, apply: getThenSet},
	{name: "holds never end", breaks: []string{"L2", "L4", "F2"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			short := r.TTL
			r.TTL = time.Hour
			g, err := b.Driver.Acquire(ctx, r)
			g.TTL = short
			return g, err
		}
	}},
	{name: "holds end early", breaks: []string{"L1"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			told := r.TTL
			r.TTL = r.TTL * 3 / 4
			g, err := b.Driver.Acquire(ctx, r)
			g.TTL = told
			return g, err
		}
	}},
	{name: "SentAt is read when the answer arrives", breaks: []string{"L7"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			g.SentAt = now()
			return g, err
		}
	}},
	{name: "SentAt of renewals is read when the answer arrives", breaks: []string{"L7"}, apply: func(b *broken) {
		b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			out := b.Driver.Renew(ctx, grants)
			for i := range out {
				out[i].SentAt = now()
			}
			return out
		}
	}},
	{name: "a lease stays valid for one second too long", breaks: []string{"D1", "L6"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			g.SentAt = g.SentAt.Add(time.Second)
			return g, err
		}
		b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			out := b.Driver.Renew(ctx, grants)
			for i := range out {
				out[i].SentAt = out[i].SentAt.Add(time.Second)
			}
			return out
		}
	}},
	{name: "SentAt of a grant after a wait is the start of the wait", breaks: []string{"W6"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			sent := now()
			g, err := b.Driver.Acquire(ctx, r)
			g.SentAt = sent
			return g, err
		}
	}},
	{name: "renewal does not compare the holder", breaks: []string{"L4", "O1", "O2"}, apply: func(b *broken) {
		b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			out := b.Driver.Renew(ctx, grants)
			for i := range out {
				if errors.Is(out[i].Err, backend.ErrNotHeld) {
					out[i] = backend.Renewal{SentAt: now(), TTL: grants[i].TTL}
				}
			}
			return out
		}
	}},
	{name: "the deletion of a hold is not reported", breaks: []string{"D2"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			r.Lost = nil
			return b.Driver.Acquire(ctx, r)
		}
		b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			out := b.Driver.Renew(ctx, grants)
			for i := range out {
				if errors.Is(out[i].Err, backend.ErrNotHeld) {
					out[i].Err = backend.ErrUnavailable
				}
			}
			return out
		}
	}},
	{name: "renewal recreates a missing hold", breaks: []string{"L5", "O2"}, apply: func(b *broken) {
		b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			out := b.Driver.Renew(ctx, grants)
			for i, g := range grants {
				if !errors.Is(out[i].Err, backend.ErrNotHeld) {
					continue
				}
				r := backend.Request{Name: g.Name, Owner: g.Owner, RequestID: g.RequestID, TTL: g.TTL}
				if again, err := b.Driver.Acquire(ctx, r); err == nil {
					out[i] = backend.Renewal{SentAt: again.SentAt, TTL: again.TTL}
				}
			}
			return out
		}
	}},
	{name: "renewals are returned in another order", breaks: []string{"L8"}, apply: func(b *broken) {
		b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			out := b.Driver.Renew(ctx, grants)
			if len(out) > 2 {
				out = append(out[1:], out[0])
			}
			return out
		}
	}},
	{name: "each renewal takes its own round trip", breaks: []string{"L9"}, apply: func(b *broken) {
		b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			var out []backend.Renewal
			for i := range grants {
				out = append(out, b.Driver.Renew(ctx, grants[i:i+1])...)
			}
			return out
		}
	}},
	{name: "a failed renewal is reported as a loss", breaks: []string{"A6", "D7", "S1"}, apply: func(b *broken) {
		b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			out := b.Driver.Renew(ctx, grants)
			for i := range out {
				if out[i].Err != nil {
					out[i].Err = &backend.NotHeldError{Name: grants[i].Name}
				}
			}
			return out
		}
	}},
	{name: "a timeout is reported as success", breaks: []string{"A1", "A2"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			if errors.Is(err, backend.ErrUnknown) {
				g, err = r.Grant(), nil
				g.SentAt = now()
			}
			return g, err
		}
	}},
	{name: "a timeout is reported as held", breaks: []string{"A1", "C5", "S2"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			if errors.Is(err, backend.ErrUnknown) {
				err = &backend.HeldError{Name: r.Name}
			}
			return g, err
		}
	}},
	{name: "acquire retries with another request id", breaks: []string{"A7"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			if r.Wait {
				return b.Driver.Acquire(ctx, r)
			}
			for {
				try, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
				g, err := b.Driver.Acquire(try, r)
				cancel()
				if !errors.Is(err, backend.ErrUnknown) || ctx.Err() != nil {
					g.RequestID = r.RequestID
					return g, err
				}
				r.RequestID = backend.NewRequestID()
			}
		}
	}},
	{name: "a cancelled waiter stays in the queue", breaks: []string{"C3"}, apply: func(b *broken) {
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
	}},
	{name: "acquire ignores an ended context", breaks: []string{"C1"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			if ctx.Err() == nil || r.Wait {
				return b.Driver.Acquire(ctx, r)
			}
			_, _ = b.Driver.Acquire(context.WithoutCancel(ctx), r)
			return backend.Grant{}, ctx.Err()
		}
	}},
	{name: "calls continue after their context ends", breaks: []string{"C5"}, apply: func(b *broken) {
		b.renew = func(_ context.Context, grants []backend.Grant) []backend.Renewal {
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second) // as client libraries like to do
			defer cancel()
			return b.Driver.Renew(ctx, grants)
		}
	}},
	{name: "errors do not wrap the context's error", breaks: []string{"C2", "C5", "E2"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			if err != nil && ctx.Err() != nil {
				err = &backend.CallError{
					Driver: "memory", Call: "acquire", Name: r.Name, Err: errors.New("i/o timeout"),
				}
			}
			return g, err
		}
	}},
	{name: "errors do not say which call failed", breaks: []string{"E1"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			var call *backend.CallError
			if errors.As(err, &call) {
				err = call.Err
			}
			return g, err
		}
	}},
	{name: "an unreachable service is reported as an unknown outcome", breaks: []string{"E3"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			if errors.Is(err, backend.ErrUnavailable) {
				err = &backend.CallError{Driver: "memory", Call: "acquire", Name: r.Name, Err: backend.ErrUnknown}
			}
			return g, err
		}
	}},
	{name: "only the first 16 bytes of a request id are compared", breaks: []string{"O3"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			whole := r.RequestID
			r.RequestID = whole[:16]
			g, err := b.Driver.Acquire(ctx, r)
			g.RequestID = whole
			return g, err
		}
		b.release = func(ctx context.Context, g backend.Grant) error {
			g.RequestID = g.RequestID[:16]
			return b.Driver.Release(ctx, g)
		}
	}},
	{name: "a repeated request gets a new request id", breaks: []string{"O6", "A2"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			r.RequestID = backend.NewRequestID()
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "requests of one owner share a hold", breaks: []string{"O8"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			if info, err := b.Look(ctx, r.Name); err == nil && info.Held && info.Holders[0].Owner == r.Owner {
				r.RequestID = b.world.request(info.Holders[0])
			}
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "waiters rely on pushes and never poll", breaks: []string{"W5"}, apply: func(b *broken) { b.broadcast(time.Hour) }},
	{name: "a release wakes every waiter", breaks: []string{"W4", "W12", "W2", "W3"}, apply: func(b *broken) {
		b.broadcast(time.Second / 2)
	}},
	{name: "waiters only poll", breaks: []string{"W1"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			wait := r.Wait
			r.Wait = false
			for {
				g, err := b.Driver.Acquire(ctx, r)
				if !wait || !errors.Is(err, backend.ErrHeld) {
					return g, err
				}
				select {
				case <-time.After(time.Second + rand.N(2*time.Second)): // never in step with the clause
				case <-ctx.Done():
					return g, &backend.CallError{Driver: "memory", Call: "acquire", Name: r.Name, Err: ctx.Err()}
				}
			}
		}
	}},
	{name: "waiters poll too rarely, as Describe declares", breaks: []string{"P2"}, apply: func(b *broken) {
		b.describe = func() backend.Description {
			d := b.Driver.Describe()
			d.Polling = 2 * time.Second
			return d
		}
	}},
	{name: "each client counts its own tokens", breaks: []string{"F1", "F2", "F4"}, apply: func(b *broken) {
		var mu sync.Mutex
		var own fencing.Token
		b.renumber(func(string, fencing.Token) fencing.Token {
			mu.Lock()
			defer mu.Unlock()
			own++
			return own
		})
	}},
	{name: "tokens start over after a deletion or restart", breaks: []string{"F3", "S4"}, apply: func(b *broken) {
		b.renumber(func(name string, real fencing.Token) fencing.Token {
			b.world.mu.Lock()
			defer b.world.mu.Unlock()
			if base, ok := b.world.base[name]; ok {
				return real - base
			}
			b.world.base[name] = real - 1
			return 1
		})
	}},
	{name: "tokens are allocated before the grant", breaks: []string{"F4"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			b.world.mu.Lock()
			b.world.next++
			mine := b.world.next
			b.world.mu.Unlock()
			time.Sleep(rand.N(time.Millisecond)) // the round trip between the two steps
			g, err := b.Driver.Acquire(ctx, r)
			if g.Token != 0 {
				g.Token = mine
			}
			return g, err
		}
		b.restoreToken()
	}},
	{name: "grants carry tokens although fencing is not declared", breaks: []string{"P1", "P2"}, apply: func(b *broken) {
		b.describe = func() backend.Description {
			d := b.Driver.Describe()
			d.Capabilities &^= backend.CapFencing
			return d
		}
	}},
	{name: "undeclared options are accepted and ignored", breaks: []string{"P1"}, apply: func(b *broken) {
		b.describe = func() backend.Description {
			d := b.Driver.Describe()
			d.Capabilities &^= backend.CapMinHold | backend.CapMetadata
			return d
		}
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			r.MinHold, r.Metadata = 0, nil
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "every request acquires an exclusive hold", breaks: []string{"P1"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			r.Kind = backend.KindExclusive
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "a minimum hold ends with the release", breaks: []string{"P3"}, apply: func(b *broken) {
		b.release = func(ctx context.Context, g backend.Grant) error {
			return b.Driver.Release(ctx, backend.Request{Name: g.Name, RequestID: g.RequestID}.Grant())
		}
	}},
	{name: "an unused grant keeps its minimum hold", breaks: []string{"P22"}, apply: func(b *broken) {
		var mu sync.Mutex
		grants := map[string]backend.Grant{} // by request
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				grants[r.RequestID] = g
			}
			return g, err
		}
		b.release = func(ctx context.Context, g backend.Grant) error {
			mu.Lock()
			if of, ok := grants[g.RequestID]; ok {
				g = of
			}
			mu.Unlock()
			return b.Driver.Release(ctx, g)
		}
	}},
	{name: "a loss by ForceRelease omits its author", breaks: []string{"P21"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			if lost := r.Lost; lost != nil {
				r.Lost = func(l backend.Loss) { lost(backend.Loss{Reason: l.Reason, Text: l.Text}) }
			}
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "losses are not pushed", breaks: []string{"P7"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			r.Lost = nil
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "a watch misses events", breaks: []string{"P9", "P10"}, apply: func(b *broken) {
		b.retell(func() func(backend.Change) []backend.Change {
			n := 0
			return func(e backend.Change) []backend.Change {
				if n++; n%5 == 0 {
					return nil
				}
				return []backend.Change{e}
			}
		})
	}},
	{name: "a watch yields a grant before the previous end", breaks: []string{"P9", "P10"}, apply: func(b *broken) {
		b.retell(func() func(backend.Change) []backend.Change {
			var end []backend.Change
			return func(e backend.Change) []backend.Change {
				if e.Type != backend.ChangeAcquired {
					end = []backend.Change{e}
					return nil
				}
				return append([]backend.Change{e}, end...)
			}
		})
	}},
	{name: "a watch yields changes of other names", breaks: []string{"P9", "P10"}, apply: func(b *broken) {
		b.retell(func() func(backend.Change) []backend.Change {
			return func(e backend.Change) []backend.Change {
				beside := e
				beside.Name += "x"
				return []backend.Change{e, beside}
			}
		})
	}},
	{name: "a watch omits the token of ends", breaks: []string{"P9", "P10"}, apply: func(b *broken) {
		b.retell(func() func(backend.Change) []backend.Change {
			return func(e backend.Change) []backend.Change {
				if e.Type != backend.ChangeAcquired {
					e.Token = 0
				}
				return []backend.Change{e}
			}
		})
	}},
	{name: "a watch numbers its revisions from one", breaks: []string{"P10"}, apply: func(b *broken) {
		b.retell(func() func(backend.Change) []backend.Change {
			var n uint64
			return func(e backend.Change) []backend.Change {
				n++
				e.Revision = n
				return []backend.Change{e}
			}
		})
	}},
	{name: "a watch ignores the requested revision", breaks: []string{"P10", "P14"}, apply: func(b *broken) {
		b.watch = func(ctx context.Context, name string, _ uint64) iter.Seq2[backend.Change, error] {
			return b.Driver.Watch(ctx, name, 0)
		}
	}},
	{name: "a watch yields the event of its revision again", breaks: []string{"P10"}, apply: func(b *broken) {
		b.watch = func(ctx context.Context, name string, since uint64) iter.Seq2[backend.Change, error] {
			return b.Driver.Watch(ctx, name, max(since, 2)-1)
		}
	}},
	{name: "a watch omits the reason", breaks: []string{"P11"}, apply: func(b *broken) {
		b.retell(func() func(backend.Change) []backend.Change {
			return func(e backend.Change) []backend.Change {
				e.Reason = ""
				return []backend.Change{e}
			}
		})
	}},
	{name: "a watch reports every end as a release", breaks: []string{"P11", "P12"}, apply: func(b *broken) {
		b.retell(func() func(backend.Change) []backend.Change {
			return func(e backend.Change) []backend.Change {
				if e.Type != backend.ChangeAcquired {
					e.Type = backend.ChangeReleased
				}
				return []backend.Change{e}
			}
		})
	}},
	{name: "a watch continues after its context ends", breaks: []string{"P13"}, apply: func(b *broken) {
		b.watch = func(ctx context.Context, name string, since uint64) iter.Seq2[backend.Change, error] {
			return b.Driver.Watch(context.WithoutCancel(ctx), name, since)
		}
	}},
	{name: "a watch ends without its error", breaks: []string{"P13"}, apply: func(b *broken) {
		b.watch = func(ctx context.Context, name string, since uint64) iter.Seq2[backend.Change, error] {
			return func(yield func(backend.Change, error) bool) {
				for e, err := range b.Driver.Watch(ctx, name, since) {
					if err != nil || !yield(e, nil) {
						return
					}
				}
			}
		}
	}},
	{name: "a watch skips compacted events", breaks: []string{"P14"}, apply: func(b *broken) {
		b.watch = func(ctx context.Context, name string, since uint64) iter.Seq2[backend.Change, error] {
			return func(yield func(backend.Change, error) bool) {
				for e, err := range b.Driver.Watch(ctx, name, since) {
					if errors.Is(err, backend.ErrCompacted) {
						break
					}
					if !yield(e, err) {
						return
					}
				}
				for e, err := range b.Driver.Watch(ctx, name, 0) {
					if !yield(e, err) {
						return
					}
				}
			}
		}
	}},
	{name: "two names share a key", breaks: []string{"N1"}, apply: func(b *broken) {
		lossy := func(name string) string { return strings.ReplaceAll(name, "%", "_") }
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			whole := r.Name
			r.Name = lossy(r.Name)
			g, err := b.Driver.Acquire(ctx, r)
			g.Name = whole
			return g, err
		}
		b.release = func(ctx context.Context, g backend.Grant) error {
			g.Name = lossy(g.Name)
			return b.Driver.Release(ctx, g)
		}
	}},
	{name: "Close leaves a goroutine", breaks: []string{"K1"}, apply: func(b *broken) {
		stop := make(chan struct{})
		b.world.t.Cleanup(func() { close(stop) })
		go func() { <-stop }()
	}},
	{name: "releases leave an entry", breaks: []string{"K2"}, apply: func(b *broken) {
		b.release = func(ctx context.Context, g backend.Grant) error {
			_, err := b.Driver.Acquire(ctx, backend.Request{
				Name: g.Name + ":tombstone", RequestID: backend.NewRequestID(), TTL: time.Hour,
			})
			return errors.Join(err, b.Driver.Release(ctx, g))
		}
	}},
	{name: "acquire succeeds after Close", breaks: []string{"E4"}, apply: func(b *broken) {
		late := b.world.store.Driver()
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			if errors.Is(err, backend.ErrClosed) {
				return late.Acquire(ctx, r)
			}
			return g, err
		}
	}},
}
