package lockers

import (
	"context"
	"time"

	"github.com/go-co-op/gocron/v2"

	"github.com/fencelock/fencelock"
)

// Gocron lets one of several schedulers run each job. Who does not get the lock does not run it.
//
//	s, err := gocron.NewScheduler(gocron.WithDistributedLocker(lockers.NewGocron(locks, time.Minute)))
//	_, err = s.NewJob(gocron.CronJob("0 3 * * *", false), task, gocron.WithName("nightly"))
//
// Jobs need a name, the same in all processes: it is the lock's, behind "cron/".
type Gocron struct {
	locks fencelock.Locker
	least time.Duration
}

// NewGocron returns a locker for schedulers. A job that ends at once stays locked for least, so that a scheduler with a
// clock a little behind does not repeat it: longer than the clocks differ, shorter than the job's interval.
func NewGocron(locks fencelock.Locker, least time.Duration) *Gocron { return &Gocron{locks, least} }

// Lock implements gocron.Locker. The error of the second scheduler wraps fencelock.ErrHeld.
func (g *Gocron) Lock(ctx context.Context, key string) (gocron.Lock, error) {
	lease, err := g.locks.TryAcquire(ctx, "cron/"+key, fencelock.HoldAtLeast(g.least))
	if err != nil {
		return nil, err
	}
	return job{lease}, nil
}

type job struct{ lease *fencelock.Lease }

func (j job) Unlock(ctx context.Context) error { return j.lease.Release(ctx) }
