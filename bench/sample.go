package main

import (
	"math"
	"slices"
	"time"
)

// sample is what one round measured, by the keys of the scenario's columns. NaN or absent: not measured; +Inf: never.
type sample map[string]float64

// pick makes one figure of the rounds' figures.
type pick uint8

const (
	median pick = iota
	highest
	lowest
)

// of returns the picked one of values, NaN if there is none.
func (p pick) of(values []float64) float64 {
	values = slices.DeleteFunc(slices.Clone(values), math.IsNaN)
	if len(values) == 0 {
		return math.NaN()
	}
	slices.Sort(values)
	switch p {
	case highest:
		return values[len(values)-1]
	case lowest:
		return values[0]
	}
	if mid := len(values) / 2; len(values)%2 == 1 || math.IsInf(values[mid], 0) {
		return values[mid]
	} else {
		return (values[mid-1] + values[mid]) / 2
	}
}

// latencies adds p50, p95 and p99 of durations, in µs. It sorts them.
func (s sample) latencies(all []time.Duration) {
	if len(all) == 0 {
		return
	}
	slices.Sort(all)
	at := func(p float64) float64 {
		i := min(int(p*float64(len(all))), len(all)-1)
		return float64(all[i].Nanoseconds()) / 1000
	}
	s["p50"], s["p95"], s["p99"] = at(0.50), at(0.95), at(0.99)
}
