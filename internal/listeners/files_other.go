//go:build !unix

package listeners

// FileLimit returns the maximum number of open files of this process.
func FileLimit() int { return 1 << 14 }
