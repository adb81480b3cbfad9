package builtin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// setOf returns a request for each name, each with a fresh request id.
func setOf(wait bool, names ...string) []backend.Request {
	var rs []backend.Request
	for _, name := range names {
		r := request(name)
		r.Wait = wait
		rs = append(rs, r)
	}
	return rs
}

// outcomeAll is the result of an AcquireAll in another goroutine.
type outcomeAll struct {
	done   chan struct{}
	grants []backend.Grant
	err    error
}

func acquireAll(ctx context.Context, d *Driver, rs []backend.Request) *outcomeAll {
	o := &outcomeAll{done: make(chan struct{})}
	go func() {
		defer close(o.done)
		o.grants, o.err = d.AcquireAll(ctx, rs)
	}()
	return o
}

// tokensOf returns the names and tokens of grants as text.
func tokensOf(grants []backend.Grant) string {
	var all []string
	for _, g := range grants {
		all = append(all, fmt.Sprintf("%s:%v", g.Name, g.Token))
	}
	return strings.Join(all, " ")
}

// push sends the grant of a set to the session that asked for it last.
func (f *fake) push(rs []backend.Request, tokens ...uint64) {
	all := asked[*lockpb.Request_AcquireAll](f)
	granted := &lockpb.Granted{Session: all[len(all)-1].Session}
	for i, r := range rs {
		granted.Grants = append(granted.Grants, &lockpb.Grant{Name: r.Name, RequestId: r.RequestID, Token: tokens[i]})
	}
	f.last().push(&lockpb.Reply{Answer: &lockpb.Reply_Granted{Granted: granted}})
}

func TestSetWhoseAnswerIsLostIsAskedForAgain(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, f *fake, d *Driver) {
		lost := false
		f.plays(func(p *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
			if q.GetAcquireAll() == nil || lost {
				return nil, false
			}
			lost = true
			f.answer(q) // it is executed
			p.cancel()
			return nil, true
		})
		grants, err := d.AcquireAll(t.Context(), setOf(false, "y", "x"))
		if err != nil || tokensOf(grants) != "y:1 x:2" {
			t.Errorf("granted %s, %v; want the holds of the first time", tokensOf(grants), err)
		}
		if all := asked[*lockpb.Request_AcquireAll](f); len(all) != 2 ||
			all[0].GetAcquireAll().Requests[0].RequestId != all[1].GetAcquireAll().Requests[0].RequestId {
			t.Errorf("asked as %v, want the same one twice", all)
		}
		for _, r := range d.Renew(t.Context(), grants) {
			if r.Err != nil {
				t.Errorf("renewal: %v", r.Err)
			}
		}
	})
}

// The same requests may have taken the place in the queue in another order.
func TestSetIsGrantedInTheOrderOfItsRequests(t *testing.T) {
	run(t, func(t *testing.T, f *fake, d *Driver) {
		f.plays(once[*lockpb.Request_AcquireAll](queuedReply()))
		rs := setOf(true, "x", "y")
		o := acquireAll(t.Context(), d, rs)
		synctest.Wait()
		f.push([]backend.Request{rs[1]}, 1) // no attempt waits for this set
		f.push([]backend.Request{rs[1], rs[0], request("z")}, 2, 3, 4)
		f.push([]backend.Request{rs[1], rs[0]}, 5, 6)
		<-o.done
		if o.err != nil || tokensOf(o.grants) != "x:6 y:5" || !o.grants[0].Queued {
			t.Errorf("granted %s, %v", tokensOf(o.grants), o.err)
		}
	})
}

