package zookeeper_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/zookeeper"
)

// detour is a network on which another server can be put behind an address.
type detour struct {
	mu    sync.Mutex // protects the following fields
	to    string
	conns []net.Conn
}

func (d *detour) dial(ctx context.Context, network, _ string) (net.Conn, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c, err := (&net.Dialer{}).DialContext(ctx, network, d.to)
	if err == nil {
		d.conns = append(d.conns, c)
	}
	return c, err
}

// replace puts another server there, and ends the connections to the former one.
func (d *detour) replace(addr string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.to = addr
	for _, c := range d.conns {
		_ = c.Close()
	}
	d.conns = nil
}

const rootNode = "/fencelock"

// advance lets a server's zxid grow.
func (a admin) advance(t testing.TB, by int) {
	t.Helper()
	for range by {
		if err := a.try(func() error { _, err := a.Set("/", nil, -1); return err }); err != nil {
			t.Fatal(err)
		}
	}
}

// keepsSpace gives a server the token space of another, as a backup does.
func (a admin) keepsSpace(t testing.TB, space string) {
	t.Helper()
	a.create(t, rootNode)
	text, err := json.Marshal(map[string]string{"fencelock_space": space})
	if err != nil {
		t.Fatal(err)
	}
	if err := a.try(func() error { _, err := a.Set(rootNode, text, -1); return err }); err != nil {
		t.Fatal(err)
	}
}

// TestEnsembleWithLostHistory puts an ensemble with another past behind the address of a client that holds and waits.
func TestEnsembleWithLostHistory(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		was, is int                             // how far the zxids of both have grown
		prepare func(*testing.T, admin, string) // the new ensemble, given the token space of the old one
		reasons []backend.Reason                // of the loss
		what    string                          // fell or changed
	}{
		"wiped": {
			was: 200, reasons: []backend.Reason{backend.ReasonHistoryLost}, what: "zxid",
		},
		"restored from a backup": {
			was: 200, prepare: func(t *testing.T, a admin, space string) { a.keepsSpace(t, space) },
			reasons: []backend.Reason{backend.ReasonHistoryLost}, what: "zxid",
		},
		"replaced by one with a longer past": {
			// It does not know the session, and that looks as if the session had expired.
			is: 400, reasons: []backend.Reason{backend.ReasonHistoryLost, backend.ReasonSessionExpired}, what: "token space",
		},
		"replaced by one in use": {
			is: 400, prepare: func(t *testing.T, a admin, _ string) { a.keepsSpace(t, "another") },
			reasons: []backend.Reason{backend.ReasonHistoryLost, backend.ReasonSessionExpired}, what: "token space",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			former, latter := containers.ZooKeeper(t), containers.ZooKeeper(t)
			after := newAdmin(t, latter.Addr())
			newAdmin(t, former.Addr()).advance(t, test.was)
			after.advance(t, test.is)
			network := &detour{to: former.Addr()}
			d := zookeeper.New([]string{"zookeeper.example:2181"},
				&zookeeper.Options{Tick: containers.ZooKeeperTick, Dial: network.dial})
			t.Cleanup(func() {
				if err := d.Close(soon(t, 10*time.Second)); err != nil {
					t.Errorf("Close = %v", err)
				}
			})
			lost := make(chan backend.Reason, 4)
			r := request("held", false)
			r.Lost = func(loss backend.Loss) { lost <- loss.Reason }
			g := take(t, d, r)
			space := d.Describe().TokenSpace
			waited := make(chan error, 1)
			go func() {
				w := r
				w.RequestID, w.Wait, w.Lost = backend.NewRequestID(), true, nil
				_, err := d.Acquire(soon(t, time.Minute), w)
				waited <- err
			}()
			if err := queued(soon(t, 20*time.Second), d, "held"); err != nil {
				t.Fatal(err)
			}
			if test.prepare != nil {
				test.prepare(t, after, space)
			}
			network.replace(latter.Addr())
			lostHistory(t, lost, test.reasons...)
			if err := <-waited; !errors.Is(err, backend.ErrHistoryLost) {
				t.Errorf("the waiter = %v, want ErrHistoryLost", err)
			}
			forgotten(t, d, g, test.what)
			anotherSpace(t, space, latter.Addr())
			forgotten(t, d, g, test.what) // permanently
		})
	}
}

