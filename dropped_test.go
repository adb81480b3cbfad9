package fencelock

import (
	"errors"
	"strconv"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

// Beyond maxCleanJobs the oldest release is dropped, and the latest is kept.
func TestTheOldestReleaseIsDropped(t *testing.T) {
	c, err := ForEfficiency(memory.New(nil), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(endedContext())
	var jobs []*cleanJob
	for i := range maxCleanJobs + 2 {
		g := backend.Grant{Name: strconv.Itoa(i), RequestID: backend.NewRequestID(), TTL: time.Minute}
		jobs = append(jobs, c.cleaner.add(t.Context(), g, maybeInFlight, time.Hour))
	}
	for i, job := range jobs {
		select {
		case <-job.done:
			if i >= 2 || !errors.Is(job.err, errTooManyCleans) {
				t.Fatalf("release %d of %d has ended with %v, want the two oldest dropped", i, len(jobs), job.err)
			}
		default:
			if i < 2 {
				t.Errorf("release %d of %d waits, want it dropped", i, len(jobs))
			}
		}
	}
}
