package main

import (
	"context"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
)

// ours is the name of the row that the targets are for.
const ours = "fencelock"

// ourRenewal is a third of the validity.
func ourRenewal(ttl time.Duration) time.Duration { return backend.Description{}.Validity(ttl) / 3 }

// ourClient is a fencelock client on any driver: what is measured is what users call.
type ourClient struct {
	c     *fencelock.Client
	d     backend.Driver
	after func() // closes what the driver does not own
}

func newOurs(d backend.Driver, ttl time.Duration, after func()) (client, error) {
	c, err := fencelock.ForEfficiency(d, &fencelock.Options{TTL: ttl})
	if err != nil {
		after()
		return nil, err
	}
	return ourClient{c, d, after}, nil
}

func (c ourClient) lock(ctx context.Context, name string) (hold, error) {
	l, err := c.c.Acquire(ctx, name)
	if err != nil {
		return nil, err
	}
	return ourHold{l}, nil
}

func (c ourClient) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_ = c.c.Close(ctx) // a cut link makes it fail, on purpose
	c.after()
}

type ourHold struct{ l *fencelock.Lease }

func (h ourHold) unlock(ctx context.Context) error { return h.l.Release(ctx) }
func (h ourHold) lost() <-chan struct{}            { return h.l.Context().Done() }