// lostHistory waits for the loss of a hold, for one of the reasons.
func lostHistory(t *testing.T, lost <-chan backend.Reason, reasons ...backend.Reason) {
	t.Helper()
	select {
	case reason := <-lost:
		if !slices.Contains(reasons, reason) {
			t.Errorf("the hold was lost with the reason %q", reason)
		}
	case <-soon(t, 30*time.Second).Done():
		t.Fatal("the holder was not notified")
	}
}

// anotherSpace returns a hold that a fresh client was granted in another token space than space: a survivor gives the
// ensemble a new one in the background.
func anotherSpace(t *testing.T, space string, addrs ...string) backend.Grant {
	t.Helper()
	for until := soon(t, 20*time.Second); ; {
		fresh := driver(t, addrs...)
		again := take(t, fresh, request("held", false))
		release(t, fresh, again)
		switch now := fresh.Describe().TokenSpace; {
		case now != space && now != "":
			return again
		case until.Err() != nil:
			t.Fatalf("a fresh client has the token space %q of before, and the token %v", now, again.Token)
		}
	}
}

// forgotten checks the answers of a driver whose ensemble has lost its history.
func forgotten(t *testing.T, d *zookeeper.Driver, g backend.Grant, what string) {
	t.Helper()
	_, err := d.Acquire(soon(t, 10*time.Second), request("another", true))
	var history *backend.HistoryError
	if !errors.Is(err, backend.ErrHistoryLost) || !errors.As(err, &history) || history.What != what {
		t.Errorf("Acquire = %v, want a HistoryError of the %s", err, what)
	} else if history.Was == "" || history.Now == "" || history.Was == history.Now {
		t.Errorf("the error tells nothing: %v", history)
	}
	for call, err := range map[string]error{
		"Renew":                d.Renew(soon(t, 10*time.Second), []backend.Grant{g})[0].Err,
		"Release":              d.Release(soon(t, 10*time.Second), g),
		"Release of a request": d.Release(soon(t, 10*time.Second), request("another", false).Grant()),
	} {
		var lost *backend.NotHeldError
		if !errors.As(err, &lost) || lost.Reason != backend.ReasonHistoryLost {
			t.Errorf("%s = %v, want a NotHeldError for that reason", call, err)
		}
	}
	if err := d.Ping(soon(t, 10*time.Second)); !errors.Is(err, backend.ErrHistoryLost) {
		t.Errorf("Ping = %v, want ErrHistoryLost", err)
	}
}

// TestDeletedRoot deletes everything under clients that live through it, and that do nothing meanwhile or hold. None of
// them goes on, and a client that comes then has another token space.
func TestDeletedRoot(t *testing.T) {
	t.Parallel()
	server := containers.ZooKeeper(t)
	admin := newAdmin(t, server.Addr())
	spaces := map[string]bool{}
	for round := range 3 {
		idle, holder := driver(t, server.Addr()), driver(t, server.Addr())
		before := take(t, idle, request("before", false))
		release(t, idle, before)
		lost := make(chan backend.Reason, 4)
		r := request("held", false)
		r.Lost = func(loss backend.Loss) { lost <- loss.Reason }
		g := take(t, holder, r)
		if space := holder.Describe().TokenSpace; spaces[space] || space != idle.Describe().TokenSpace {
			t.Errorf("round %d: the token space %s is one of before, or not that of the other client", round, space)
		}
		spaces[holder.Describe().TokenSpace] = true
		admin.deleteBelow(t, "")
		select {
		case reason := <-lost:
			if reason != backend.ReasonHistoryLost {
				t.Errorf("round %d: the hold was lost with the reason %q", round, reason)
			}
		case <-soon(t, 20*time.Second).Done():
			t.Error("the holder was not notified")
		}
		forgotten(t, holder, g, "token space")
		for ctx := soon(t, 20*time.Second); idle.Ping(ctx) == nil; { // a watch notifies it
			if ctx.Err() != nil {
				t.Fatal("a client that held nothing has noticed nothing")
			}
		}
		forgotten(t, idle, before, "token space")
	}
}

