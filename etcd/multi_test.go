package etcd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
)

func mustAcquireAll(t testing.TB, d *Driver, rs []backend.Request) []backend.Grant {
	t.Helper()
	grants, err := d.AcquireAll(t.Context(), rs)
	if err != nil {
		t.Fatal(err)
	}
	for i, g := range grants {
		if g.Name != rs[i].Name || g.RequestID != rs[i].RequestID ||
			g.Token.Exclusive() != (g.Kind == backend.KindExclusive) {
			t.Errorf("grant %d = %+v for %+v", i, g, rs[i])
		}
	}
	return grants
}

// mostNames is the maximum number of exclusive names in one transaction.
const mostNames = 100

func TestAcquireAll(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	d, rival := newDriver(t, server.Addr()), newDriver(t, server.Addr())
	wantFree := func(t *testing.T, names ...string) {
		t.Helper()
		for _, name := range names {
			if keys := keysOf(t, rival, name); len(keys) > 0 {
				t.Errorf("left of %s: %q", name, keys)
			}
		}
	}

	t.Run("all or none", func(t *testing.T) {
		for i, c := range []struct {
			has, asks use
			want      error
		}{
			{exclusively(), exclusively(), backend.ErrHeld}, {sharing(), exclusively(), backend.ErrHeld},
			{taking(2, 3), taking(2, 3), backend.ErrHeld}, {taking(1, 2), taking(1, 3), backend.ErrLimitMismatch},
		} {
			a, b := fmt.Sprint("none/a", i), fmt.Sprint("none/b", i)
			held := mustAcquire(t, rival, c.has.asks(b, false))
			for _, fresh := range []bool{true, false} {
				rs := []backend.Request{exclusively().asks(a, false), c.asks.asks(b, false)}
				rs[0].Fresh, rs[1].Fresh = fresh, fresh
				_, err := d.AcquireAll(t.Context(), rs)
				if !errors.Is(err, c.want) {
					t.Errorf("%+v beside %+v = %v, want %v", c.asks, c.has, err, c.want)
				}
				if h := (*backend.HeldError)(nil); errors.As(err, &h) && (h.Name != b || h.Holder != "test") {
					t.Errorf("held: %+v, want %s", h, b)
				}
				wantFree(t, a)
				wantHolders(t, rival, b, 0, held)
			}
		}
	})

	t.Run("every kind at once, beside others and foreign keys", func(t *testing.T) {
		reader, permit := mustAcquire(t, rival, sharing().asks("all/b", false)),
			mustAcquire(t, rival, taking(1, 3).asks("all/c", false))
		if _, err := rival.service.client.Put(t.Context(), dirOf("all/d")+"foreign", "foreign"); err != nil {
			t.Fatal(err)
		}
		rs := []backend.Request{
			exclusively().asks("all/a", false), sharing().asks("all/b", false), taking(2, 3).asks("all/c", false),
			exclusively().asks("all/d", false),
		}
		grants := mustAcquireAll(t, d, rs)
		wantHolders(t, rival, "all/a", 0, grants[0])
		wantHolders(t, rival, "all/b", 0, reader, grants[1])
		wantHolders(t, rival, "all/c", 0, permit, grants[2])
		wantHolders(t, rival, "all/d", 0, grants[3])
		for i := range rs {
			rs[i].Fresh = false
		}
		for i, again := range mustAcquireAll(t, d, rs) {
			if again.Token != grants[i].Token {
				t.Errorf("sent again, %s has token %v, not %v", again.Name, again.Token, grants[i].Token)
			}
		}
		for i, renewal := range d.Renew(t.Context(), grants) {
			if renewal.Err != nil {
				t.Errorf("renewal of %s: %v", grants[i].Name, renewal.Err)
			}
		}
		mustRelease(t, d, grants...)
		wantFree(t, "all/a")
	})

	t.Run("a set that has lost one hold is completed or released", func(t *testing.T) {
		rs := []backend.Request{exclusively().asks("part/a", false), sharing().asks("part/b", false)}
		first := mustAcquireAll(t, d, rs)
		rs[0].Fresh, rs[1].Fresh = false, false
		mustRelease(t, d, first[0])
		second := mustAcquireAll(t, d, rs)
		if second[0].Token <= first[0].Token || second[1].Token != first[1].Token {
			t.Errorf("after %v and %v the tokens are %v, which is new, and %v, which went on",
				first[0].Token, first[1].Token, second[0].Token, second[1].Token)
		}
		mustRelease(t, d, second[1])
		third := mustAcquireAll(t, d, rs)
		if third[0].Token != second[0].Token || third[1].Token.Order() <= second[1].Token.Order() {
			t.Errorf("after %v and %v the tokens are %v, which went on, and %v, which is new",
				second[0].Token, second[1].Token, third[0].Token, third[1].Token)
		}
		mustRelease(t, d, third[0])
		held := mustAcquire(t, rival, exclusively().asks("part/a", false))
		if _, err := d.AcquireAll(t.Context(), rs); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("a set of which a rival has one = %v, want ErrHeld", err)
		}
		eventually(t, "the rest of the set is gone", func() bool { return len(keysOf(t, d, "part/b")) == 0 })
		wantHolders(t, d, "part/a", 0, held)
	})

	t.Run("a reply that got lost", func(t *testing.T) {
		addr, link := server.NewLink(t)
		far := newDriver(t, addr)
		mustRelease(t, far, mustAcquire(t, far, exclusively().asks("warm", false)))
		rs := []backend.Request{exclusively().asks("lost/a", false), taking(1, 2).asks("lost/b", false)}
		link.Hold(fault.Replies)
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		if _, err := far.AcquireAll(ctx, rs); !errors.Is(err, backend.ErrUnknown) ||
			!errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a set without an answer = %v, want ErrUnknown and the context's error", err)
		}
		link.Pass()
		for _, r := range rs { // the sweep of the session may be faster
			if err := far.Release(t.Context(), r.Grant()); err != nil && !errors.Is(err, backend.ErrNotHeld) {
				t.Error(err)
			}
		}
		wantFree(t, "lost/a", "lost/b")
	})

	t.Run("sets that it does not take", func(t *testing.T) {
		set := func(n int, c use, wait bool) (rs []backend.Request) {
			for i := range n {
				rs = append(rs, c.asks(fmt.Sprint("set/", i), wait))
			}
			return rs
		}
		differ := set(2, exclusively(), false)
		differ[1].TTL *= 2
		for what, c := range map[string]struct {
			set  []backend.Request
			want error
		}{
			"waiting":  {set(2, exclusively(), true), backend.ErrUnsupported},
			"too many": {set(mostNames/3+1, sharing(), false), backend.ErrUnsupported},
			"none":     {nil, backend.ErrInvalidOption},
			"twice": {
				slices.Concat(set(1, exclusively(), false), set(1, exclusively(), false)), backend.ErrInvalidOption,
			},
			"two TTLs": {differ, backend.ErrInvalidOption},
			"permits":  {set(2, taking(3, 2), false), backend.ErrInvalidOption},
		} {
			if _, err := d.AcquireAll(t.Context(), c.set); !errors.Is(err, c.want) {
				t.Errorf("%s: %v, want %v", what, err, c.want)
			}
		}
		wantFree(t, "set/0", "set/1")
		mustRelease(t, d, mustAcquireAll(t, d, set(mostNames, exclusively(), false))...)
		mustRelease(t, d, mustAcquireAll(t, d, set(mostNames/3, sharing(), false))...)
		mustRelease(t, d, mustAcquireAll(t, d, set(1, exclusively(), true))...)
	})

	t.Run("a server that allows fewer operations than the set has", func(t *testing.T) {
		d := newDriver(t, containers.Etcd(t, containers.Args("--max-txn-ops", "9")).Addr())
		var rs []backend.Request
		for i := range 20 {
			rs = append(rs, exclusively().asks(fmt.Sprint("few/", i), false))
		}
		if _, err := d.AcquireAll(t.Context(), rs); !errors.Is(err, backend.ErrUnsupported) {
			t.Errorf("a set that the server refuses = %v, want ErrUnsupported", err)
		}
		if keys := keysOf(t, d, "few/0"); len(keys) > 0 {
			t.Errorf("left: %q", keys)
		}
		mustAcquire(t, d, rs[0])
	})

	t.Run("contention", func(t *testing.T) { contentionOfSets(t, server) })
}

