package containers

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"
)

// asKilled makes this program start a container and wait to be killed.
const asKilled = "FENCELOCK_TEST_KILLED"

// TestKilledProcessLeavesNoContainer kills a process that has a container, as go test does after its timeout.
func TestKilledProcessLeavesNoContainer(t *testing.T) {
	t.Parallel()
	if os.Getenv(asKilled) != "" {
		r := Redis(t, AsContainer())
		fmt.Println(r.addr)
		select {}
	}
	Redis(t, AsContainer()) // otherwise skip this test
	cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), asKilled+"=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	lines.Scan()
	addr := lines.Text()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if !redisSpec.ready(ctx, addr) {
		t.Errorf("no Redis answers at %q", addr)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	for {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			return
		}
		c.Close()
		select {
		case <-time.After(10 * time.Millisecond): // no notification
		case <-ctx.Done():
			t.Fatalf("the container at %s outlives the process that started it", addr)
		}
	}
}

func TestVersionOfTheRunner(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]string{
		"v0.1.0":                               "v0.1.0",
		"v1.2.3-rc.1":                          "v1.2.3-rc.1",
		"v0.0.0-20261127111500-0123456789ab":   "0123456789ab",
		"v0.1.1-0.20261127111500-0123456789ab": "0123456789ab",
	} {
		if got := query(version); got != want {
			t.Errorf("the runner of %s is that of %s, want %s", version, got, want)
		}
	}
}

// TestRunnerAnswersAfterACancel cancels operations: the next one works.
func TestRunnerAnswersAfterACancel(t *testing.T) {
	t.Parallel()
	r := Redis(t, AsContainer())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c := r.node.(*container)
	for range 20 {
		_ = c.pause(ctx) // canceled, or not: the cancel may arrive too late
		if err := c.ended(t.Context()); err != nil {
			t.Fatal(err)
		}
		_ = c.resume(t.Context()) // the container may not be paused
	}
}
