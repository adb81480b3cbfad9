//go:build !race

package machine

// racing says whether the race detector is on.
const racing = false
