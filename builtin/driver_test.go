package builtin

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// once returns a script that answers the first request of a kind with reply, and all others as usual.
func once[T any](reply *lockpb.Reply) func(*peer, *lockpb.Request) (*lockpb.Reply, bool) {
	did := false
	return func(_ *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
		if _, ok := q.Call.(T); !ok || did {
			return nil, false
		}
		did = true
		return reply, true
	}
}

func TestLostAnswerIsAskedForAgain(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, f *fake, d *Driver) {
		lost := false
		f.plays(func(p *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
			if q.GetAcquire() == nil || lost {
				return nil, false
			}
			lost = true
			f.answer(q) // it is executed
			p.cancel()
			return nil, true
		})
		g := take(t, d, request("x"))
		all := asked[*lockpb.Request_Acquire](f)
		if len(all) != 2 || string(all[0].Session) != string(all[1].Session) ||
			all[0].GetAcquire().RequestId != all[1].GetAcquire().RequestId {
			t.Errorf("the acquire was sent as %v, want the same one twice", all)
		}
		if g.Token != 1 {
			t.Errorf("token %v, want that of the one hold", g.Token)
		}
		if n := len(asked[*lockpb.Request_Attach](f)); n != 1 {
			t.Errorf("the session was attached %d times to the second connection", n)
		}
	})
}

func TestLeaderIsFollowed(t *testing.T) {
	t.Parallel()
	runAll(t, []string{"a", "b"}, func(t *testing.T, all *fakes, d *Driver) {
		a, b := all.members["a"], all.members["b"]
		g := take(t, d, request("x"))
		// a is deposed, and answers the next request with that.
		a.change(func(a *fake) { a.welcome.Leader, a.welcome.LeaderAddress = false, "b" })
		b.leads(g)
		b.change(func(b *fake) { b.token = 7 })
		a.plays(func(_ *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
			reply := errorReply(lockpb.Code_CODE_NOT_LEADER)
			reply.GetError().LeaderAddress = "b"
			return reply, q.GetHello() == nil
		})
		if next := take(t, d, request("y")); next.Token != 8 {
			t.Errorf("token %v, want one of the new leader", next.Token)
		}
		if r := d.Renew(t.Context(), []backend.Grant{g})[0]; r.Err != nil {
			t.Errorf("renewal at the new leader: %v", r.Err)
		}
	})
}

func TestLeaderThatIsNotInTheListIsFound(t *testing.T) {
	t.Parallel()
	runAll(t, []string{"a", "b"}, func(t *testing.T, all *fakes, d *Driver) {
		d.service.addresses = []string{"b"}
		all.members["b"].change(func(f *fake) { f.welcome.LeaderAddress = "a" })
		take(t, d, request("x"))
	})
}

func TestElectionIsWaitedFor(t *testing.T) {
	run(t, func(t *testing.T, f *fake, d *Driver) {
		f.change(func(f *fake) { f.welcome.Leader, f.welcome.LeaderAddress = false, "" })
		o := acquire(t.Context(), d, request("x"))
		time.Sleep(electionTime / 2)
		synctest.Wait()
		f.change(func(f *fake) { f.welcome.Leader = true })
		<-o.done
		if o.err != nil {
			t.Errorf("acquire across an election: %v", o.err)
		}
		f.change(func(f *fake) { f.welcome.Leader = false })
		f.disconnect()
		synctest.Wait()
		if _, err := d.Acquire(t.Context(), request("y")); !errors.Is(err, backend.ErrUnavailable) {
			t.Errorf("acquire while nobody is elected: %v, want ErrUnavailable", err)
		}
	})
}

