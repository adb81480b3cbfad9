package main

import (
	"bufio"
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/freeport"
)

const role = "member"

func TestMain(m *testing.M) {
	fault.RunRole(map[string]fault.Role{role: func(in <-chan string, args []string) int {
		go func() {
			for range in { // until the test ends
			}
			os.Exit(1)
		}()
		os.Args = append([]string{"members"}, args...)
		main()
		return 0
	}})
	os.Exit(m.Run())
}

// Three processes share a lock, and go on while each in its turn gets SIGTERM, often while it holds the lock, and is
// started again; one has lost its folder.
func TestRolling(t *testing.T) {
	t.Setenv("MEMBERS_JOIN_KEY", "a secret of all members")
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	addresses := freeport.Addresses(t, 6)
	file := filepath.Join(t.TempDir(), "members.txt")
	dirs := []string{t.TempDir(), t.TempDir(), t.TempDir()}
	start := func(i int) *fault.Child {
		t.Helper()
		return fault.StartRole(t, role, "-data", dirs[i], "-peer", addresses[i], "-listen", addresses[3+i],
			"-members", strings.Join(addresses[:3], ","), "-file", file)
	}
	holds := func(c *fault.Child) {
		t.Helper()
		if _, err := c.Await(ctx, "token "); err != nil {
			t.Fatalf("%v; standard error:\n%s", err, c.Stderr())
		}
	}
	all := []*fault.Child{start(0), start(1), start(2)}
	for _, c := range all {
		holds(c)
	}
	for i := range all {
		if err := all[i].Terminate(); err != nil {
			t.Fatal(err)
		}
		if err := all[i].Wait(); err != nil {
			t.Errorf("process %d ended with %v; standard error:\n%s", i, err, all[i].Stderr())
		}
		if i == 2 {
			dirs[i] = t.TempDir()
		}
		all[i] = start(i)
		holds(all[i])
	}
	for i, c := range all {
		if err := c.Terminate(); err != nil {
			t.Fatal(err)
		}
		if err := c.Wait(); err != nil && i == 0 { // the others end without a majority, and say so
			t.Errorf("process %d ended with %v; standard error:\n%s", i, err, c.Stderr())
		}
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	last, lines := uint64(0), bufio.NewScanner(f)
	by := map[string]int{}
	for lines.Scan() {
		text, who, _ := strings.Cut(lines.Text(), " by ")
		token, err := strconv.ParseUint(text, 10, 64)
		if err != nil || token <= last {
			t.Errorf("%q after %d: %v", lines.Text(), last, err)
		}
		last = token
		by[who]++
	}
	if len(by) != 3 {
		t.Errorf("lines by %v", by)
	}
}