// A waiter for a set whose grant was lost repeats its request, whether the pages list its holds or not: a hold may
// have ended since.
func TestSetThatNobodyHeardOfIsFoundPageByPage(t *testing.T) {
	for what, c := range map[string]struct {
		lost    string // a name that an operator force-releases between the pages
		granted string
	}{
		"whole":                               {"", "x:5 y:6"},
		"broken before the last page":         {"x", "x:11 y:12"},
		"broken before the notice of its end": {"y", "x:11 y:12"},
	} {
		t.Run(what, func(t *testing.T) {
			run(t, func(t *testing.T, f *fake, d *Driver) {
				rs := setOf(true, "x", "y")
				entries := map[string]*lockpb.SessionEntry{}
				for i, r := range rs {
					entries[r.Name] = &lockpb.SessionEntry{Name: r.Name, RequestId: r.RequestID, Token: uint64(5 + i)}
				}
				f.change(func(f *fake) { f.token = 10 })
				now := func(holds map[string]*lockpb.SessionEntry) {
					f.change(func(f *fake) { f.holds = holds })
				}
				queued := once[*lockpb.Request_AcquireAll](queuedReply())
				f.plays(func(p *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
					switch a := q.GetAttach(); {
					case a == nil:
						return queued(p, q)
					case a.After == "":
						return stateReply(&lockpb.SessionState{Holds: []*lockpb.SessionEntry{entries["x"]}, NextAfter: "x"}), true
					default:
						if now(maps.Clone(entries)); c.lost != "" {
							now(map[string]*lockpb.SessionEntry{}) // the driver then releases the rest of the set
							p.push(&lockpb.Reply{Answer: &lockpb.Reply_Lost{Lost: &lockpb.Lost{
								Session: q.Session, Name: c.lost, RequestId: entries[c.lost].RequestId, Token: entries[c.lost].Token,
								Reason: lockpb.Reason_REASON_FORCE_RELEASED,
							}}})
						}
						return stateReply(&lockpb.SessionState{Holds: []*lockpb.SessionEntry{entries["y"]}}), true
					}
				})
				o := acquireAll(t.Context(), d, rs)
				synctest.Wait()
				f.disconnect()
				<-o.done
				if o.err != nil || tokensOf(o.grants) != c.granted {
					t.Errorf("granted %s, %v; want %s", tokensOf(o.grants), o.err, c.granted)
				}
			})
		})
	}
}

// The driver releases the rest of a set before it asks for the whole set again.
func TestRestOfABrokenSetIsReleased(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, f *fake, d *Driver) {
		rs := setOf(false, "x", "y")
		told := make(chan backend.Reason, 8)
		rs[0].Lost = func(backend.Loss) {}
		rs[1].Lost = func(loss backend.Loss) { told <- loss.Reason }
		if _, err := d.AcquireAll(t.Context(), rs); err != nil {
			t.Fatal(err)
		}
		f.change(func(f *fake) { delete(f.holds, "x") })
		f.plays(func(_ *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
			f.mu.Lock()
			defer f.mu.Unlock()
			switch {
			case q.GetAcquireAll() != nil && f.holds["y"] != nil:
				return errorReply(lockpb.Code_CODE_CONFLICT), true
			case q.GetMove() != nil && f.holds[q.GetMove().Name] != nil:
				return f.grant(&lockpb.Acquire{Name: "y", RequestId: rs[1].RequestID}), true
			case q.GetMove() != nil:
				return errorReply(lockpb.Code_CODE_NOT_HELD), true
			}
			return nil, false
		})
		again := append([]backend.Request(nil), rs...)
		again[0].Lost, again[1].Lost = nil, nil
		grants, err := d.AcquireAll(t.Context(), again)
		if err != nil || tokensOf(grants) != "x:3 y:4" {
			t.Errorf("granted %s, %v; want a set of new holds", tokensOf(grants), err)
		}
		if len(told) != 1 || <-told != backend.ReasonEvicted {
			t.Errorf("the first holder of y was not notified of its eviction")
		}
		all := asked[*lockpb.Request_Release](f)
		if len(all) != 1 || all[0].GetRelease().Name != "y" || all[0].GetRelease().Token != 2 {
			t.Errorf("released as %v, want y with its token", all)
		}
	})
}

func TestRequestIDOfAnotherSetIsRefused(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, f *fake, d *Driver) {
		f.plays(func(_ *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
			switch {
			case q.GetAcquire() != nil:
				return errorReply(lockpb.Code_CODE_CONFLICT), true
			case q.GetMove() != nil:
				return queuedReply(), true
			}
			return nil, false
		})
		r := waiting("x")
		_, err := d.Acquire(t.Context(), r)
		var invalid *backend.InvalidError
		if !errors.As(err, &invalid) || !strings.Contains(invalid.Value, r.RequestID) {
			t.Errorf("acquire: %v, want that the request id is in use", err)
		}
		if n := len(asked[*lockpb.Request_Acquire](f)); n != maxConflicts+1 {
			t.Errorf("asked %d times", n)
		}
	})
}