func TestRefusedIsUnavailableSoon(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, f *fake, d *Driver) {
		f.change(func(f *fake) { f.refuses = true })
		began := time.Now()
		if _, err := d.Acquire(t.Context(), request("x")); !errors.Is(err, backend.ErrUnavailable) || errors.Is(err, backend.ErrUnknown) {
			t.Errorf("acquire: %v, want ErrUnavailable", err)
		}
		if took := time.Since(began); took > 1500*time.Millisecond {
			t.Errorf("it took %v to find out that nobody takes connections", took)
		}
		time.Sleep(time.Hour) // an outage of long ago is not this one
		began = time.Now()
		if err := d.Ping(t.Context()); !errors.Is(err, backend.ErrUnavailable) {
			t.Errorf("ping: %v, want ErrUnavailable", err)
		}
		if took := time.Since(began); took < refusedTime || took > 1500*time.Millisecond {
			t.Errorf("a server that may be starting was waited for for %v", took)
		}
	})
}

// A caller that waits for an election gets its lock soon after the election; without an election the driver asks less
// often.
func TestElectedIsFoundSoon(t *testing.T) {
	t.Parallel()
	for _, election := range []time.Duration{300 * time.Millisecond, 800 * time.Millisecond, 2 * time.Second} {
		runAll(t, []string{"a", "b"}, func(t *testing.T, all *fakes, d *Driver) {
			a, b := all.members["a"], all.members["b"]
			long := request("x")
			long.TTL = time.Minute // the longer the TTL, the longer a leader may take to answer
			g := take(t, d, long)
			b.change(func(f *fake) { f.welcome.LeaderAddress = "" })
			a.change(func(f *fake) { f.refuses = true })
			a.disconnect()
			time.Sleep(election)
			b.leads(g)
			began := time.Now()
			if out := d.Renew(t.Context(), []backend.Grant{g}); out[0].Err != nil {
				t.Fatal(out[0].Err)
			}
			if took := time.Since(began); took > 2*electionPause {
				t.Errorf("it took %v to find the leader that was elected after %v", took, election)
			}
		})
	}
	runAll(t, []string{"a", "b"}, func(t *testing.T, all *fakes, d *Driver) {
		a, b := all.members["a"], all.members["b"]
		long := request("x")
		long.TTL = time.Minute
		take(t, d, long)
		b.change(func(f *fake) { f.welcome.LeaderAddress = "" })
		a.change(func(f *fake) { f.refuses = true })
		a.disconnect()
		time.Sleep(30 * time.Second)
		before := len(asked[*lockpb.Request_Hello](b))
		time.Sleep(30 * time.Second)
		if n := len(asked[*lockpb.Request_Hello](b)) - before; n < 10 || n > 100 {
			t.Errorf("a member that does not lead was asked %d times in 30s", n)
		}
	})
}

// A server that freezes keeps its connection open.
func TestSilentLeaderIsLeft(t *testing.T) {
	runAll(t, []string{"a", "b"}, func(t *testing.T, all *fakes, d *Driver) {
		a, b := all.members["a"], all.members["b"]
		r := request("x")
		r.Lost = func(loss backend.Loss) { t.Errorf("the hold was lost: %v", loss.Reason) }
		g := take(t, d, r)
		a.plays(func(*peer, *lockpb.Request) (*lockpb.Reply, bool) { return nil, true })
		b.leads(g)
		time.Sleep(ttl)
		synctest.Wait()
		proved := backend.Instant(0)
		for _, own := range d.service.sessions {
			proved = d.service.Proved(own)
		}
		if age := d.service.clock.Now().Sub(proved); age > ttl/2 {
			t.Errorf("the session was proved last %v ago", age)
		}
		if len(asked[*lockpb.Request_Attach](b)) == 0 {
			t.Error("the session was not attached to the other member")
		}
	})
}

