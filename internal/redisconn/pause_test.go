package redisconn

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// However the end of the context falls between two tries, the answer is why they failed.
func TestBeginTellsTheFaultAndNotTheTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refused := &Failure{Cause: errors.New("refused")}
		for limit := range 200 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(limit+1)*time.Millisecond)
			calls := 0
			err := begin(ctx, true, func(ctx context.Context) error {
				calls++
				time.Sleep(5 * time.Millisecond) // a try that does not look at its context
				if calls > 1 && ctx.Err() != nil {
					return &Failure{Cause: ctx.Err(), Fatal: true}
				}
				return refused
			})
			cancel()
			if !errors.Is(err, refused) {
				t.Errorf("with a limit of %d ms: %v after %d calls, want the fault", limit+1, err, calls)
			}
		}
	})
}

func TestPauseEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 25*time.Millisecond)
		defer cancel()
		if PauseFor(ctx, 10*time.Millisecond) || time.Since(began) != 25*time.Millisecond {
			t.Errorf("a pause that leaves no time for a try ended after %v", time.Since(began))
		}
		if !PauseFor(t.Context(), 10*time.Millisecond) {
			t.Error("a pause that nothing ends was cut short")
		}
	})
}
