// Package randsource lets a simulation make the core's random choices: how renewals, repetitions and elections are
// spread.
package randsource

import "math/rand/v2"

// Source is implemented by a driver that decides it for its client.
type Source interface {
	// Chance returns a number from 0 up to, and not including, 1.
	Chance() float64
}

// Of returns driver's source, or one of random numbers.
func Of(driver any) func() float64 {
	if s, ok := driver.(Source); ok {
		return s.Chance
	}
	return rand.Float64
}