// Another process may take over a hold with the same request. A renewal then moves the hold back, even if the push of
// the move comes just before the answer to the renewal.
func TestRenewalOfWhatMovedMovesItBack(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, f *fake, d *Driver) {
		told := make(chan backend.Reason, 8)
		r := request("x")
		r.Lost = func(loss backend.Loss) { told <- loss.Reason }
		g := take(t, d, r)
		f.plays(func(p *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
			switch c := q.Call.(type) {
			case *lockpb.Request_KeepAlive:
				p.push(&lockpb.Reply{Answer: &lockpb.Reply_Lost{Lost: &lockpb.Lost{
					Session: q.Session, Name: g.Name, RequestId: g.RequestID, Token: uint64(g.Token), Reason: lockpb.Reason_REASON_MOVED,
				}}})
			case *lockpb.Request_Move:
				return f.grant(&lockpb.Acquire{Name: c.Move.Name, RequestId: c.Move.RequestId}), true
			}
			return nil, false
		})
		if out := d.Renew(t.Context(), []backend.Grant{g})[0]; out.Err != nil || out.TTL != g.TTL {
			t.Errorf("renewal: %v for %v", out.Err, out.TTL)
		}
		f.plays(nil)
		if out := d.Renew(t.Context(), []backend.Grant{g})[0]; out.Err != nil {
			t.Errorf("the next renewal: %v", out.Err)
		}
		if n := len(asked[*lockpb.Request_Move](f)); n != 1 {
			t.Errorf("the hold was moved %d times", n)
		}
		if reason := <-told; reason != backend.ReasonEvicted {
			t.Errorf("reason %q", reason)
		}
	})
}

func TestEndOfSessionIsReported(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, f *fake, d *Driver) {
		told := make(chan backend.Reason, 8)
		r := request("x")
		r.Lost = func(loss backend.Loss) { told <- loss.Reason }
		g := take(t, d, r)
		f.plays(once[*lockpb.Request_Attach](errorReply(lockpb.Code_CODE_SESSION_ENDED)))
		f.disconnect()
		if reason := <-told; reason != backend.ReasonSessionExpired {
			t.Errorf("reason %q", reason)
		}
		f.plays(func(_ *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
			return errorReply(lockpb.Code_CODE_NOT_HELD), q.GetMove() != nil || q.GetRelease() != nil
		})
		if err := d.Renew(t.Context(), []backend.Grant{g})[0].Err; !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("renewal: %v, want ErrNotHeld", err)
		}
		if err := d.Release(t.Context(), g); !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("release: %v, want ErrNotHeld", err)
		}
		take(t, d, request("y"))
		if all := asked[*lockpb.Request_OpenSession](f); len(all) != 2 || string(all[0].Session) == string(all[1].Session) {
			t.Errorf("sessions %v, want a second one with its own id", all)
		}
	})
}

// The answer to any call may be that the session has ended: the driver then loses its holds, and never uses it again.
func TestAnyAnswerMayEndTheSession(t *testing.T) {
	for what, ask := range map[string]func(t *testing.T, d *Driver, g backend.Grant) error{
		"acquire": func(t *testing.T, d *Driver, _ backend.Grant) error {
			_, err := d.Acquire(t.Context(), request("y"))
			return err
		},
		"renew": func(t *testing.T, d *Driver, g backend.Grant) error {
			return d.Renew(t.Context(), []backend.Grant{g})[0].Err
		},
		"release": func(t *testing.T, d *Driver, g backend.Grant) error { return d.Release(t.Context(), g) },
	} {
		t.Run(what, func(t *testing.T) {
			run(t, func(t *testing.T, f *fake, d *Driver) {
				told := make(chan backend.Reason, 8)
				r := request("w")
				r.Lost = func(loss backend.Loss) { told <- loss.Reason }
				g := take(t, d, request("x"))
				take(t, d, r)
				first := asked[*lockpb.Request_OpenSession](f)[0].Session
				f.plays(func(_ *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
					return errorReply(lockpb.Code_CODE_SESSION_ENDED), string(q.Session) == string(first)
				})
				err := ask(t, d, g)
				var gone *backend.NotHeldError
				expired := errors.As(err, &gone) && gone.Reason == backend.ReasonSessionExpired
				if what == "acquire" && err != nil || what != "acquire" && !expired {
					t.Errorf("%s: %v", what, err)
				}
				take(t, d, request("z"))
				synctest.Wait()
				if n := len(told); n != 1 || <-told != backend.ReasonSessionExpired {
					t.Errorf("the holder of another name was notified %d times", n)
				}
				if n := len(asked[*lockpb.Request_OpenSession](f)); n != 2 {
					t.Errorf("%d sessions were opened, want another one", n)
				}
			})
		})
	}
}

