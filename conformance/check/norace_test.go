//go:build !race

package check

// racing says whether the race detector is on.
const racing = false
