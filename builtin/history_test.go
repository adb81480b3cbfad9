package builtin

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// After each sign that the cluster has lost acknowledged changes, the driver loses every hold and every wait, and gets
// no further grants.
func TestHistoryLost(t *testing.T) {
	for what, forget := range map[string]func(f *fake){
		"cluster id":          func(f *fake) { f.welcome.ClusterId = "another" },
		"restore of a backup": func(f *fake) { f.welcome.History = "restored" },
		"revision":            func(f *fake) { f.token = 1 },
		"cluster id, of a server that keeps nothing": func(f *fake) { f.welcome.ClusterId, f.welcome.Durable = "dev", false },
	} {
		t.Run(what, func(t *testing.T) {
			run(t, func(t *testing.T, f *fake, d *Driver) {
				f.change(func(f *fake) { f.token = 300 })
				lost := make(chan backend.Reason, 4)
				r := request("x")
				r.Lost = func(loss backend.Loss) { lost <- loss.Reason }
				g := take(t, d, r)
				take(t, d, request("y"))
				f.plays(func(_ *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
					return queuedReply(), q.GetAcquire().GetName() == "z"
				})
				waiter := acquire(t.Context(), d, waiting("z"))
				synctest.Wait()
				f.change(func(f *fake) {
					forget(f)
					clear(f.holds)
				})
				f.disconnect()
				<-waiter.done
				var history *backend.HistoryError
				if !errors.As(waiter.err, &history) || !strings.HasPrefix(what, history.What) || history.Was == history.Now {
					t.Errorf("the waiter gets %v, want ErrHistoryLost for the %s", waiter.err, what)
				}
				if reason := <-lost; reason != backend.ReasonHistoryLost {
					t.Errorf("the holder is notified of %q", reason)
				}
				before := len(f.requests)
				if _, err := d.Acquire(t.Context(), request("new")); !errors.Is(err, backend.ErrHistoryLost) {
					t.Errorf("an acquire afterwards: %v", err)
				}
				var gone *backend.NotHeldError
				err := d.Renew(t.Context(), []backend.Grant{g})[0].Err
				if !errors.As(err, &gone) || gone.Reason != backend.ReasonHistoryLost {
					t.Errorf("a renewal afterwards: %v", err)
				}
				gone = nil
				if err := d.Release(t.Context(), g); !errors.As(err, &gone) || gone.Reason != backend.ReasonHistoryLost {
					t.Errorf("a release afterwards: %v", err)
				}
				if err := d.Ping(t.Context()); !errors.Is(err, backend.ErrHistoryLost) {
					t.Errorf("a ping afterwards: %v", err)
				}
				for _, err := range d.Watch(t.Context(), "x", 0) {
					if !errors.Is(err, backend.ErrHistoryLost) {
						t.Errorf("a watch afterwards: %v", err)
					}
				}
				time.Sleep(10 * ttl)
				if after := len(f.requests); after != before {
					t.Errorf("%d more requests were sent", after-before)
				}
				// A new driver accepts the cluster as it is.
				fresh := newDriver([]string{"a"}, d.service.dialer, &Options{Clock: backend.GoClock()})
				defer fresh.Close(context.Background())
				f.plays(nil)
				take(t, fresh, request("x"))
			})
		})
	}
}

// A volatile server always loses its state: a client of the efficiency tier continues after the restart.
func TestVolatileServerMayForget(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, f *fake, d *Driver) {
		f.change(func(f *fake) { f.welcome.Durable, f.token = false, 300 })
		take(t, d, request("x"))
		if e := d.Describe().Exclusion; e != backend.ExclusionVolatileServer {
			t.Errorf("the exclusion of a server that keeps nothing is %v", e)
		}
		f.change(func(f *fake) {
			f.welcome.ClusterId, f.token = "another", 0
			clear(f.holds)
		})
		f.disconnect()
		take(t, d, request("y"))
	})
}

func TestExclusionIsThatOfTheServer(t *testing.T) {
	t.Parallel()
	for voters, want := range map[uint32]backend.Exclusion{1: backend.ExclusionDurableServer, 3: backend.ExclusionQuorum} {
		run(t, func(t *testing.T, f *fake, d *Driver) {
			f.change(func(f *fake) { f.welcome.Voters = voters })
			take(t, d, request("x"))
			if e := d.Describe().Exclusion; e != want {
				t.Errorf("with %d voters the exclusion is %v, want %v", voters, e, want)
			}
		})
	}
}

// Every call reports the missing argument of New and Attach.
func TestConstructorsWithoutAServer(t *testing.T) {
	t.Parallel()
	for name, d := range map[string]*Driver{
		"New without addresses":     New(nil, nil),
		"New with an empty address": New([]string{"a:1", ""}, nil),
		"Attach without a function": Attach(nil, nil),
	} {
		var invalid *backend.InvalidError
		_, err := d.Acquire(t.Context(), request("x"))
		if !errors.As(err, &invalid) || strings.Contains(err.Error(), "%!") {
			t.Errorf("%s: acquire: %v", name, err)
		}
		for call, err := range map[string]error{
			"ping": d.Ping(t.Context()), "release": d.Release(t.Context(), request("x").Grant()),
			"renew": d.Renew(t.Context(), []backend.Grant{request("x").Grant()})[0].Err,
		} {
			if !errors.Is(err, backend.ErrInvalidOption) {
				t.Errorf("%s: %s: %v", name, call, err)
			}
		}
		if err := d.Close(t.Context()); err != nil {
			t.Errorf("%s: close: %v", name, err)
		}
	}
	silent := Attach(func(context.Context) Stream { return nil }, nil)
	defer silent.Close(context.Background())
	if err := silent.Ping(t.Context()); !errors.Is(err, backend.ErrUnavailable) || strings.Contains(err.Error(), "%!") {
		t.Errorf("Attach to nothing: ping: %v", err)
	}
}
