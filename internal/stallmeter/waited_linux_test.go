package stallmeter

import (
	"errors"
	"runtime"
	"testing"
	"time"
)

// What the host takes and what a disk holds up count, in the units of the kernel.
func TestStolenAndBlockedTimeCounts(t *testing.T) {
	stat := "cpu  164723 0 48366 67599 3486 0 3606 1966 0 0\ncpu0 82363 0 23391 35820 803 0 1625 936 0 0\n"
	if got, want := stolen([]byte(stat), nil), 19660*time.Millisecond/time.Duration(runtime.NumCPU()); got != want {
		t.Errorf("stolen = %v, want %v", got, want)
	}
	pressure := "some avg10=6.68 avg60=9.14 avg300=7.49 total=71837160\nfull avg10=0.19 avg60=0.65 avg300=1.38 total=22079721\n"
	if got, want := pressed([]byte(pressure), nil), 22079721*time.Microsecond; got != want {
		t.Errorf("pressed = %v, want %v", got, want)
	}
	for _, text := range []string{"", "cpu 1 2 3", "full", "some avg10=0.00 total=7"} {
		if stolen([]byte(text), nil) != 0 || pressed([]byte(text), nil) != 0 {
			t.Errorf("%q says that the machine stood still", text)
		}
	}
	if err := errors.New("no such file"); stolen([]byte(stat), err) != 0 || pressed([]byte(pressure), err) != 0 {
		t.Error("a file that cannot be read says that the machine stood still")
	}
}
