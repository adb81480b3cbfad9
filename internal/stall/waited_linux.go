package stall

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"
)

// waited returns for how long the threads of this process were ready to run and did not, all together, divided by the
// number of those that may run at once. It is zero where the kernel does not count.
func waited() time.Duration {
	threads, _ := filepath.Glob("/proc/self/task/*/schedstat")
	var sum int64
	for _, path := range threads {
		text, _ := os.ReadFile(path) // a thread may have ended
		// Time on a processor, time in the queue, and how often, in nanoseconds.
		if fields := bytes.Fields(text); len(fields) == 3 {
			n, _ := strconv.ParseInt(string(fields[1]), 10, 64)
			sum += n
		}
	}
	return time.Duration(sum) / time.Duration(runtime.GOMAXPROCS(0))
}
