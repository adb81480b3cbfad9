package zookeeper_test

import (
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/testtier"
)

// TestObserver: a client of a server without a vote keeps its locks and hands them over; when that server is cut off
// from the others, it believes no longer than its session lasts.
func TestObserver(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	ensemble := containers.ZooKeeperCluster(t, containers.LastObserves())
	const observer = containers.Nodes - 1
	client := func(node int) *fencelock.Client {
		c, err := fencelock.ForCorrectness(driver(t, ensemble.Endpoints()[node]), &fencelock.Options{
			TTL: 10 * containers.ZooKeeperTick, // a machine that stands still for less loses nothing
		})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	observing, voting := client(observer), client(0)
	lease, err := observing.Acquire(soon(t, 30*time.Second), "observed")
	if err != nil {
		t.Fatal(err)
	}
	if got := observing.Describe().Exclusion; got != backend.ExclusionQuorum {
		t.Errorf("two servers that vote and an observer have the exclusion %v", got)
	}
	rival := make(chan error, 1)
	acquire := func() {
		second, err := voting.Acquire(soon(t, time.Minute), "observed")
		if err == nil && lease.Err() == nil {
			t.Error("the rival holds, and the holder believes")
		}
		if err == nil {
			err = second.Release(soon(t, 20*time.Second))
		}
		rival <- err
	}
	for first := lease.Deadline(); !lease.Deadline().After(first.Add(10 * containers.ZooKeeperTick)); {
		if err := lease.Err(); err != nil {
			t.Fatalf("the hold through the observer: %v", err)
		}
		time.Sleep(10 * time.Millisecond) // no event announces a renewal
	}
	go acquire()
	if err := lease.Release(soon(t, 20*time.Second)); err != nil {
		t.Fatal(err)
	}
	if err := <-rival; err != nil {
		t.Fatalf("the rival, after a release: %v", err)
	}

	if lease, err = observing.Acquire(soon(t, 30*time.Second), "observed"); err != nil {
		t.Fatal(err)
	}
	ensemble.Isolate(observer)
	acquire()
	if err := <-rival; err != nil {
		t.Fatalf("the rival, after the observer was cut off: %v", err)
	}
	ensemble.Heal()
	if lease, err = observing.Acquire(soon(t, time.Minute), "observed"); err != nil {
		t.Fatalf("after the observer is back: %v", err)
	}
	if err := lease.Release(soon(t, 20*time.Second)); err != nil {
		t.Error(err)
	}
}
