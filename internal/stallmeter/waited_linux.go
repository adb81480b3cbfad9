package stallmeter

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"
)

// waited returns for how long the threads of this process were ready to run and did not, all together, divided by the
// number of threads that may run at once. It is zero where the kernel does not count.
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

// stood returns for how long the machine could not run, since it began: the time that the host took from each processor
// (steal), and the time in which all that was ready waited for a disk. Servers beside this process stand still then, and
// its own threads do not see it. It is zero where the kernel does not count.
func stood() time.Duration {
	return stolen(os.ReadFile("/proc/stat")) + pressed(os.ReadFile("/proc/pressure/io"))
}

// stolen reads the steal of an average processor from /proc/stat: the eighth figure of the line "cpu", in hundredths of
// a second.
func stolen(text []byte, err error) time.Duration {
	line, _, _ := bytes.Cut(text, []byte("\n"))
	fields := bytes.Fields(line)
	if err != nil || len(fields) < 9 || string(fields[0]) != "cpu" {
		return 0
	}
	n, _ := strconv.ParseInt(string(fields[8]), 10, 64)
	return time.Duration(n) * 10 * time.Millisecond / time.Duration(runtime.NumCPU())
}

// pressed reads the total of the line "full" from a file in /proc/pressure, in microseconds.
func pressed(text []byte, err error) time.Duration {
	_, full, found := bytes.Cut(text, []byte("full "))
	_, total, counts := bytes.Cut(full, []byte("total="))
	if err != nil || !found || !counts {
		return 0
	}
	n, _ := strconv.ParseInt(string(bytes.TrimSpace(total)), 10, 64)
	return time.Duration(n) * time.Microsecond
}