// Overlapping sets, in both orders, beside requests for single names.
func contentionOfSets(t *testing.T, server *containers.EtcdServer) {
	const rounds = 40
	for _, name := range []string{"x", "y"} { // so that no set is written in its first transaction
		d := newDriver(t, server.Addr())
		if _, err := d.service.client.Put(t.Context(), dirOf(name)+"foreign", "foreign"); err != nil {
			t.Fatal(err)
		}
	}
	seen := map[string]*witness{"x": {held: map[use]int{}}, "y": {held: map[use]int{}}}
	var work sync.WaitGroup
	for n, names := range [][]string{{"x", "y"}, {"y", "x"}, {"x", "y"}, {"x"}, {"y"}} {
		d := newDriver(t, server.Addr())
		work.Go(func() {
			got := 0
			for i := 0; i < rounds || got == 0; i++ {
				c := []use{exclusively(), sharing()}[(n+i)%2]
				var rs []backend.Request
				for _, name := range names {
					r := c.asks(name, len(names) == 1)
					r.TTL = 30 * time.Second
					rs = append(rs, r)
				}
				grants, err := d.AcquireAll(t.Context(), rs)
				if err != nil {
					if !errors.Is(err, backend.ErrHeld) {
						t.Error(err)
						return
					}
					continue
				}
				got++
				for _, g := range grants {
					seen[g.Name].sees(t, c, g)
				}
				for _, g := range grants {
					seen[g.Name].forgets(c)
					mustRelease(t, d, g)
				}
			}
		})
	}
	work.Wait()
}
