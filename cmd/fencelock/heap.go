package main

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

const (
	// leastHeap is the size in bytes to which the heap of a server may grow before it is collected.
	leastHeap = 64 << 20
	// growth is the growth of a larger heap between two collections, in percent of the live heap. Go's own 100
	// doubles the memory of every held lock; at 60 the collector marks 1.7 times as often.
	growth = 60
)

// steadyHeap lets a small heap grow to leastHeap before each collection. A server with few locks has some megabytes
// of live heap, and would otherwise collect them a hundred times a second under load, which takes a good part of its
// time. A larger heap grows by a fixed share, so that the memory of a lock stays the same. GOGC or GOMEMLIMIT, if
// set, decides instead.
func steadyHeap() {
	if os.Getenv("GOGC") != "" || os.Getenv("GOMEMLIMIT") != "" {
		return
	}
	debug.SetGCPercent(percentFor(liveHeap()))
	afterCollection(func() { debug.SetGCPercent(percentFor(liveHeap())) })
}

// percentFor returns the GC percentage with which live bytes are collected at leastHeap, or after they have grown by
// growth, whichever is more.
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
		return leastHeap // this runtime has no such metric: no change
	}
	return sample[0].Value.Uint64()
}

// afterCollection calls do after each collection, for as long as the process lives.
func afterCollection(do func()) {
	canary := new([16]byte) // collected by the next collection
	runtime.AddCleanup(canary, func(struct{}) {
		afterCollection(do)
		do()
	}, struct{}{})
}