func TestWaiterQueuesAgainWhenItsSessionEnds(t *testing.T) {
	run(t, func(t *testing.T, f *fake, d *Driver) {
		f.plays(once[*lockpb.Request_Acquire](queuedReply()))
		o := acquire(t.Context(), d, waiting("x"))
		synctest.Wait()
		f.last().push(&lockpb.Reply{Answer: &lockpb.Reply_Lost{Lost: &lockpb.Lost{
			Session: asked[*lockpb.Request_Acquire](f)[0].Session, Reason: lockpb.Reason_REASON_SESSION_ENDED,
		}}})
		<-o.done
		if all := asked[*lockpb.Request_Acquire](f); o.err != nil || len(all) != 2 || string(all[0].Session) == string(all[1].Session) {
			t.Errorf("acquire: %v, by %v, want it asked for again in another session", o.err, all)
		}
	})
}

// Pushes get lost with their connection, or by a fault of the server, which the answer to the next keepalive shows.
func TestGrantThatNobodyHeardOfIsFound(t *testing.T) {
	alive := func(reply *lockpb.Reply) func(f *fake) {
		return func(f *fake) { f.plays(once[*lockpb.Request_KeepAlive](reply)) }
	}
	pushed := doneReply()
	pushed.Pushed = proto.Uint64(1)
	for name, during := range map[string]func(f *fake){
		"with the connection":               func(f *fake) { f.disconnect() },
		"on a good connection":              alive(pushed),
		"by a server that pushes to nobody": alive(errorReply(lockpb.Code_CODE_CONFLICT)),
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(t *testing.T, f *fake, d *Driver) {
				f.plays(once[*lockpb.Request_Acquire](queuedReply()))
				r := waiting("x")
				o := acquire(t.Context(), d, r)
				synctest.Wait()
				f.mu.Lock()
				f.holds["x"] = &lockpb.SessionEntry{Name: "x", RequestId: r.RequestID, Token: 5}
				f.mu.Unlock()
				during(f)
				<-o.done
				if o.err != nil || o.grant.Token != 5 || !o.grant.Queued {
					t.Errorf("the waiter has %+v, %v", o.grant, o.err)
				}
				if n := len(asked[*lockpb.Request_Attach](f)); n != 1 {
					t.Errorf("the driver asked %d times what hangs on the session", n)
				}
				if left := o.grant.SentAt.Add(d.Describe().Validity(ttl)).Sub(d.service.clock.Now()); left < ttl/3 {
					t.Errorf("the grant is valid for %v more", left)
				}
			})
		})
	}
}

// waiter starts an acquire that waits for x. leave ends its context, and returns once the acquire has.
func waiter(t *testing.T, d *Driver) (o *outcome, leave func()) {
	ctx, cancel := context.WithCancel(t.Context())
	o = acquire(ctx, d, waiting("x"))
	synctest.Wait()
	return o, func() { cancel(); <-o.done }
}

func TestWaiterThatLeftLeavesNothing(t *testing.T) {
	run(t, func(t *testing.T, f *fake, d *Driver) {
		f.plays(once[*lockpb.Request_Acquire](queuedReply()))
		o, leave := waiter(t, d)
		leave()
		if !errors.Is(o.err, context.Canceled) || errors.Is(o.err, backend.ErrUnknown) {
			t.Errorf("acquire: %v, want context.Canceled alone", o.err)
		}
		all := asked[*lockpb.Request_Release](f)
		if len(all) != 1 || all[0].GetRelease().Token != 0 || !all[0].GetRelease().Own ||
			all[0].GetRelease().RequestId != asked[*lockpb.Request_Acquire](f)[0].GetAcquire().RequestId {
			t.Errorf("the clean-up is %v", all)
		}
	})
}

