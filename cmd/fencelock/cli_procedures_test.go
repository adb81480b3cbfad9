//go:build unix

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/testcert"
)

// Every procedure in docs/CLI.md does what its text says. The test replaces only addresses.
func TestProceduresOfTheCommandLine(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/CLI.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?ms)^```sh\n(# procedure: .*?)^```$").FindAllSubmatch(text, -1)
	if all := strings.Count(string(text), "```sh\n"); len(blocks) != all || all == 0 {
		t.Fatalf("%d of %d blocks are procedures", len(blocks), all)
	}
	for _, block := range blocks {
		script := string(block[1])
		name, _, _ := strings.Cut(strings.TrimPrefix(script, "# procedure: "), "\n")
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := start(t, "serve", "--data-dir", filepath.Join(t.TempDir(), "data"), "--listen", "127.0.0.1:0",
				"--peer-listen", "127.0.0.1:0")
			replaced := []string{"127.0.0.1:7480", p.await("fencelock: serving clients at ")}
			for i, addr := range freeport.Addresses(t, 3) {
				_, to, _ := strings.Cut(addr, ":")
				replaced = append(replaced, fmt.Sprintf(":%d", 7481+i), ":"+to)
			}
			if strings.Contains(script, "127.0.0.1:6379") {
				replaced = append(replaced, "127.0.0.1:6379", containers.Redis(t).Addr())
			}
			runScriptOfText(t, strings.NewReplacer(replaced...).Replace(script))
		})
	}
}

// runScriptOfText runs a script in a fresh directory, where the command fencelock is this program. The script stops
// at the first command that fails.
func runScriptOfText(t *testing.T, script string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "script") // the path of a socket has at most 103 bytes, and the test has a long name
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	bin := t.TempDir()
	wrapper := fmt.Sprintf("#!/bin/sh\n%s=1 GORACE=atexit_sleep_ms=0 exec %q \"$@\"\n", asProgram, executable(t))
	if err := os.WriteFile(filepath.Join(bin, "fencelock"), []byte(wrapper), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, each := range []string{"old", "new"} {
		authority := testcert.New(t)
		cert, key := authority.Sign(t, "localhost")
		if err := os.Mkdir(filepath.Join(dir, each), 0o700); err != nil {
			t.Fatal(err)
		}
		for to, from := range map[string]string{"tls.crt": cert, "tls.key": key, "ca.crt": authority.File} {
			content, err := os.ReadFile(from)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, each, to), content, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	cmd := exec.CommandContext(t.Context(), "bash", "-eux", "-c", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n"+script)
	cmd.Dir, cmd.WaitDelay = dir, patience
	cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
	if out, err := cmd.CombinedOutput(); err != nil {
		logs, _ := filepath.Glob(filepath.Join(dir, "*.log"))
		for _, file := range logs {
			content, _ := os.ReadFile(file)
			out = append(append(out, filepath.Base(file)+":\n"...), content...)
		}
		t.Errorf("%v\n%s", err, out)
	}
}

// The table of exit codes in docs/CLI.md is that of the helps.
func TestExitCodesAreDocumented(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/CLI.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string][]string{}
	for _, m := range regexp.MustCompile(`(?m)^\| (\d+(?:\+n)?) \|[^|]*\| ([a-z, -]+) \|$`).FindAllStringSubmatch(string(text), -1) {
		documented[m[1]] = strings.Split(m[2], ", ")
	}
	for _, c := range subcommands() {
		_, codes, found := strings.Cut(c.help, "\nExit codes")
		if !found {
			if c.name != "version" {
				t.Errorf("the help of %s has no exit codes", c.name)
			}
			continue
		}
		var said []string
		for _, m := range regexp.MustCompile(`(?m)^ +(\d+(?:\+n)?)  `).FindAllStringSubmatch(codes, -1) {
			said = append(said, m[1])
		}
		for code, names := range documented {
			listed := slices.Contains(names, c.name) || names[0] == "all"
			if run := c.name == "run" && code == "0"; listed != slices.Contains(said, code) && !run {
				t.Errorf("%s and code %s: in the table %v, in the help %v", c.name, code, listed, !listed)
			}
		}
		for _, code := range said {
			if documented[code] == nil {
				t.Errorf("the table lacks code %s of %s", code, c.name)
			}
		}
	}
}