// TestRootDeletedWithoutSessions lets all sessions of a client end before everything is deleted and made anew.
func TestRootDeletedWithoutSessions(t *testing.T) {
	t.Parallel()
	server := containers.ZooKeeper(t)
	admin := newAdmin(t, server.Addr())
	addr, link := server.NewLink(t)
	d := driver(t, addr)
	short := request("a", false)
	short.TTL = ttl
	g := take(t, d, short)
	link.Hold(fault.Both)
	take(t, driver(t, server.Addr()), request("a", true)) // the session has ended
	admin.deleteBelow(t, "")
	take(t, driver(t, server.Addr()), request("b", true))
	link.Pass()
	for ctx := soon(t, 20*time.Second); ; {
		err := d.Ping(ctx)
		if errors.Is(err, backend.ErrHistoryLost) {
			break
		}
		if ctx.Err() != nil {
			t.Fatalf("Ping = %v, want ErrHistoryLost", err)
		}
	}
	forgotten(t, d, g, "token space")
}

// TestExclusion asks single servers; the ensemble of three is asked in TestLeaderDies.
func TestExclusion(t *testing.T) {
	t.Parallel()
	d := driver(t, sharedServer(t).Addr())
	if err := d.Ping(soon(t, 20*time.Second)); err != nil {
		t.Fatal(err)
	}
	if got := d.Describe().Exclusion; got != backend.ExclusionDurableServer {
		t.Errorf("a server alone has the exclusion %v", got)
	}
}

// TestHoldIDIsShownAndTheRequestIDIsNot looks at a hold in every way.
func TestHoldIDIsShownAndTheRequestIDIsNot(t *testing.T) {
	t.Parallel()
	server := sharedServer(t)
	a, b := driver(t, server.Addr()), driver(t, server.Addr())
	r := request("shown", false)
	take(t, a, r)
	state, err := b.Look(soon(t, 10*time.Second), "shown")
	if err != nil || len(state.Holders) != 1 || state.Holders[0].HoldID != r.HoldID {
		t.Errorf("Look = %+v, %v; want the hold id %s", state, err, r.HoldID)
	}
	_, err = b.Acquire(soon(t, 10*time.Second), request("shown", false))
	var held *backend.HeldError
	if !errors.As(err, &held) || held.HoldID != r.HoldID {
		t.Errorf("Acquire = %v, want a HeldError with the hold id %s", err, r.HoldID)
	}
	_, mixed := b.Acquire(soon(t, 10*time.Second), some("shown", false, 1, 2))
	for _, shown := range []any{state, err, held, mixed} {
		if text := fmt.Sprintf("%+v", shown); strings.Contains(text, r.RequestID) {
			t.Errorf("the request id is shown: %s", text)
		}
	}
}

// TestRenewalForLessDoesNotShorten renews a hold with a shorter TTL, and cuts its client off.
func TestRenewalForLessDoesNotShorten(t *testing.T) {
	t.Parallel()
	server := sharedServer(t)
	addr, link := server.NewLink(t)
	d, rival := driver(t, addr), driver(t, server.Addr())
	r := request("less", false)
	g := take(t, d, r)
	g.TTL = ttl
	if renewal := d.Renew(soon(t, 10*time.Second), []backend.Grant{g})[0]; renewal.Err != nil || renewal.TTL != ttl {
		t.Fatalf("Renew = %+v, want a TTL of %v", renewal, ttl)
	}
	link.Hold(fault.Both)
	if _, err := rival.Acquire(soon(t, 3*ttl), request("less", true)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a rival after the shorter TTL = %v, want it to wait for the longer one", err)
	}
	link.Pass()
}

