//go:build !unix

package server

// fileLimit is how many files this process may have open.
func fileLimit() int { return 1 << 14 }
