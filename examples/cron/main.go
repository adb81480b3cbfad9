// Command cron runs a job on one of all the replicas that start it for the same minute, and exits.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"time"

	"github.com/fencelock/fencelock"
	_ "github.com/fencelock/fencelock/backend/memory" // memory://, in this process, to try it out
	_ "github.com/fencelock/fencelock/redis"          // redis://: the driver of your lock service
)

func main() {
	url := flag.String("backend", "memory://", "`URL` of the lock service, such as redis://127.0.0.1:6379")
	flag.Parse()
	ctx := context.Background()
	locks, err := fencelock.Open(ctx, *url, fencelock.Efficiency, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close(ctx)
	if err := runOnce(ctx, locks, time.Now().Truncate(time.Minute)); err != nil {
		log.Print(err)
	}
}

// runOnce runs the due job, unless another replica runs it or has run it.
func runOnce(ctx context.Context, locks *fencelock.Client, due time.Time) error {
	// The name contains the time at which the job is due, so the next run is another lock. HoldAtLeast keeps the name
	// closed after a short job: it must exceed the difference between the replicas' clocks.
	lease, err := locks.TryAcquire(ctx, "reports/"+due.Format(time.RFC3339), fencelock.HoldAtLeast(5*time.Minute))
	if errors.Is(err, fencelock.ErrHeld) {
		return nil
	}
	if err != nil {
		return err
	}
	return errors.Join(report(lease.Context(), due), lease.Release(ctx))
}

// report is the job. Its context ends if the lock is lost.
func report(ctx context.Context, due time.Time) error {
	fmt.Println("report of", due.Format(time.TimeOnly))
	return ctx.Err()
}