// The driver releases the leftover of a waiter, and retries while the server cannot serve.
func TestLeftoverIsReleasedByABusyServer(t *testing.T) {
	run(t, func(t *testing.T, f *fake, d *Driver) {
		queued := once[*lockpb.Request_Acquire](queuedReply())
		busy := once[*lockpb.Request_Release](errorReply(lockpb.Code_CODE_UNAVAILABLE))
		f.plays(func(p *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
			if reply, answered := queued(p, q); answered {
				return reply, true
			}
			return busy(p, q)
		})
		_, leave := waiter(t, d)
		leave()
		time.Sleep(ttl / 2)
		synctest.Wait()
		if all := asked[*lockpb.Request_Release](f); len(all) != 2 || !proto.Equal(all[0].GetRelease(), all[1].GetRelease()) {
			t.Errorf("releases %v, want the same one twice", all)
		}
	})
}

// A cleanup that waits for the service ends with its session: the driver does not keep connecting without a caller.
func TestLeftoverEndsWithItsSession(t *testing.T) {
	run(t, func(t *testing.T, f *fake, d *Driver) {
		f.plays(once[*lockpb.Request_Acquire](queuedReply()))
		o, leave := waiter(t, d)
		f.change(func(f *fake) { f.refuses = true })
		f.disconnect()
		leave()
		if !errors.Is(o.err, context.Canceled) {
			t.Errorf("acquire that could not be taken back: %v", o.err)
		}
		time.Sleep(4 * ttl)
		synctest.Wait()
		d.service.mu.Lock()
		defer d.service.mu.Unlock()
		if d.service.waiting != 0 || len(d.service.sessions) != 0 {
			t.Errorf("%d steps and %d sessions are left", d.service.waiting, len(d.service.sessions))
		}
	})
}

// A caller may repeat an attempt without an answer, or release it: the driver only stops it and does not undo it.
func TestAttemptWithoutAnAnswerIsUnknown(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, f *fake, d *Driver) {
		take(t, d, request("warm"))
		f.plays(func(_ *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
			if q.GetAcquire() != nil {
				f.answer(q)
			}
			return nil, true
		})
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		r := request("x")
		_, err := d.Acquire(ctx, r)
		if !errors.Is(err, backend.ErrUnknown) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("acquire: %v, want ErrUnknown and the context's error", err)
		}
		f.plays(nil)
		time.Sleep(ttl / 2)
		if len(asked[*lockpb.Request_Release](f)) != 0 {
			t.Error("the hold was released before its caller could ask for it again")
		}
		if g := take(t, d, r); g.Token != 2 {
			t.Errorf("the same request again has token %v, want that of its hold", g.Token)
		}
		if err := d.Release(t.Context(), take(t, d, r)); err != nil {
			t.Errorf("release: %v", err)
		}
	})
}

// A hold in doubt that nobody claims or releases ends with its session, which the other holds leave.
func TestUnclaimedHoldEndsWithItsSession(t *testing.T) {
	for what, rs := range map[string][]backend.Request{"one": {request("x")}, "set": setOf(false, "x", "y")} {
		t.Run(what, func(t *testing.T) {
			run(t, func(t *testing.T, f *fake, d *Driver) {
				warm := take(t, d, request("warm"))
				f.plays(func(_ *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
					if q.GetAcquire() != nil || q.GetAcquireAll() != nil {
						f.answer(q)
					}
					return nil, true
				})
				ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
				defer cancel()
				_, _ = d.AcquireAll(ctx, rs)
				f.plays(func(_ *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
					if m := q.GetMove(); m != nil {
						return f.answer(&lockpb.Request{Call: &lockpb.Request_Acquire{
							Acquire: &lockpb.Acquire{Name: m.Name, RequestId: m.RequestId},
						}}), true
					}
					return nil, false
				})
				for range 12 {
					time.Sleep(ttl / 3)
					if r := d.Renew(t.Context(), []backend.Grant{warm})[0]; r.Err != nil {
						t.Fatal(r.Err)
					}
				}
				opened, closed := asked[*lockpb.Request_OpenSession](f), asked[*lockpb.Request_CloseSession](f)
				if len(opened) != 2 || len(closed) != 1 || string(closed[0].Session) != string(opened[0].Session) {
					t.Errorf("%d sessions were opened and %d closed, want that the first one ends", len(opened), len(closed))
				}
			})
		})
	}
}

