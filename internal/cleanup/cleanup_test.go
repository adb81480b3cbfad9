package cleanup

import (
	"context"
	"errors"
	"strconv"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// Beyond its bound the oldest release is dropped, and the latest is kept.
func TestTheOldestReleaseIsDropped(t *testing.T) {
	var c Cleaner
	const most = 1000
	c.Init(most, backend.SystemClock(), func(context.Context, backend.Grant) error { return nil },
		func(context.Context, *backend.Grant, error) {})
	defer c.Close(t.Context())
	var jobs []*Job
	for i := range most + 2 {
		g := backend.Grant{Name: strconv.Itoa(i), RequestID: backend.NewRequestID(), TTL: time.Minute}
		jobs = append(jobs, c.Add(t.Context(), g, InFlight, time.Hour))
	}
	for i, job := range jobs {
		select {
		case <-job.Done:
			if i >= 2 || !errors.Is(job.err, errTooMany) {
				t.Fatalf("release %d of %d has ended with %v, want the two oldest dropped", i, len(jobs), job.err)
			}
		default:
			if i < 2 {
				t.Errorf("release %d of %d waits, want it dropped", i, len(jobs))
			}
		}
	}
}
