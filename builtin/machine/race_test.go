//go:build race

package machine

// racing says whether the race detector is on. Under it everything takes several times as long.
const racing = true
