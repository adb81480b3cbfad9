package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// listed returns the names that List yields, sorted, with the number of holders of each.
func listed(t *testing.T, d *Driver, prefix string) (names []string) {
	t.Helper()
	for s, err := range d.List(within(t, 20*time.Second), prefix) {
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, fmt.Sprint(s.Name, " ", len(s.Holders)))
	}
	slices.Sort(names)
	return names
}

// Among thousands of keys, including foreign ones, List yields each held name of the prefix once.
func TestListAmongMany(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d := s.open(t)
	admin, ctx := s.admin(t), within(t, 20*time.Second)
	pipe := admin.Pipeline()
	for i := range 5 * pageKeys {
		pipe.Set(ctx, fmt.Sprint("other:", i), "", 0)
	}
	for _, key := range []string{
		"fencelock:{a*/x}:q", "fencelock:{a*/foreign", "fencelock:{a*/%zz}", "fencelock:{a*/}x}",
		"fencelock:x{a*/b}", "fencelock:{a*/x}y",
	} {
		pipe.Set(ctx, key, "foreign", 0)
	}
	if _, err := pipe.Exec(ctx); err != nil {
		t.Fatal(err)
	}
	want := []string{}
	for _, name := range []string{"a*/1", "a*/[2]?", `a*/\{3}%`, "a*/"} {
		mustAcquire(t, d, request(name, time.Minute, false))
		want = append(want, name+" 1")
	}
	for _, name := range []string{"ab/1", "a", "A*/1"} {
		mustAcquire(t, d, request(name, time.Minute, false))
	}
	for range 2 {
		mustAcquire(t, d, reading(request("a*/shared", time.Minute, false)))
		mustAcquire(t, d, taking(request("a*/permits", time.Minute, false), 1, 3))
	}
	closed := request("a*/closed", time.Minute, false)
	closed.MinHold = time.Minute
	mustRelease(t, d, mustAcquire(t, d, closed))
	want = append(want, "a*/shared 2", "a*/permits 2")
	slices.Sort(want)
	if got := listed(t, d, "a*/"); !slices.Equal(got, want) {
		t.Errorf("List = %q, want %q", got, want)
	}
	if got := listed(t, d, ""); len(got) != len(want)+3 {
		t.Errorf("List of all = %q", got)
	}
}

// List ends with its context and after its first error, and a slow reader does not delay Close.
func TestListEnds(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d := s.open(t)
	mustAcquire(t, d, request("a", time.Minute, false))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	n := 0
	for _, err := range d.List(ctx, "") {
		if n++; !errors.Is(err, context.Canceled) {
			t.Errorf("after the end of its context: %v", err)
		}
	}
	if n != 1 {
		t.Errorf("%d errors, want 1", n)
	}
	for _, err := range d.List(within(t, 20*time.Second), "") {
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Close(within(t, 20*time.Second)); err != nil {
			t.Errorf("Close within a list: %v", err)
		}
	}
	for _, err := range d.List(within(t, 20*time.Second), "") {
		if !errors.Is(err, backend.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	}
}

// ForceRelease ends all holds of any kind, every victim gets the reason, the next waiter gets the name, and no key
// remains.
func TestForceReleaseOfEveryKind(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	a, b := s.open(t), s.open(t)
	for name, kind := range map[string]func(backend.Request) backend.Request{
		"exclusive": func(r backend.Request) backend.Request { return r },
		"shared":    reading,
		"permits":   func(r backend.Request) backend.Request { return taking(r, 1, 2) },
	} {
		var victims []backend.Grant
		victims = append(victims, mustAcquire(t, a, kind(request(name, time.Minute, false))))
		rival := request(name, time.Minute, true)
		if name != "exclusive" {
			victims = append(victims, mustAcquire(t, b, kind(request(name, time.Minute, false))))
		}
		if name == "permits" {
			rival = taking(rival, 2, 2)
		}
		next := inLine(t, a, b, rival, 1)
		if err := a.ForceRelease(within(t, 10*slack), backend.ForceRequest{Name: name, Reason: "stuck"}); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		got := <-next
		for i, g := range victims {
			var err error
			if i == 0 {
				err = a.Renew(within(t, 10*slack), []backend.Grant{g})[0].Err
			} else {
				err = a.Release(within(t, 10*slack), g)
			}
			var lost *backend.NotHeldError
			if !errors.As(err, &lost) || lost.Reason != backend.ReasonForceReleased {
				t.Errorf("%s: victim %d: %v", name, i, err)
			}
		}
		if answers := b.Renew(within(t, 10*slack), []backend.Grant{got}); answers[0].Err != nil {
			t.Errorf("%s: the next holder: %v", name, answers[0].Err)
		}
		mustRelease(t, b, got)
		if err := a.ForceRelease(within(t, 10*slack), backend.ForceRequest{Name: name, Reason: "stuck"}); !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("%s: of a free name: %v", name, err)
		}
	}
	// The deletion of keys by hand is not a force-release.
	g := mustAcquire(t, a, request("deleted", time.Minute, false))
	if err := s.admin(t).Del(within(t, 10*slack), redisscript.KeysOf("fencelock:", "deleted").Lock).Err(); err != nil {
		t.Fatal(err)
	}
	var lost *backend.NotHeldError
	if err := a.Renew(within(t, 10*slack), []backend.Grant{g})[0].Err; !errors.As(err, &lost) ||
		lost.Reason != backend.ReasonEvicted {
		t.Errorf("deleted: %v", err)
	}
	nothingLeft(t, s)
}

// On a cluster, List yields the names of all nodes, and ForceRelease finds each of them.
func TestListOnCluster(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t)
	d, err := Open(within(t, 20*time.Second), "redis+cluster://"+nodes[0].addr)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close(context.Background())
	var want []string
	var grants []backend.Grant
	for i := range 30 {
		g := mustAcquire(t, d, request(fmt.Sprintf("n/%02d", i), time.Minute, false))
		grants = append(grants, g)
		want = append(want, g.Name+" 1")
	}
	if got := listed(t, d, "n/"); !slices.Equal(got, want) {
		t.Errorf("List = %q, want %q", got, want)
	}
	for _, g := range grants {
		if err := d.ForceRelease(within(t, 10*slack), backend.ForceRequest{Name: g.Name}); err != nil {
			t.Error(err)
		}
	}
	for i, answer := range d.Renew(within(t, 10*slack), grants) {
		var lost *backend.NotHeldError
		if !errors.As(answer.Err, &lost) || lost.Reason != backend.ReasonForceReleased {
			t.Errorf("victim %d: %v", i, answer.Err)
		}
	}
	if got := listed(t, d, ""); len(got) != 0 {
		t.Errorf("after all were released: %q", got)
	}
}