// TestPrefixesAreBoundaries lets one prefix lie below another.
func TestPrefixesAreBoundaries(t *testing.T) {
	t.Parallel()
	server := sharedServer(t)
	at := func(prefix string) *zookeeper.Driver {
		d := zookeeper.New([]string{server.Addr()},
			&zookeeper.Options{Tick: containers.ZooKeeperTick, KeyPrefix: prefix})
		t.Cleanup(func() { _ = d.Close(soon(t, 10*time.Second)) })
		return d
	}
	outer, inner, beside := at("/locks"), at("/locks/orders"), at("/locksorders")
	g := take(t, inner, request("17", false))
	for _, d := range []*zookeeper.Driver{outer, beside} {
		for _, name := range []string{"orders", "orders/17", "17", "lock:17", "orders/lock:17", "lock%3A17"} {
			if err := d.ForceRelease(soon(t, 10*time.Second), backend.ForceRequest{Name: name, Reason: "test"}); !errors.Is(err, backend.ErrNotHeld) {
				t.Errorf("ForceRelease(%q) beyond the boundary = %v, want ErrNotHeld", name, err)
			}
			other := take(t, d, request(name, false))
			release(t, d, other)
		}
		for state, err := range d.List(soon(t, 10*time.Second), "") {
			t.Errorf("List beyond the boundary: %+v, %v", state, err)
		}
	}
	n := 0
	for state, err := range inner.List(soon(t, 10*time.Second), "") {
		if n++; err != nil || state.Name != "17" {
			t.Errorf("List = %+v, %v", state, err)
		}
	}
	if renewal := inner.Renew(soon(t, 10*time.Second), []backend.Grant{g})[0]; n != 1 || renewal.Err != nil {
		t.Errorf("the hold = %v after the others, listed %d times", renewal.Err, n)
	}
	if outer.Describe().TokenSpace == inner.Describe().TokenSpace {
		t.Error("two prefixes have one token space")
	}
	release(t, inner, g)
}

// TestNewTokenSpaceIsReported opens a chroot that does not exist, by several clients at once: one of them makes it, and
// says so. A later client makes nothing.
func TestNewTokenSpaceIsReported(t *testing.T) {
	t.Parallel()
	server := sharedServer(t)
	excused, err := stallmeter.Fairly(500*time.Millisecond, func() error { // without its answer a creation is not reported
		var logs syncBuffer
		chroot := "/" + backend.NewRequestID()
		open := func() *zookeeper.Driver {
			d := zookeeper.New([]string{server.Addr()}, &zookeeper.Options{
				Tick: containers.ZooKeeperTick, Chroot: chroot, Logger: slog.New(slog.NewTextHandler(&logs, nil)),
			})
			t.Cleanup(func() { _ = d.Close(soon(t, 10*time.Second)) })
			if err := d.Ping(soon(t, 20*time.Second)); err != nil {
				t.Errorf("Ping = %v", err)
			}
			return d
		}
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() { open() })
		}
		all.Wait()
		space := open().Describe().TokenSpace
		text := logs.String()
		named := strings.Contains(text, "node="+chroot+"/fencelock space="+space+"\n")
		if n := strings.Count(text, "level=WARN"); n != 1 || !named {
			return fmt.Errorf("%d warnings, want one with the node and the space %s:\n%s", n, space, text)
		}
		return nil
	})
	stallmeter.Report(t, "the warning of a new token space", excused, err)
}

// syncBuffer is a buffer for several goroutines.
type syncBuffer struct {
	mu sync.Mutex // protects the following field
	b  strings.Builder
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
