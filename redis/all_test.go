package redis

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

// set returns requests for a writer, a reader, and permits.
func set(names ...string) []backend.Request {
	var rs []backend.Request
	for i, name := range names {
		r := request(name, time.Minute, false)
		switch i % 3 {
		case 1:
			r = reading(r)
		case 2:
			r = taking(r, 2, 3)
		}
		r.Metadata = map[string]string{"name": name}
		rs = append(rs, r)
	}
	return rs
}

func mustAcquireAll(t *testing.T, d *Driver, rs []backend.Request) []backend.Grant {
	t.Helper()
	grants, err := d.AcquireAll(within(t, 30*time.Second), rs)
	if err != nil || len(grants) != len(rs) {
		t.Fatalf("AcquireAll = %+v, %v", grants, err)
	}
	for i, g := range grants {
		if r := rs[i]; g.Name != r.Name || g.RequestID != r.RequestID || g.Kind != r.Kind || g.TTL != r.TTL {
			t.Errorf("grant %+v of %+v", g, r)
		}
	}
	return grants
}

// AcquireAll grants either all of the names, of any kinds, in one round trip, or no name.
func TestAcquireAll(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	a, b, admin := s.open(t), s.open(t), s.admin(t)
	mustRelease(t, a, mustAcquire(t, a, request("warm-up", time.Minute, true)))
	trips := calls(t, admin, "evalsha")
	grants := mustAcquireAll(t, a, set("w", "r", "p"))
	if n := calls(t, admin, "evalsha") - trips; n != 1 {
		t.Errorf("%d round trips", n)
	}
	info, err := b.Look(within(t, 30*time.Second), "p")
	if err != nil || len(info.Holders) != 1 || info.Holders[0].Permits != 2 || info.Holders[0].Metadata["name"] != "p" {
		t.Errorf("holder: %+v, %v", info, err)
	}
	for _, each := range []struct {
		names []string
		in    string // the name in the set whose hold blocks it
	}{
		{[]string{"x", "y", "p"}, "p"}, {[]string{"w", "y", "z"}, "w"}, {[]string{"r", "x", "z"}, "r"},
	} {
		rs := set(each.names...)
		_, err := b.AcquireAll(within(t, 30*time.Second), rs)
		var refused *backend.HeldError
		if !errors.As(err, &refused) || !errors.Is(err, backend.ErrHeld) || refused.Name != each.in ||
			refused.Holder != "test/"+each.in {
			t.Errorf("%v: %v", each.names, err)
		}
		rs[0].Wait, rs[1].Wait, rs[2].Wait = true, true, true
		if _, err := b.AcquireAll(within(t, 30*time.Second), rs); !errors.Is(err, backend.ErrUnsupported) {
			t.Errorf("%v: a wait: %v", each.names, err)
		}
		for _, free := range []string{"x", "y", "z"} {
			mustRelease(t, b, mustAcquire(t, b, request(free, time.Minute, false)))
		}
	}
	if _, err := b.AcquireAll(within(t, 30*time.Second), set("p", "x")); !errors.Is(err, backend.ErrLimitMismatch) {
		t.Errorf("a lock beside permits: %v", err)
	}
	// AcquireAll does not overtake a waiter.
	next := inLine(t, a, b, request("r", time.Minute, true), 1)
	if _, err := a.AcquireAll(within(t, 30*time.Second), set("x", "r")); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("a reader passes a writer: %v", err)
	}
	for i, answer := range a.Renew(within(t, 30*time.Second), grants) {
		if answer.Err != nil {
			t.Errorf("%d: %v", i, answer.Err)
		}
		mustRelease(t, a, grants[i])
	}
	mustRelease(t, b, <-next)
	// A request that would wait gets a free set immediately, too.
	rs := set("w", "r", "p")
	rs[0].Wait, rs[1].Wait, rs[2].Wait = true, true, true
	for _, g := range mustAcquireAll(t, b, rs) {
		mustRelease(t, b, g)
	}
	nothingLeft(t, s)
}

// A repetition of a set gets the same holds. If one of the holds has ended and its name is taken, the driver that was
// granted the others releases them.
func TestAcquireAllAgain(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	a, b, admin := s.open(t), s.open(t), s.admin(t)
	rs := set("w", "r", "p")
	first := mustAcquireAll(t, a, rs)
	for i := range rs {
		rs[i].Fresh = false
	}
	second := mustAcquireAll(t, a, rs)
	for i, g := range first {
		if info, err := a.Look(within(t, 30*time.Second), g.Name); err != nil || len(info.Holders) != 1 {
			t.Errorf("%s: %+v, %v", g.Name, info, err)
		}
		if second[i].Incarnation != g.Incarnation {
			t.Errorf("%s: the later grant replaced the earlier one", g.Name)
		}
	}
	if err := admin.Del(context.Background(), redisscript.KeysOf("fencelock:", "r").Lock).Err(); err != nil {
		t.Fatal(err)
	}
	rival := mustAcquire(t, a, request("r", time.Minute, false))
	for _, d := range []*Driver{b, a} {
		if _, err := d.AcquireAll(within(t, 30*time.Second), rs); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("one is taken: %v", err)
		}
		if info, err := d.Look(within(t, 30*time.Second), "w"); err != nil || !info.Held {
			t.Errorf("what was granted before is held: %v, %v", info.Held, err)
		}
	}
	mustRelease(t, a, rival)
	first = mustAcquireAll(t, a, rs)
	for i, g := range mustAcquireAll(t, b, rs) {
		if g.Incarnation != first[i].Incarnation {
			t.Errorf("%s: another driver's grant replaced the hold", g.Name)
		}
		if err := a.Expire(within(t, 30*time.Second), first[i]); !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("%s: a hold that two drivers were granted expires: %v", g.Name, err)
		}
		mustRelease(t, b, g)
	}
	nothingLeft(t, s)
}

