//go:build unix

package main

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/principal"
)

// fileOf writes a file that only its owner can read.
func fileOf(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestRulesTest(t *testing.T) {
	t.Parallel()
	file := fileOf(t, "rules", "allow token:ci acquire acc\ndeny token:ci acquire acc/audit\nallow cert:ops admin \"\"\n")
	for _, x := range []struct {
		args string
		code int
		out  string
	}{
		{"--as token:ci --verb acquire acc/1", exitOK, "allowed: line 1"},
		{"--as token:ci --verb acquire acc/audit/1", exitDenied, "denied: line 2"},
		{"--as token:ci --verb acquire account", exitDenied, "denied: no rule allows it"},
		{"--as token:ci --verb acquire --subtree acc", exitDenied, "denied: no rule allows it"},
		{"--verb acquire acc", exitDenied, "denied: no rule allows it"},
		{"", exitOK, ""},
	} {
		p := start(t, append([]string{"rules", "test", "--rules", file}, strings.Fields(x.args)...)...)
		out := p.output()
		p.expectExit(x.code)
		if out != x.out {
			t.Errorf("%s: %q, want %q", x.args, out, x.out)
		}
	}
	admin := start(t, "rules", "test", "", "--rules", file, "--as", "cert:ops", "--verb", "admin")
	if out := admin.output(); out != "allowed: line 3" {
		t.Errorf("admin: %q", out)
	}
	admin.expectExit(exitOK)
	wrong := fileOf(t, "wrong", "# one\nallow token:ci aquire acc\n")
	for args, want := range map[string]string{
		"":                                    "get, set, remove or test is missing",
		"put":                                 `"put": want get`,
		"set":                                 "FILE is missing",
		"set " + wrong:                        wrong + `: line 2: "aquire"`,
		"set " + fileOf(t, "empty", "\n"):     "is empty",
		"test":                                "--rules is missing",
		"test a b --rules " + file:            "no such argument",
		"test --rules " + wrong:               wrong + `: line 2: "aquire": want one or some of`,
		"test --rules /none":                  "no such file",
		"test a --rules " + file:              `--verb "": want acquire`,
		"test a --verb own --rules " + file:   `--verb "own": want acquire`,
		"test a --verb admin --rules " + file: `whose name is ""`,
		"test a --verb read --as x --rules " + file: `--as "x": want KIND:NAME`,
	} {
		start(t, append([]string{"rules"}, strings.Fields(args)...)...).expectExit(exitUsage, want)
	}
}

// The line that is printed is that of the token that is printed.
func TestTokenCreate(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, more := range []string{"", " --expires-in 12h"} {
		began := time.Now()
		token, line, _ := strings.Cut(succeed(t, strings.Fields("token create token:ci"+more)...), "\n")
		proofs, err := principal.ParseProofs([]byte(line))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(line, token) || seen[token] {
			t.Errorf("%s: %s", token, line)
		}
		seen[token] = true
		for after, want := range map[time.Duration]bool{0: true, 11 * time.Hour: true, 13 * time.Hour: more == ""} {
			if who, err := proofs.Token(token, began.Add(after)); (err == nil) != want || want && who != "token:ci" {
				t.Errorf("%s after %v: %q, %v", more, after, who, err)
			}
		}
	}
	all := objects[struct{ Token, Line string }](t, succeed(t, "token", "create", "token:ci", "--json"))
	if len(all) != 1 || all[0].Line != principal.TokenLine("token:ci", all[0].Token, time.Time{}) {
		t.Errorf("--json: %+v", all)
	}
	for args, want := range map[string]string{
		"":                                "create is missing",
		"list token:ci":                   `"list": want create`,
		"create":                          "PRINCIPAL is missing",
		"create ci":                       `"ci": want KIND:NAME`,
		"create cert:ci":                  `"cert:ci": want a principal of the form token:NAME`,
		"create token:a*b":                `the name has '*'`,
		"create token:ci --expires-in 0s": "--expires-in: want at least 1s",
	} {
		start(t, append([]string{"token"}, strings.Fields(args)...)...).expectExit(exitUsage, want)
	}
}

// A cluster gets its first rules from its options, and then others from operators. They count over HTTP, too.
func TestRulesOfACluster(t *testing.T) {
	t.Parallel()
	first := fileOf(t, "first", "allow * acquire,read jobs\n")
	p := start(t, "serve", "--listen", "127.0.0.1:0", "--peer-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0",
		"--data-dir", filepath.Join(t.TempDir(), "data"), "--rules", first)
	url := "fencelock://" + p.await("fencelock: serving clients at ")
	door := p.await("fencelock: serving HTTP at ")
	at := []string{"--backend", url}
	eventually(t, "the first rules are in force", func() bool {
		return succeed(t, append([]string{"rules", "get"}, at...)...) == "allow * acquire,read jobs"
	})
	succeed(t, "run", "--name", "jobs/1", "--backend", url, "--", "true")
	for _, args := range [][]string{
		{"run", "--name", "else", "--backend", url, "--", "true"}, {"holder", "else", "--backend", url},
		{"force-release", "jobs/1", "--reason", "a test", "--backend", url},
	} {
		start(t, args...).expectExit(exitDenied, "denied")
	}
	for path, want := range map[string]int{
		"/livez": 200, "/v1/locks": 200, "/": 200, "/v1/locks/jobs%2F1": 404, "/v1/locks/else": 403,
	} {
		resp, err := http.Get(door + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("%s over HTTP: %d, want %d", path, resp.StatusCode, want)
		}
	}
	second := fileOf(t, "second", "# others\nallow * acquire,read,force \"\"\n")
	if out := succeed(t, append([]string{"rules", "set", second}, at...)...); !strings.Contains(out, "version 2") {
		t.Errorf("set: %s", out)
	}
	succeed(t, "run", "--name", "else", "--backend", url, "--", "true")
	if out := succeed(t, append([]string{"rules", "remove"}, at...)...); !strings.Contains(out, "version 3") {
		t.Errorf("remove: %s", out)
	}
	if out := succeed(t, append([]string{"rules", "get"}, at...)...); out != "" {
		t.Errorf("without rules: %q", out)
	}
	p.terminate()
}
