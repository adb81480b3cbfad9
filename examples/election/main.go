// Command election runs a scheduler on one of all replicas, and on another one if that fails.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/fencelock/fencelock"
	_ "github.com/fencelock/fencelock/backend/memory" // memory://, in this process, to try it out
	_ "github.com/fencelock/fencelock/etcd"           // etcd://: the driver of your lock service
	"github.com/fencelock/fencelock/fencing"
)

func main() {
	url := flag.String("backend", "memory://", "`URL` of the lock service, such as etcd://127.0.0.1:2379")
	jobs := flag.Int("jobs", 3, "how many jobs to schedule; 0: until a signal")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	locks, err := fencelock.Open(ctx, *url, fencelock.Correctness, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close(ctx)
	// Lead stands for election again after a loss. It returns when the function returns or ctx ends.
	err = locks.Lead(ctx, "scheduler", func(ctx context.Context, lease *fencelock.Lease) error {
		for n := 1; n <= *jobs || *jobs == 0; n++ {
			if err := schedule(ctx, lease.Claim("jobs"), n); err != nil {
				return err
			}
			select {
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done(): // before another replica can lead
				return ctx.Err()
			}
		}
		return nil
	})
	if err != nil {
		log.Print(err)
	}
}

var guard fencing.Memory // stands for a guard of the database that all leaders write to, such as sqlguard.Guard

// schedule writes a job. The claim contains the leader's term: a leader that was paused is refused with ErrStale.
func schedule(ctx context.Context, term fencing.Claim, n int) error {
	return guard.Do(ctx, term, func() error {
		fmt.Println("term", term.Token, "schedules job", n)
		return nil
	})
}
