package builtin_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/server"
	"github.com/fencelock/fencelock/internal/testcert"
	"github.com/fencelock/fencelock/internal/testtier"
)

// TestConformance runs the suite on one durable server. New dials a server in a separate process, which the suite kills
// and pauses. Attach is a client in the server's process that needs no socket; its clients behind a link have a socket.
func TestConformance(t *testing.T) {
	t.Parallel()
	t.Run("New", func(t *testing.T) {
		t.Parallel()
		conformance.Run(t, harnessOf(t, startProcesses(t, 1)))
	})
	t.Run("Attach", func(t *testing.T) {
		testtier.NotShort(t)
		t.Parallel()
		n := startNode(t)
		h := harness(newAdmin(t, n.addr()))
		h.New = func(testing.TB) backend.Driver { return builtin.Attach(n.attach, nil) }
		h.Principal = "process:"
		h.Linked = func(t testing.TB) (backend.Driver, fault.Link) {
			return linked(t, n.addr())
		}
		h.Server.Restart = func(t testing.TB) { n.stop(t); n.start(t) }
		h.Server.Stop, h.Server.Start = n.stop, n.start
		h.Server.Pause, h.Server.Resume = n.freeze, n.thaw
		conformance.Run(t, h, testtier.Some(t, "waiting", "cancellation", "capabilities")...)
	})
}

// TestConformanceWithCertificates runs the clauses about the identity of callers, on a server that asks for
// certificates.
func TestConformanceWithCertificates(t *testing.T) {
	t.Parallel()
	authority := testcert.New(t)
	s, err := server.Start(t.Context(), server.Config{
		DataDir: t.TempDir(), Listen: "127.0.0.1:0", TLS: authority.Server(t, "locks.test"), MinTTL: 100 * time.Millisecond,
		Log: quiet(t),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close(context.Background()) })
	pair, err := tls.LoadX509KeyPair(authority.Sign(t, "ops.test"))
	if err != nil {
		t.Fatal(err)
	}
	ca, err := os.ReadFile(authority.File)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	config := &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}, ServerName: "locks.test"}
	shown := func() *builtin.Driver {
		return builtin.New([]string{s.Addr().String()}, &builtin.Options{TLS: config})
	}
	a := admin{shown()}
	t.Cleanup(func() { _ = a.driver.Close(context.Background()) })
	h := harness(a)
	h.Principal = "cert:ops.test"
	h.New = func(testing.TB) backend.Driver { return shown() }
	h.Linked = func(t testing.TB) (backend.Driver, fault.Link) { return linkedBy(t, config, s.Addr().String()) }
	conformance.Run(t, h, "capabilities")
}

// TestConformanceAsPermits runs the suite with two of three permits as a mutex: two such holds do not fit.
func TestConformanceAsPermits(t *testing.T) {
	testtier.Only(t)
	t.Parallel()
	conformance.Run(t, conformance.AsPermits(harnessOf(t, startProcesses(t, 1)), 2, 3))
}

// TestConformanceCluster runs the suite on three members, all of which end when the suite stops the service.
// TestClusterFaults covers failures of single members.
func TestConformanceCluster(t *testing.T) {
	testtier.Only(t)
	t.Parallel()
	conformance.Run(t, harnessOf(t, startProcesses(t, 3)))
}

func harnessOf(t *testing.T, p *processes) conformance.Harness {
	h := harness(newAdmin(t, p.addrs()...))
	h.New = func(t testing.TB) backend.Driver { return open(t, p.addrs()...) }
	h.Linked = func(t testing.TB) (backend.Driver, fault.Link) { return linked(t, p.addrs()...) }
	h.Server.Restart = func(t testing.TB) { p.stopAll(t); p.startAll(t) }
	h.Server.Stop, h.Server.Start = p.stopAll, p.startAll
	h.Server.Pause = func(t testing.TB) { t.Helper(); p.each(t, p.pause) }
	h.Server.Resume = func(t testing.TB) { t.Helper(); p.each(t, p.resume) }
	return h
}

// harness returns the common part of all configurations.
func harness(a admin) conformance.Harness {
	return conformance.Harness{
		Server: conformance.Server{
			Evict: a.evict,
			Wipe:  a.wipe,
			// Places in queues are part of the replicated state, and no operator can delete a single one.
			EvictWaiter: func(testing.TB, string) int { return 0 },
			Compact:     a.compact,

			RefuseRelease: refusesNothing, RefuseWrites: refusesNothing, // see TestConformanceWithTokens
		},
		Leftovers: a.leftovers, Principal: "address:127.0.0.1",
		TTL:     2 * time.Second, // of which the driver's patience with a server is a quarter
		Intrude: a.intrude,
	}
}

// evict force-releases name: the service loses a hold of a live session in no other way.
func (a admin) evict(t testing.TB, name string) {
	t.Helper()
	within(t, func(ctx context.Context) error {
		if err := a.driver.ForceRelease(ctx, backend.ForceRequest{Name: name, Reason: "evicted"}); !errors.Is(err, backend.ErrNotHeld) {
			return err
		}
		return nil
	})
}

// wipe force-releases all names.
func (a admin) wipe(t testing.TB) {
	t.Helper()
	within(t, func(ctx context.Context) error {
		for info, err := range a.driver.List(ctx, "") {
			if err != nil {
				return err
			}
			if err := a.driver.ForceRelease(ctx, backend.ForceRequest{Name: info.Name, Reason: "wiped"}); err != nil && !errors.Is(err, backend.ErrNotHeld) {
				return err
			}
		}
		return nil
	})
}

// compact makes events until the server forgets the earlier ones: it keeps a fixed number. On a slow machine that
// takes minutes, so each round has a separate timeout.
func (a admin) compact(t testing.TB, _ string) {
	t.Helper()
	var since uint64
	within(t, func(ctx context.Context) error {
		state, err := a.driver.Look(ctx, "compaction")
		since = state.Revision
		return err
	})
	for done := false; !done; {
		within(t, func(ctx context.Context) (err error) {
			if err = a.churn(ctx, 1600); err == nil {
				done, err = a.compacted(ctx, since)
			}
			return err
		})
	}
}

// churn takes and releases n locks.
func (a admin) churn(ctx context.Context, n int) error {
	var all sync.WaitGroup
	errs := make([]error, 16)
	for i := range errs {
		all.Go(func() {
			for range n / len(errs) {
				r := backend.Request{
					Name: fmt.Sprintf("compaction/%d", i), Owner: "compaction", RequestID: backend.NewRequestID(), TTL: time.Minute,
				}
				g, err := a.driver.Acquire(ctx, r)
				if err == nil {
					err = a.driver.Release(ctx, g)
				}
				if err != nil {
					errs[i] = err
					return
				}
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// compacted reports whether the server has forgotten the events after a revision.
func (a admin) compacted(ctx context.Context, since uint64) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	for _, err := range a.driver.Watch(ctx, "compaction", since) {
		if errors.Is(err, backend.ErrCompacted) {
			return true, nil
		} else if ctx.Err() == nil {
			return false, err
		}
	}
	return false, nil
}

// leftovers lists holds, waiters and open sessions.
func (a admin) leftovers() ([]string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var left []string
	for info, err := range a.driver.List(ctx, "") {
		if err != nil {
			return nil, err
		}
		left = append(left, fmt.Sprintf("%s held by %v", info.Name, info.Holders))
	}
	return left, nil
}

// intrude takes the locks beside name, as other programs may.
func (a admin) intrude(t testing.TB, name string) {}
