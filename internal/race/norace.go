//go:build !race

// Package race tells tests whether the race detector is on.
package race

// Enabled says whether it is. Under it everything takes several times as long.
const Enabled = false
