package serverfault

import (
	"testing"
	"time"
)

func TestClockJumpsInItsDateAlone(t *testing.T) {
	noticed := 0
	c := Clock{Noticed: func() { noticed++ }}
	for _, d := range []time.Duration{0, time.Hour, -time.Hour, -365 * 24 * time.Hour, time.Minute} {
		before := c.Now()
		c.Jump(d)
		after := c.Now()
		if passed := after.Sub(before); passed < 0 || passed > time.Minute {
			t.Errorf("jump by %v: %v passed", d, passed)
		}
		// Without the monotonic part the date is all there is.
		if passed := after.Round(0).Sub(before.Round(0)) - d; passed < -time.Second || passed > time.Minute {
			t.Errorf("jump by %v: the date is off by %v more", d, passed)
		}
	}
	if noticed != 5 {
		t.Errorf("5 jumps were noticed %d times", noticed)
	}
}