func TestAbandonedSetLeavesNothing(t *testing.T) {
	run(t, func(t *testing.T, f *fake, d *Driver) {
		f.plays(once[*lockpb.Request_AcquireAll](queuedReply()))
		ctx, cancel := context.WithCancel(t.Context())
		rs := setOf(true, "x", "y")
		o := acquireAll(ctx, d, rs)
		synctest.Wait()
		f.change(func(f *fake) { // it is granted now, and the answer is lost
			for i, r := range rs {
				f.holds[r.Name] = &lockpb.SessionEntry{Name: r.Name, RequestId: r.RequestID, Token: uint64(i + 1)}
			}
		})
		cancel()
		<-o.done
		if !errors.Is(o.err, context.Canceled) || errors.Is(o.err, backend.ErrUnknown) {
			t.Errorf("%v, want context.Canceled alone", o.err)
		}
		if len(f.holds) != 0 {
			t.Errorf("left over: %v", f.holds)
		}
		for _, q := range asked[*lockpb.Request_Release](f) {
			if r := q.GetRelease(); r.Token != 0 || !r.Own {
				t.Errorf("the clean-up is %v", r)
			}
		}
	})
}

// An attempt that has taken over the request's holds from another session, and is abandoned before its acquire is
// answered, cleans up.
func TestAbandonedTakeoverLeavesNothing(t *testing.T) {
	run(t, func(t *testing.T, f *fake, d *Driver) {
		take(t, d, request("warm"))
		conflict := once[*lockpb.Request_AcquireAll](errorReply(lockpb.Code_CODE_CONFLICT))
		f.plays(func(p *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
			if m := q.GetMove(); m != nil {
				f.mu.Lock()
				defer f.mu.Unlock()
				return f.grant(&lockpb.Acquire{Name: m.Name, RequestId: m.RequestId}), true
			}
			if reply, answered := conflict(p, q); answered || q.GetAcquireAll() == nil {
				return reply, answered
			}
			return nil, true
		})
		ctx, cancel := context.WithCancel(t.Context())
		rs := setOf(true, "x", "y")
		o := acquireAll(ctx, d, rs)
		synctest.Wait()
		cancel()
		<-o.done
		if !errors.Is(o.err, backend.ErrUnknown) || !errors.Is(o.err, context.Canceled) {
			t.Errorf("abandoned with %v, want ErrUnknown", o.err)
		}
		for _, r := range rs {
			if err := d.Release(t.Context(), r.Grant()); err != nil { // as the core does
				t.Errorf("release of %s: %v", r.Name, err)
			}
		}
		if len(f.holds) != 1 {
			t.Errorf("left over: %v", f.holds)
		}
	})
}

// The driver stops an attempt but does not undo it: the caller may ask for the set again, or release each of its
// holds.
func TestAttemptForASetWithoutAnAnswerIsUnknown(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, f *fake, d *Driver) {
		take(t, d, request("warm"))
		f.plays(func(_ *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
			if q.GetAcquireAll() != nil {
				f.answer(q)
			}
			return nil, true
		})
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		rs := setOf(false, "x", "y")
		if _, err := d.AcquireAll(ctx, rs); !errors.Is(err, backend.ErrUnknown) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v, want ErrUnknown and the context's error", err)
		}
		f.plays(nil)
		time.Sleep(ttl / 2)
		if len(asked[*lockpb.Request_Release](f)) != 0 {
			t.Error("something was released before its caller could ask for it again")
		}
		if grants, err := d.AcquireAll(t.Context(), rs); err != nil || tokensOf(grants) != "x:2 y:3" {
			t.Errorf("the same set again is %s, %v; want its holds", tokensOf(grants), err)
		}
		for _, r := range rs {
			if err := d.Release(t.Context(), r.Grant()); err != nil {
				t.Errorf("release of %s: %v", r.Name, err)
			}
		}
	})
}

