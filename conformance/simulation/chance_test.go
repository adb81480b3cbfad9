package simulation

import (
	"math"
	"math/rand/v2"
	"time"
)

// chance is the seed of one world. The fate of a message is drawn from the message, not from a common sequence: two
// goroutines that run at the same instant may come in either order, and both orders must draw the same.
type chance uint64

// roll draws from the seed and the keys alone.
func (c chance) roll(keys ...uint64) uint64 {
	h := uint64(c) + 0x9e3779b97f4a7c15
	for _, k := range keys {
		h ^= k
		// The finalizer of splitmix64.
		h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
		h = (h ^ h>>27) * 0x94d049bb133111eb
		h ^= h >> 31
		h += 0x9e3779b97f4a7c15
	}
	return h
}

// key returns the hash of a text.
func key(s string) uint64 {
	h := uint64(14695981039346656037)
	for i := 0; i < len(s); i++ {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return h
}

// dice is a sequence that belongs to one goroutine.
type dice struct{ *rand.Rand }

func (c chance) dice(keys ...uint64) dice {
	return dice{rand.New(rand.NewPCG(c.roll(keys...), c.roll(append(keys, 1)...)))}
}

// one returns true with probability 1/n.
func (d dice) one(n int) bool { return d.IntN(n) == 0 }

// between draws evenly, to the nanosecond, so that two events rarely fall on one instant.
func (d dice) between(least, most time.Duration) time.Duration {
	return least + time.Duration(d.Int64N(int64(most-least)+1))
}

// scale draws evenly among the orders of magnitude.
func (d dice) scale(least, most time.Duration) time.Duration {
	return time.Duration(float64(least) * math.Pow(float64(most)/float64(least), d.Float64()))
}

// about draws an interval of a memoryless process with the given mean.
func (d dice) about(mean time.Duration) time.Duration {
	return time.Duration(d.ExpFloat64()*float64(mean)) + time.Duration(d.IntN(1000)+1)
}
