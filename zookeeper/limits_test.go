package zookeeper_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/zookeeper"
)

// limitTTL is granted by the limits of the tests' servers, and by none to which the tests change them.
const limitTTL = 6 * time.Second

// TestLimitsChangeUnderAHold restarts a server with limits that do not allow a living hold, and then cuts its holder
// off: the holder's belief ends before a rival holds.
func TestLimitsChangeUnderAHold(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		setting string
		tick    time.Duration // of the rival
		says    string
	}{
		"maxSessionTimeout is lowered": {"maxSessionTimeout=2000", containers.ZooKeeperTick, "maxSessionTimeout"},
		"tickTime is lowered":          {"tickTime=100", containers.ZooKeeperTick, "maxSessionTimeout"},
		"tickTime is raised":           {"tickTime=2000", 2 * time.Second, "Options.Tick"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := containers.ZooKeeper(t, containers.AsProcess())
			addr, link := server.NewLink(t)
			h := holdFor(t, driver(t, addr), limitTTL)
			if err := server.Reconfigure(soon(t, time.Minute), test.setting); err != nil {
				t.Fatal(err)
			}
			h.refused(test.says)
			link.Refuse()
			rival := zookeeper.New([]string{server.Addr()}, &zookeeper.Options{Tick: test.tick})
			t.Cleanup(func() { _ = rival.Close(soon(t, 10*time.Second)) })
			h.endsBefore(rival, max(2*test.tick, ttl))
		})
	}
}

// TestOneServerHasAnotherLimit moves a holder's link to the one server of three whose file has a lower limit.
func TestOneServerHasAnotherLimit(t *testing.T) {
	t.Parallel()
	ensemble := containers.ZooKeeperCluster(t, containers.LastSettings("maxSessionTimeout=2000"))
	addrs, links := ensemble.NewLinks(t)
	last := len(links) - 1
	links[last].Refuse()
	h := holdFor(t, driver(t, addrs...), limitTTL)
	links[last].Pass()
	for _, l := range links[:last] {
		l.Refuse()
	}
	h.refused("maxSessionTimeout")
	links[last].Refuse()
	h.endsBefore(driver(t, ensemble.Endpoints()[:last]...), ttl)
}

// limitHold is a hold, and until when its holder believes in it.
type limitHold struct {
	t    *testing.T
	d    *zookeeper.Driver
	g    backend.Grant
	ends backend.Instant
	lost atomic.Int64 // the instant of the loss
}

func holdFor(t *testing.T, d *zookeeper.Driver, ttl time.Duration) *limitHold {
	t.Helper()
	h := &limitHold{t: t, d: d}
	r := request("limited", false)
	r.TTL = ttl
	r.Lost = func(backend.Loss) { h.lost.Store(int64(backend.SystemClock().Now())) }
	h.g = take(t, d, r)
	h.believe(h.g.SentAt)
	return h
}

func (h *limitHold) believe(sent backend.Instant) {
	h.ends = max(h.ends, sent.Add(h.d.Describe().Validity(limitTTL)))
}

// refused renews until a renewal is refused for a limit, or the hold has ended.
func (h *limitHold) refused(says string) {
	h.t.Helper()
	began := backend.SystemClock().Now()
	for ctx := soon(h.t, time.Minute); h.lost.Load() == 0; {
		r := h.d.Renew(ctx, []backend.Grant{h.g})[0]
		switch {
		case r.Err == nil:
			if h.believe(r.SentAt); r.SentAt > began {
				h.t.Errorf("a server whose limits do not allow the hold renewed it, want a refusal with %q", says)
				return
			}
		case errors.Is(r.Err, backend.ErrNotHeld):
			return
		case errors.Is(r.Err, backend.ErrMisconfigured), errors.Is(r.Err, backend.ErrInvalidTTL):
			if !strings.Contains(fmt.Sprint(r.Err), says) {
				h.t.Errorf("Renew = %v, want the setting %q named", r.Err, says)
			}
			return
		case ctx.Err() != nil:
			h.t.Fatalf("Renew = %v", r.Err)
		}
		time.Sleep(10 * time.Millisecond) // no event announces it
	}
}

// endsBefore has a rival take the lock, and compares.
func (h *limitHold) endsBefore(rival *zookeeper.Driver, ttl time.Duration) {
	h.t.Helper()
	r := request("limited", true)
	r.TTL = ttl
	if _, err := rival.Acquire(soon(h.t, time.Minute), r); err != nil {
		h.t.Fatalf("Acquire by the rival = %v", err)
	}
	now := backend.SystemClock().Now()
	if lost := backend.Instant(h.lost.Load()); lost != 0 {
		h.ends = min(h.ends, lost)
	}
	if now < h.ends {
		h.t.Errorf("the rival holds, and the holder believes for %v more", h.ends.Sub(now))
	}
}

// TestShortSessionsOpen opens servers that grant no session of 10 s, with a tick that was left at more than theirs.
func TestShortSessionsOpen(t *testing.T) {
	t.Parallel()
	for name, setting := range map[string]string{
		"maxSessionTimeout": "maxSessionTimeout=3000", "tickTime": "tickTime=200",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := containers.ZooKeeper(t, containers.Settings(setting))
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			url := fmt.Sprintf("zk://%s?timeout=60s&tick=%v", server.Addr(), containers.ZooKeeperTick)
			d, err := zookeeper.Open(ctx, url)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = d.Close(soon(t, 10*time.Second)) })
			r := request("short", false)
			r.TTL = 2 * time.Second
			release(t, d, take(t, d, r))
		})
	}
}