// Contradictory requests, and requests that no server supports, are refused before anything is sent.
func TestUnfitKindsAndSets(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, f *fake, d *Driver) {
		permits := func(n, limit int) func(*backend.Request) {
			return func(r *backend.Request) { r.Kind, r.Permits, r.Limit = backend.KindPermits, n, limit }
		}
		for what, c := range map[string]struct {
			change func(*backend.Request)
			want   error
		}{
			"kind nobody knows":    {func(r *backend.Request) { r.Kind = 9 }, backend.ErrUnsupported},
			"hierarchical permits": {func(r *backend.Request) { permits(1, 2)(r); r.Hierarchical = true }, backend.ErrUnsupported},
			"no permits":           {permits(0, 2), backend.ErrInvalidOption},
			"negative permits":     {permits(-1, 2), backend.ErrInvalidOption},
			"more permits":         {permits(3, 2), backend.ErrInvalidOption},
			"under too many":       {func(r *backend.Request) { r.Under = make([]string, backend.MaxUnder+1) }, backend.ErrInvalidOption},
			"under no id":          {func(r *backend.Request) { r.Under = []string{"a b"} }, backend.ErrInvalidOption},
			"a hold id in bytes":   {func(r *backend.Request) { r.HoldID = "\xff" }, backend.ErrInvalidOption},
			"limit too high":       {permits(1, 1<<32), backend.ErrInvalidOption},
			"shared permits":       {func(r *backend.Request) { permits(1, 2)(r); r.Kind = backend.KindShared }, backend.ErrInvalidOption},
		} {
			r := request("x")
			c.change(&r)
			if _, err := d.Acquire(t.Context(), r); !errors.Is(err, c.want) {
				t.Errorf("%s: %v, want %v", what, err, c.want)
			}
			if _, err := d.AcquireAll(t.Context(), []backend.Request{request("y"), r}); !errors.Is(err, c.want) {
				t.Errorf("%s in a set: %v, want %v", what, err, c.want)
			}
		}
		for what, change := range map[string]func(*backend.Request){
			"twice": func(r *backend.Request) { r.Name = "x" },
			"wait":  func(r *backend.Request) { r.Wait = true },
			"TTL":   func(r *backend.Request) { r.TTL = 2 * ttl },
			"under": func(r *backend.Request) { r.Under = []string{"somebody"} },
		} {
			rs := setOf(false, "x", "y")
			change(&rs[1])
			if _, err := d.AcquireAll(t.Context(), rs); !errors.Is(err, backend.ErrInvalidOption) {
				t.Errorf("a set that does not agree (%s): %v, want ErrInvalidOption", what, err)
			}
		}
		var large []backend.Request
		for n := range 100 {
			r := request(fmt.Sprint("name ", n))
			r.Metadata = map[string]string{"much": strings.Repeat("x", 4000)}
			large = append(large, r)
		}
		if _, err := d.AcquireAll(t.Context(), large); !errors.Is(err, backend.ErrUnsupported) {
			t.Errorf("a set that is too large: %v, want ErrUnsupported", err)
		}
		if _, err := d.AcquireAll(t.Context(), nil); !errors.Is(err, backend.ErrInvalidOption) {
			t.Errorf("an empty set: %v, want ErrInvalidOption", err)
		}
		if n := len(asked[*lockpb.Request_AcquireAll](f)) + len(asked[*lockpb.Request_Acquire](f)); n != 0 {
			t.Errorf("%d requests were sent", n)
		}
	})
}

// Every field of a request is sent.
func TestKindsOnTheWire(t *testing.T) {
	t.Parallel()
	r := request("a/b")
	r.HoldID, r.Under = "shown", []string{"0123456789abcdef"}
	r.Kind, r.Permits, r.Limit = backend.KindPermits, 2, 8
	got := (&service{}).acquireOf([]engine.Entering{{Request: r}}).GetAcquire()
	if got.Kind != lockpb.Kind_KIND_PERMITS || got.Permits != 2 || got.Limit != 8 || got.Hierarchical || got.Wait {
		t.Errorf("permits are sent as %v", got)
	}
	if got.HoldId != "shown" || !slices.Equal(got.Under, r.Under) {
		t.Errorf("hold id %q under %q", got.HoldId, got.Under)
	}
	set := (&service{}).acquireOf([]engine.Entering{{Request: r}, {Request: r}}).GetAcquireAll()
	if !slices.Equal(set.Under, r.Under) || set.Requests[0].Under != nil {
		t.Errorf("a set is sent as %v", set)
	}
	r = waiting("a/b")
	r.Kind, r.Hierarchical = backend.KindShared, true
	got = (&service{}).acquireOf([]engine.Entering{{Request: r}}).GetAcquire()
	if got.Kind != lockpb.Kind_KIND_SHARED || !got.Hierarchical || !got.Wait {
		t.Errorf("a shared hold is sent as %v", got)
	}
}
