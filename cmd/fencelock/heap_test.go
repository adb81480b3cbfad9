package main

import (
	"runtime"
	"testing"
	"time"
)

func TestPercentForLiveBytes(t *testing.T) {
	t.Parallel()
	for live, want := range map[uint64]int{
		0: 6300, 1 << 20: 6300, 4 << 20: 1500, 32 << 20: 100, 40 << 20: 60, 64 << 20: 60, 1 << 40: 60,
	} {
		if got := percentFor(live); got != want {
			t.Errorf("percentFor(%d) = %d, want %d", live, got, want)
		}
	}
}

func TestAfterCollectionRepeats(t *testing.T) {
	t.Parallel()
	called := make(chan struct{}, 100)
	afterCollection(func() {
		select {
		case called <- struct{}{}:
		default:
		}
	})
	for range 3 {
		runtime.GC()
		select {
		case <-called:
		case <-time.After(patience):
			t.Fatal("not called after a collection")
		}
	}
}