// With lost replies, late requests and cancelled calls, either all names are held or no name, and no key remains.
func TestAcquireAllWithFaults(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, link := s.linked(t)
	other := s.open(t)
	mustRelease(t, d, mustAcquire(t, d, request("warm-up", time.Minute, false)))
	link.Drop(fault.Replies)
	time.AfterFunc(300*time.Millisecond, link.Pass)
	for _, g := range mustAcquireAll(t, d, set("w", "r", "p")) {
		if info, err := other.Look(within(t, 30*time.Second), g.Name); err != nil || len(info.Holders) != 1 {
			t.Errorf("%s: %+v, %v", g.Name, info, err)
		}
		mustRelease(t, d, g)
	}
	for what, breakIt := range map[string]func(){
		"the reply": func() { link.Drop(fault.Replies) }, "the request": func() { link.Hold(fault.Requests) },
	} {
		// On a busy machine the time may be over before the request is sent: then the outcome is known.
		eventually(t, what+" is lost", func() (sent bool) {
			mustRelease(t, d, mustAcquire(t, d, request("warm-up", time.Minute, false))) // opens the connection
			breakIt()
			ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
			end := stallmeter.Late(t)
			rs := set("w", "r", "p")
			_, err := d.AcquireAll(ctx, rs)
			cancel()
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s is lost: %v", what, err)
			}
			end(100*time.Millisecond+slack, what+" is lost: the call")
			link.Pass()
			sent = settle(t, d, err, rs...)
			for _, r := range set("w", "r", "p") {
				r.Wait = true
				mustRelease(t, other, mustAcquire(t, other, r))
			}
			return sent
		})
	}
	nothingLeft(t, s)
}

// A set was granted, its reply was lost, and a rival has acquired one of its names since: then the others become free.
func TestLostSetIsRefused(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, link := s.linked(t)
	other, admin := s.open(t), s.admin(t)
	mustRelease(t, d, mustAcquire(t, d, request("warm-up", time.Minute, false)))
	link.Drop(fault.Replies)
	answer := make(chan error, 1)
	go func() {
		_, err := d.AcquireAll(within(t, time.Minute), set("w", "r", "p"))
		answer <- err
	}()
	lock := redisscript.KeysOf("fencelock:", "w").Lock
	eventually(t, "the set is granted", func() bool { return admin.Del(context.Background(), lock).Val() == 1 })
	rival := mustAcquire(t, other, request("w", time.Minute, false))
	link.Pass()
	if err := <-answer; !errors.Is(err, backend.ErrHeld) {
		t.Errorf("the set beside a rival: %v", err)
	}
	mustRelease(t, other, rival)
	nothingLeft(t, s)
}

// Sets that overlap in any order do not deadlock and do not overlap in time.
func TestAcquireAllUnderRace(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	var inside [4]atomic.Int32
	var grants atomic.Int32
	var wg sync.WaitGroup
	for i := range 8 {
		d := s.open(t)
		wg.Go(func() {
			for n := range 50 {
				one, two := (i+n)%4, (i+2*n+1)%4
				if one == two {
					continue
				}
				rs := []backend.Request{
					request(fmt.Sprint("n", one), time.Minute, false),
					request(fmt.Sprint("n", two), time.Minute, false),
				}
				got, err := d.AcquireAll(within(t, 30*time.Second), rs)
				if err != nil {
					if !errors.Is(err, backend.ErrHeld) {
						t.Error(err)
					}
					continue
				}
				grants.Add(1)
				for _, k := range []int{one, two} {
					if inside[k].Add(1) != 1 {
						t.Errorf("n%d is held twice", k)
					}
				}
				for j, k := range []int{one, two} {
					inside[k].Add(-1)
					mustRelease(t, d, got[j])
				}
			}
		})
	}
	wg.Wait()
	if grants.Load() == 0 {
		t.Error("nobody got a set")
	}
	nothingLeft(t, s)
}

func TestAcquireAllRefusesBadSets(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d := s.open(t)
	waits, differs := set("a", "b"), set("a", "b")
	waits[1].Wait = true
	differs[1].TTL = time.Second
	var many []backend.Request
	for i := range lines.MaxSteps + 1 {
		many = append(many, request(fmt.Sprint("n", i), time.Minute, false))
	}
	for what, each := range map[string]struct {
		rs   []backend.Request
		want error
	}{
		"an empty set": {nil, backend.ErrInvalidOption}, "a name twice": {set("a", "b", "a"), backend.ErrInvalidOption},
		"differing waits": {waits, backend.ErrInvalidOption}, "differing TTLs": {differs, backend.ErrInvalidOption},
		"a bad name": {set("a", "b\x00"), backend.ErrInvalidName}, "too many": {many, backend.ErrUnsupported},
	} {
		if _, err := d.AcquireAll(within(t, 30*time.Second), each.rs); !errors.Is(err, each.want) {
			t.Errorf("%s: %v, want %v", what, err, each.want)
		}
	}
	for i, g := range mustAcquireAll(t, d, many[:lines.MaxSteps]) {
		if i%2 == 0 {
			mustRelease(t, d, g)
		} else {
			mustRelease(t, d, many[i].Grant())
		}
	}
	nothingLeft(t, s)

	cluster := goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: []string{s.addr}})
	defer cluster.Close()
	c := New(cluster, nil) // does no I/O yet
	defer c.Close(context.Background())
	if c.Describe().Capabilities.Has(backend.CapMultiAcquire) {
		t.Error("declared on a cluster")
	}
}
