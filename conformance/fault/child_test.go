//go:build unix

package fault_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/fault"
)

func TestMain(m *testing.M) {
	fault.RunRole(map[string]fault.Role{
		"echo": func(in <-chan string, args []string) int {
			fmt.Println("args " + strings.Join(args, ","))
			for line := range in {
				if code, ok := strings.CutPrefix(line, "exit "); ok {
					n, _ := strconv.Atoi(code)
					fmt.Fprintln(os.Stderr, "leaving")
					return n
				}
				fmt.Println("echo " + line)
			}
			return 0
		},
		"parent": func(in <-chan string, args []string) int {
			c, err := fault.Spawn(exec.Command("sleep", "1000"))
			if err == nil {
				err = c.Pause()
			}
			if err != nil {
				fmt.Println(err)
				return 1
			}
			fmt.Println("child", c.Pid())
			<-in
			return 0
		},
	})
	os.Exit(m.Run())
}

func waiting(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func send(t *testing.T, c *fault.Child, line string) {
	t.Helper()
	if err := c.Send(line); err != nil {
		t.Fatal(err)
	}
}

func await(t *testing.T, c *fault.Child, prefix, want string) {
	t.Helper()
	if got, err := c.Await(waiting(t), prefix); err != nil || got != want {
		t.Fatalf("await %q: %q, %v; want %q", prefix, got, err, want)
	}
}

func TestChildTalks(t *testing.T) {
	t.Parallel()
	c := fault.StartRole(t, "echo", "a", "b")
	await(t, c, "args ", "a,b")
	send(t, c, "hello")
	await(t, c, "echo ", "hello")
	send(t, c, "exit 7")
	if err := c.Wait(); err == nil || !strings.Contains(err.Error(), "exit code 7") {
		t.Errorf("wait: %v; want exit code 7", err)
	}
	if got := c.Stderr(); got != "leaving\n" {
		t.Errorf("standard error %q", got)
	}
	if _, err := c.Line(waiting(t)); !errors.Is(err, io.EOF) {
		t.Errorf("line after the end: %v; want EOF", err)
	}
	if c.Running() {
		t.Error("an ended child is running")
	}
}

func TestChildIsStoppedWhilePaused(t *testing.T) {
	t.Parallel()
	c := fault.StartRole(t, "echo")
	await(t, c, "args ", "")
	for range 20 {
		for range 2 { // twice is the same as once
			if err := c.Pause(); err != nil {
				t.Fatal(err)
			}
		}
		if state := state(t, c.Pid()); state != "" && state != "T" {
			t.Fatalf("state %s after Pause; want T", state)
		}
		send(t, c, "x")
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		if line, err := c.Line(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("a paused child said %q, %v", line, err)
		}
		cancel()
		if !c.Running() {
			t.Fatal("a paused child has not ended")
		}
		for range 2 {
			if err := c.Resume(); err != nil {
				t.Fatal(err)
			}
		}
		await(t, c, "echo ", "x")
	}
}

// state returns the letter of the process's state, or "" if the system does not report it.
func state(t *testing.T, pid int) string {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if errors.Is(err, os.ErrNotExist) {
		return ""
	}
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	return after[:1]
}

func TestChildIsKilledWithAllItStarted(t *testing.T) {
	t.Parallel()
	for name, pause := range map[string]bool{"running": false, "paused": true} {
		t.Run(name, func(t *testing.T) {
			c := fault.Start(t, exec.Command("sh", "-c", "sleep 1000 & echo $!; wait"))
			line, err := c.Line(waiting(t))
			if err != nil {
				t.Fatal(err)
			}
			grandchild, err := strconv.Atoi(line)
			if err != nil {
				t.Fatal(err)
			}
			if pause {
				if err := c.Pause(); err != nil {
					t.Fatal(err)
				}
			}
			if err := c.Kill(); err != nil {
				t.Fatal(err)
			}
			if err := c.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
				t.Errorf("wait: %v; want killed", err)
			}
			for _, pid := range []int{c.Pid(), grandchild} {
				eventually(t, "the process is gone", func() bool {
					s := state(t, pid)
					return syscall.Kill(pid, 0) == syscall.ESRCH || s == "Z" && pid == grandchild // init's to reap
				})
			}
			if err := c.Kill(); err != nil {
				t.Errorf("kill again: %v", err)
			}
			if err := c.Pause(); err == nil {
				t.Error("a dead child was paused")
			}
		})
	}
}

func TestChildLeftoversDieWithIt(t *testing.T) {
	t.Parallel()
	c := fault.Start(t, exec.Command("sh", "-c", "sleep 1000 & echo $!"))
	line, err := c.Line(waiting(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err != nil {
		t.Fatal(err)
	}
	grandchild, _ := strconv.Atoi(line)
	eventually(t, "the grandchild is gone", func() bool {
		return syscall.Kill(grandchild, 0) == syscall.ESRCH || state(t, grandchild) == "Z"
	})
}

func TestChildEndsWithItsParent(t *testing.T) {
	t.Parallel()
	c := fault.StartRole(t, "echo")
	await(t, c, "args ", "")
	c.CloseStdin()
	if err := c.Wait(); err == nil || !strings.Contains(err.Error(), "exit code 3") {
		t.Errorf("wait: %v; want the code of a child without its parent", err)
	}
}

func TestChildDiesWithAParentThatIsKilled(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("only Linux kills the children of a killed process")
	}
	parent := fault.StartRole(t, "parent")
	line, err := parent.Await(waiting(t), "child ")
	if err != nil {
		t.Fatal(err)
	}
	child, err := strconv.Atoi(line)
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the paused child is gone", func() bool {
		return syscall.Kill(child, 0) == syscall.ESRCH || state(t, child) == "Z"
	})
}

// A pending signal kills the child when Resume ends the pause.
func TestChildEndsWhenItIsResumed(t *testing.T) {
	t.Parallel()
	for range 20 {
		c := fault.Start(t, exec.Command("sleep", "1000"))
		if err := c.Pause(); err != nil {
			t.Fatal(err)
		}
		if err := c.Terminate(); err != nil {
			t.Fatal(err)
		}
		if err := c.Resume(); err != nil {
			t.Error(err)
		}
		if err := c.Wait(); err == nil || !strings.Contains(err.Error(), "terminated") {
			t.Errorf("wait: %v; want terminated", err)
		}
		if err := c.Resume(); err == nil {
			t.Error("a dead child was resumed")
		}
	}
}

func TestChildThatCannotStart(t *testing.T) {
	t.Parallel()
	if _, err := fault.Spawn(exec.Command("/nowhere/nothing")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("spawn: %v; want that the file does not exist", err)
	}
	cmd := exec.Command("sh")
	cmd.Stdout = os.Stdout
	if _, err := fault.Spawn(cmd); err == nil {
		t.Error("a command with its own output was accepted")
	}
}

func TestChildTerminates(t *testing.T) {
	t.Parallel()
	c := fault.Start(t, exec.Command("sleep", "1000"))
	if err := c.Terminate(); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err == nil || !strings.Contains(err.Error(), "terminated") {
		t.Errorf("wait: %v; want terminated", err)
	}
}
