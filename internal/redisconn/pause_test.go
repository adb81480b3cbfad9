package redisconn

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

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
