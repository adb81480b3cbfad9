package importrules

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// globals is a program that prints the global state of the whole program, with %s among its imports.
const globals = `package main

import (
	"flag"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"time"
%s)

func main() {
	fmt.Printf("log: %%d %%q to stderr: %%t\n", log.Flags(), log.Prefix(), log.Writer() == os.Stderr)
	fmt.Printf("slog: %%T\n", slog.Default().Handler())
	flag.VisitAll(func(f *flag.Flag) { fmt.Println("flag:", f.Name) })
	for _, path := range []string{"/", "/metrics", "/debug/pprof/", "/debug/vars"} {
		r, _ := http.NewRequest("GET", "http://localhost"+path, nil)
		_, pattern := http.DefaultServeMux.Handler(r)
		fmt.Printf("http.DefaultServeMux: %%s by %%q\n", path, pattern)
	}
	fmt.Printf("http.DefaultTransport: %%T, http.DefaultClient: %%+v\n", http.DefaultTransport, *http.DefaultClient)
	fmt.Printf("net.DefaultResolver: %%+v\n", net.DefaultResolver)
	fmt.Println("goroutines:", runtime.NumGoroutine())
	fmt.Println("processors:", runtime.GOMAXPROCS(0) == runtime.NumCPU(), "collector:", debug.SetGCPercent(100))
	fmt.Println("zone:", time.Local)
	for _, v := range os.Environ() {
		fmt.Println("environment:", v)
	}
}
`

// A program that imports the public packages keeps its global state: package log above all. The exception
// is grpc's: it registers /debug/requests and /debug/events, which answer local clients only, unless the program is
// built with the tag grpcnotrace.
func TestImportsLeaveTheProgramAlone(t *testing.T) {
	t.Parallel()
	var public []string
	for _, path := range slices.Sorted(maps.Keys(load(t))) {
		in := strings.TrimPrefix(strings.TrimPrefix(path, module), "/")
		first, _, _ := strings.Cut(in, "/")
		if ours(path) && !slices.Contains([]string{"cmd", "examples"}, first) &&
			!slices.Contains(strings.Split(in, "/"), "internal") {
			public = append(public, path)
		}
	}
	if len(public) < len(drivers) {
		t.Fatalf("public packages: %v", public)
	}
	alone, with := shared(t, nil), shared(t, public)
	for _, line := range alone {
		if !slices.Contains(with, line) {
			t.Errorf("with the public packages imported there is no more: %s", line)
		}
	}
	for _, line := range with {
		if !slices.Contains(alone, line) {
			t.Errorf("with the public packages imported there is: %s", line)
		}
	}
}

// shared returns the lines of the program globals with the given imports.
func shared(t *testing.T, imports []string) []string {
	t.Helper()
	var lines strings.Builder
	for _, path := range imports {
		fmt.Fprintf(&lines, "\t_ %q\n", path)
	}
	source := filepath.Join(t.TempDir(), "main.go")
	if err := os.WriteFile(source, fmt.Appendf(nil, globals, lines.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "program")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, source).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	cmd := exec.CommandContext(t.Context(), program)
	cmd.Env = []string{"LANG=C"}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}