func TestBusyServerIsAskedAgain(t *testing.T) {
	t.Parallel()
	for _, code := range []lockpb.Code{lockpb.Code_CODE_UNAVAILABLE, lockpb.Code_CODE_UNKNOWN} {
		t.Run(code.String(), func(t *testing.T) {
			run(t, func(t *testing.T, f *fake, d *Driver) {
				f.plays(once[*lockpb.Request_Acquire](errorReply(code)))
				g := take(t, d, request("x"))
				if all := asked[*lockpb.Request_Acquire](f); len(all) != 2 || all[0].GetAcquire().RequestId != all[1].GetAcquire().RequestId {
					t.Errorf("acquires %v, want the same one twice", all)
				}
				f.plays(once[*lockpb.Request_Release](errorReply(code)))
				if err := d.Release(t.Context(), g); err != nil {
					t.Errorf("release: %v", err)
				}
				if all := asked[*lockpb.Request_Release](f); len(all) != 2 || !proto.Equal(all[0].GetRelease(), all[1].GetRelease()) {
					t.Errorf("releases %v, want the same one twice", all)
				}
				f.plays(func(_ *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
					return errorReply(code), q.GetAcquire() != nil
				})
				want := map[lockpb.Code]error{
					lockpb.Code_CODE_UNAVAILABLE: backend.ErrUnavailable, lockpb.Code_CODE_UNKNOWN: backend.ErrUnknown,
				}[code]
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if _, err := d.Acquire(ctx, request("y")); !errors.Is(err, want) {
					t.Errorf("acquire from a server that stays so: %v, want %v", err, want)
				}
			})
		})
	}
}

func TestForceReleaseIsNotRepeated(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, f *fake, d *Driver) {
		f.plays(func(p *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
			if q.GetForceRelease() == nil {
				return nil, false
			}
			p.cancel()
			return nil, true
		})
		if err := d.ForceRelease(t.Context(), backend.ForceRequest{Name: "x", Reason: "why"}); !errors.Is(err, backend.ErrUnknown) {
			t.Errorf("force release with a lost answer: %v, want ErrUnknown", err)
		}
		if n := len(asked[*lockpb.Request_ForceRelease](f)); n != 1 {
			t.Errorf("it was sent %d times: the second one hits somebody else", n)
		}
	})
}

func TestServerThatIsNotDurable(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, f *fake, d *Driver) {
		f.change(func(f *fake) { f.welcome.Durable = false })
		client, err := fencelock.ForCorrectness(d, &fencelock.Options{TTL: ttl})
		if err != nil {
			t.Fatalf("before the first connection: %v", err)
		}
		if _, err := client.TryAcquire(t.Context(), "x"); !errors.Is(err, fencelock.ErrTier) {
			t.Errorf("acquire: %v, want ErrTier", err)
		}
		if err := client.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if n := len(asked[*lockpb.Request_Release](f)); n != 1 {
			t.Errorf("the hold without a token was released %d times", n)
		}
	})
	run(t, func(t *testing.T, f *fake, d *Driver) {
		f.change(func(f *fake) { f.welcome.Durable = false })
		if err := d.Ping(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := fencelock.ForCorrectness(d, nil); !errors.Is(err, fencelock.ErrTier) {
			t.Errorf("after the probe: %v, want ErrTier", err)
		}
		if g := take(t, d, request("x")); g.Token != 0 || g.Incarnation == "" {
			t.Errorf("the grant %+v has a token, or nothing distinguishes it from others", g)
		}
	})
}

