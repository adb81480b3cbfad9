package backend

import (
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The clock is CLOCK_BOOTTIME: never ahead of it, and never behind by more than a pause between two readings.
func TestSystemClockIsBootTime(t *testing.T) {
	for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); {
		now := systemNow()
		var ts unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
			t.Fatal(err)
		}
		if now > Instant(ts.Nano()) {
			t.Fatalf("%d is ahead of the boot clock's %d", now, ts.Nano())
		}
	}
}

// A suspension shows as a jump of the wall clock against the monotonic one. Here what was known is made wrong instead.
func TestSystemClockNoticesSuspension(t *testing.T) {
	real := systemNow()
	asking.Lock()
	known := *bootSkew.Load()
	suspended := known
	suspended.skew -= time.Hour // as it was before an hour's suspension
	suspended.drift -= time.Hour
	bootSkew.Store(&suspended)
	asking.Unlock()
	if now := systemNow(); now < real {
		t.Errorf("after the suspension the clock says %v before what it said", real.Sub(now))
	}
}

func TestSystemClockIsMonotone(t *testing.T) {
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			last := systemNow()
			for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); {
				now := systemNow()
				if now < last {
					t.Errorf("the clock ran backwards by %v", last.Sub(now))
					return
				}
				last = now
			}
		})
	}
	all.Wait()
}

func BenchmarkSystemClock(b *testing.B) {
	for b.Loop() {
		systemNow()
	}
}
