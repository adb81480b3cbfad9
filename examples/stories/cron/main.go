// Command cron runs a job on one of all replicas that wake up at the same minute.
//
//	go run ./examples/stories/cron
//	go run ./examples/stories/cron -unsafe
//
// Tier: efficiency. A report sent twice is a nuisance and no damage, so any driver with HoldAtLeast will do,
// Redis among them. If a double run did damage, money paid out for example, this would be a case for the correctness
// tier and a guard where the money is.
//
// The job takes less time than the clocks of the replicas differ. A lock released at the end of the job is free when a
// replica with a slow clock wakes up, and the job runs once more. HoldAtLeast keeps the name closed after
// the release, and also if the replica dies. The name has the time at which the job was due, so that the next run is
// another lock; the hold need only be longer than clocks differ and replicas sleep. With a name alone it would have to
// be shorter than a period.
//
// With -unsafe HoldAtLeast is left out: every replica sends the report.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
)

const (
	runs     = 2
	replicas = 3
)

func main() { story.Main(tell) }

func tell(ctx context.Context, s *story.Story) error {
	var all []*replica
	for i := range replicas {
		locks, err := s.Open(ctx, fencelock.Efficiency, fmt.Sprintf("replica-%d", i))
		if err != nil {
			return err
		}
		all = append(all, &replica{story: s, number: i, locks: locks})
	}
	due := time.Date(2026, 1, 2, 3, 0, 0, 0, time.UTC)
	for range runs {
		s.Tell("the report of %s is due; the clocks of the replicas differ by more than the job takes",
			due.Format(time.TimeOnly))
		for _, r := range all { // one after the other: the first is done before the next one's clock strikes
			if err := r.wake(ctx, due); err != nil {
				return fmt.Errorf("replica %d: %w", r.number, err)
			}
		}
		due = due.Add(time.Minute)
	}

	sent := 0
	for _, r := range all {
		sent += r.sent
	}
	want, comment := runs, "one for each time that it was due"
	if s.Unsafe {
		want, comment = runs*replicas, "every replica found the lock free, in turn"
	}
	if sent != want {
		return fmt.Errorf("%d reports were sent; want %d", sent, want)
	}
	s.Tell("%d reports were sent: %s", sent, comment)
	return nil
}

type replica struct {
	story  *story.Story
	number int
	locks  *fencelock.Client
	sent   int
}

// wake is called when the replica's clock says that the report is due.
func (r *replica) wake(ctx context.Context, due time.Time) error {
	opts := []fencelock.AcquireOption{fencelock.HoldAtLeast(10 * time.Minute)}
	if r.story.Unsafe {
		opts = nil
	}
	lease, err := r.locks.TryAcquire(ctx, "cron/report/"+due.Format(time.RFC3339), opts...)
	if errors.Is(err, fencelock.ErrHeld) {
		r.story.Tell("  replica %d: somebody else is on it, or was", r.number)
		return nil
	}
	if err != nil {
		return err // errors.ErrUnsupported: this driver has no HoldAtLeast
	}
	r.story.Tell("  replica %d sends it", r.number)
	// Do would do the same, but it waits; here nobody waits.
	return errors.Join(r.send(due), lease.Release(ctx))
}

// send is the job: one more line in a file.
func (r *replica) send(due time.Time) (err error) {
	f, err := os.OpenFile(filepath.Join(r.story.Dir, "sent.txt"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	r.sent++
	_, err = fmt.Fprintf(f, "%s by replica %d\n", due.Format(time.TimeOnly), r.number)
	return err
}