func TestAnotherClusterIsRefused(t *testing.T) {
	run(t, func(t *testing.T, f *fake, d *Driver) {
		take(t, d, request("x"))
		f.change(func(f *fake) { f.welcome.ClusterId = "made anew" })
		f.disconnect()
		synctest.Wait()
		if _, err := d.Acquire(t.Context(), request("y")); !errors.Is(err, backend.ErrHistoryLost) || errors.Is(err, backend.ErrUnknown) {
			t.Errorf("acquire from another cluster: %v, want ErrHistoryLost", err)
		}
	})
	run(t, func(t *testing.T, f *fake, d *Driver) {
		f.change(func(f *fake) { f.welcome.Protocol = 99 })
		if err := d.Ping(t.Context()); !errors.Is(err, backend.ErrMisconfigured) {
			t.Errorf("ping of another protocol: %v, want ErrMisconfigured", err)
		}
	})
}

func TestCloseEndsTheSessions(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, f *fake, d *Driver) {
		long := request("x")
		long.TTL = time.Minute
		take(t, d, request("y"))
		take(t, d, long)
		if err := d.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if n := len(asked[*lockpb.Request_CloseSession](f)); n != 2 {
			t.Errorf("%d of 2 sessions were closed", n)
		}
	})
}

func TestIdleSessionEnds(t *testing.T) {
	run(t, func(t *testing.T, f *fake, d *Driver) {
		if err := d.Release(t.Context(), take(t, d, request("x"))); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * ttl)
		synctest.Wait()
		if n := len(asked[*lockpb.Request_CloseSession](f)); n != 1 {
			t.Errorf("a session that nobody uses was closed %d times", n)
		}
		take(t, d, request("x"))
	})
}

// The server lists a session with many holds in pages.
func TestPagesOfASession(t *testing.T) {
	run(t, func(t *testing.T, f *fake, d *Driver) {
		lost := map[string]int{}
		for _, name := range []string{"a", "b", "c"} {
			r := request(name)
			r.Lost = func(backend.Loss) { lost[name]++ }
			take(t, d, r)
		}
		f.plays(func(_ *peer, q *lockpb.Request) (*lockpb.Reply, bool) {
			if q.GetAttach() == nil {
				return nil, false
			}
			page := map[string]string{"": "a", "a": "c"}[q.GetAttach().After]
			s := &lockpb.SessionState{Holds: []*lockpb.SessionEntry{f.holds[page]}}
			if page == "a" {
				s.NextAfter = "a"
			}
			return stateReply(s), true
		})
		f.disconnect()
		time.Sleep(time.Second)
		synctest.Wait()
		if len(lost) != 1 || lost["b"] != 1 {
			t.Errorf("notified of the loss of %v, want of b once", lost)
		}
	})
}

// A request that cannot be sent is refused before it breaks the shared connection.
func TestInvalidRequestIsRefusedBeforeSending(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, f *fake, d *Driver) {
		g := take(t, d, request("x"))
		for what, c := range map[string]struct {
			change func(*backend.Request)
			want   error
		}{
			"name":       {func(r *backend.Request) { r.Name = "\xff" }, backend.ErrInvalidName},
			"request id": {func(r *backend.Request) { r.RequestID = "\xff" }, backend.ErrInvalidOption},
			"owner":      {func(r *backend.Request) { r.Owner = "\xff" }, backend.ErrInvalidOption},
			"metadata":   {func(r *backend.Request) { r.Metadata = map[string]string{"\xff": ""} }, backend.ErrInvalidOption},
			"size": {func(r *backend.Request) {
				r.Metadata = map[string]string{"much": strings.Repeat("x", 1<<20)}
			}, backend.ErrInvalidOption},
		} {
			r := request("y")
			c.change(&r)
			if _, err := d.Acquire(t.Context(), r); !errors.Is(err, c.want) {
				t.Errorf("acquire with an unfit %s: %v, want %v", what, err, c.want)
			}
		}
		if err := d.ForceRelease(t.Context(), backend.ForceRequest{Name: "x", Reason: "\xff"}); !errors.Is(err, backend.ErrInvalidOption) {
			t.Errorf("force release with an unfit reason: %v, want ErrInvalidOption", err)
		}
		if n := len(f.peers); n != 1 {
			t.Errorf("%d connections, want the first one only", n)
		}
		if err := d.Release(t.Context(), g); err != nil {
			t.Errorf("release: %v", err)
		}
	})
}
