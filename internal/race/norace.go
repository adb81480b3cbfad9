//go:build !race

// Package race shows tests whether the race detector is on.
package race

// Enabled reports whether the race detector is on. Under it everything takes several times as long.
const Enabled = false
