//go:build !unix

package front

// FileLimit returns the maximum number of open files of this process.
func FileLimit() int { return 1 << 14 }
