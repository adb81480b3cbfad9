package engine_test

import (
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/backend/engine"
)

// Two exchanges are in progress before steps wait. Waiting steps go together, one step of each name and no more than
// the service allows, and an exchange without an answer delays other steps only briefly.
func TestBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex // protects the following field
		var sent [][]string
		b := engine.NewBatch(3, func(steps []string) []string {
			mu.Lock()
			sent = append(sent, slices.Clone(steps))
			first := len(sent) == 1
			mu.Unlock()
			if time.Sleep(10 * time.Millisecond); first {
				time.Sleep(time.Second)
			}
			return steps
		})
		var all sync.WaitGroup
		for i, name := range []string{"a", "b", "c", "c", "d", "e", "f"} {
			all.Go(func() {
				if step := name + strconv.Itoa(i); <-b.Send(name, step) != step {
					t.Errorf("the answer of %s is that of another step", step)
				}
			})
			synctest.Wait()
		}
		began := time.Now()
		time.Sleep(500 * time.Millisecond)
		mu.Lock()
		got := slices.Clone(sent)
		mu.Unlock()
		want := [][]string{{"a0"}, {"b1"}, {"c2", "d4", "e5"}, {"c3", "f6"}}
		if !slices.EqualFunc(got, want, slices.Equal[[]string]) {
			t.Errorf("%v were sent within %v, want %v", got, time.Since(began), want)
		}
		all.Wait()
	})
}

// A service that allows fewer steps in an exchange gets more exchanges.
func TestBatchOfFewSteps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const steps = 64
		b := engine.NewBatch(60, func(steps []string) []string {
			time.Sleep(10 * time.Millisecond)
			return steps
		})
		b.Limit(1)
		began := time.Now()
		var all sync.WaitGroup
		for i := range steps {
			all.Go(func() { <-b.Send(strconv.Itoa(i), "") })
		}
		all.Wait()
		if took := time.Since(began); took > 100*time.Millisecond {
			t.Errorf("%d steps took %v", steps, took)
		}
	})
}
