package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/internal/gateway"
)

// dropping is a service that ties holds to sessions, and loses its connections a time after a wait has begun.
type dropping struct {
	backend.Driver
	after time.Duration
}

func (d dropping) Describe() backend.Description {
	about := d.Driver.Describe()
	about.KeepsHolds = true
	return about
}

func (d dropping) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	if !r.Wait {
		return d.Driver.Acquire(ctx, r)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, d.after, backend.ErrUnavailable)
	defer cancel()
	grant, err := d.Driver.Acquire(ctx, r)
	if err != nil && errors.Is(context.Cause(ctx), backend.ErrUnavailable) {
		err = backend.ErrUnavailable
	}
	return grant, err
}

// However many times the service fails meanwhile, a replica waits for --replica-wait in all.
func TestReplicaWaitOverFailures(t *testing.T) {
	t.Parallel()
	const wait, after = 30 * time.Second, 8 * time.Second
	store := make(chan *memory.Store, 1)
	backend.Register("dropping", func(context.Context, string) (backend.Driver, error) {
		s := <-store
		store <- s
		return dropping{s.Driver(), after}, nil
	})
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore(&memory.Options{Clock: backend.GoClock()})
		store <- s
		other, err := fencelock.ForCorrectness(s.Driver(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close(context.Background())
		if _, err := other.Acquire(t.Context(), gateway.ReplicaLock); err != nil {
			t.Fatal(err)
		}
		settings := &gatewaySettings{
			backend: "dropping://here", tier: fencelock.Efficiency, log: slog.New(slog.DiscardHandler),
			patience: replicaPatience{wait: wait}, door: door{addr: &net.TCPAddr{}},
		}
		began, failures := time.Now(), 0
		_, err = settings.connect(t.Context(), func(err error) {
			if errors.Is(err, backend.ErrUnavailable) {
				failures++
			}
		})
		var refused *replicaError
		if !errors.As(err, &refused) || refused.wait != wait {
			t.Errorf("connect: %v", err)
		}
		if failures < 2 {
			t.Errorf("the service failed %d times", failures)
		}
		if took := time.Since(began); took < wait || took > wait+maxConnectPause+time.Second {
			t.Errorf("waited for %v, want %v", took, wait)
		}
	})
}
