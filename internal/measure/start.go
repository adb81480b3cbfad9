package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

const (
	starts    = 51                    // of each command line; odd, for the median
	startGoal = 20 * time.Millisecond // the median of "fencelock version"
)

// measureStarts builds the command-line program and prints how long it takes from start to end, without a lock and
// with one from a server on this machine.
func measureStarts(ctx context.Context, to io.Writer) error {
	return withProgram(ctx, func(program, _ string) error {
		found, stop, err := startServer(ctx, program, []string{"--dev"}, "serving clients at ")
		if err != nil {
			return err
		}
		defer stop()
		return takeStarts(ctx, program, found[0], to)
	})
}

// withProgram builds the command-line program and calls do with its path and that of a directory, which it then removes.
func withProgram(ctx context.Context, do func(program, dir string) error) (err error) {
	dir, err := os.MkdirTemp("", "fencelock-measure-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	program := filepath.Join(dir, "fencelock")
	build := exec.CommandContext(ctx, "go", "build", "-o", program, "./cmd/fencelock")
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		return fmt.Errorf("build ./cmd/fencelock: %w", err)
	}
	return do(program, dir)
}

// startServer starts a server on a free port. It returns what follows each of the words in the output, and what stops
// the server.
func startServer(ctx context.Context, program string, args []string, words ...string) ([]string, func(), error) {
	server := exec.CommandContext(ctx, program, append([]string{"serve", "--listen", "127.0.0.1:0"}, args...)...)
	stdout, err := server.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := server.Start(); err != nil {
		return nil, nil, err
	}
	stop := func() {
		_ = server.Process.Signal(syscall.SIGTERM)
		_ = server.Wait()
	}
	found, missing := make([]string, len(words)), len(words)
	for lines := bufio.NewScanner(stdout); missing > 0 && lines.Scan(); {
		for i, word := range words {
			if _, rest, ok := strings.Cut(lines.Text(), word); ok {
				found[i] = rest
				missing--
			}
		}
	}
	if missing > 0 {
		stop()
		return nil, nil, errors.New("fencelock serve did not start")
	}
	return found, stop, nil
}

// takeStarts prints how long command lines take, one of them with a lock from the server at addr.
func takeStarts(ctx context.Context, program, addr string, to io.Writer) error {
	out := tabwriter.NewWriter(to, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(out, "median\tgreatest\tgoal\t  of %d runs\n", starts)
	for _, c := range []struct {
		args []string
		goal string
	}{
		{[]string{"version"}, startGoal.String()},
		{[]string{"run", "--backend", "fencelock://" + addr, "--name", "measure", "--", "true"}, "–"},
	} {
		took := make([]time.Duration, starts)
		for i := range took {
			began := time.Now()
			if text, err := exec.CommandContext(ctx, program, c.args...).CombinedOutput(); err != nil {
				return fmt.Errorf("fencelock %s: %w: %s", strings.Join(c.args, " "), err, text)
			}
			took[i] = time.Since(began)
		}
		slices.Sort(took)
		fmt.Fprintf(out, "%v\t%v\t%s\t  fencelock %s\n", took[starts/2].Round(100*time.Microsecond),
			took[starts-1].Round(100*time.Microsecond), c.goal, c.args[0])
	}
	return out.Flush()
}
