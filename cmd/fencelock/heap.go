package main

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

const (
	// leastHeap is how large the heap of a server may grow before it is collected, in bytes.
	leastHeap = 64 << 20
	// growth is how much a larger heap grows between two collections, in percent of what lives. Go's own 100 keeps as
	// much again for every lock that is held; at 60 the collector marks 1.7 times as often.
	growth = 60
)

// steadyHeap lets a small heap grow to leastHeap before each collection. A server that holds few locks has some
// megabytes that live, and would otherwise collect them a hundred times a second under load, which takes a good part of
// its time. Where more lives, the heap grows by a fixed share, so the memory that a lock takes stays the same. Who sets
// GOGC or GOMEMLIMIT decides alone.
func steadyHeap() {
	if os.Getenv("GOGC") != "" || os.Getenv("GOMEMLIMIT") != "" {
		return
	}
	debug.SetGCPercent(percentFor(liveHeap()))
	afterCollection(func() { debug.SetGCPercent(percentFor(liveHeap())) })
}

// percentFor is the GC percentage with which live bytes are collected at leastHeap, or after they have grown by growth
// if that is more.
func percentFor(live uint64) int {
	live = max(live, 1<<20)
	if live >= leastHeap {
		return growth
	}
	return max(growth, int((leastHeap-live)*100/live))
}

// liveHeap returns the bytes that the last collection found alive.
func liveHeap() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	if sample[0].Value.Kind() != metrics.KindUint64 {
		return leastHeap // of a runtime that does not tell: nothing is changed
	}
	return sample[0].Value.Uint64()
}

// afterCollection calls do after each collection, for as long as the process lives.
func afterCollection(do func()) {
	canary := new([16]byte) // dies with the next collection
	runtime.AddCleanup(canary, func(struct{}) {
		afterCollection(do)
		do()
	}, struct{}{})
}
