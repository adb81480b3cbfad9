//go:build unix

package main

import (
	"path/filepath"
	"strings"
	"testing"
)

func TestPoliciesOfACluster(t *testing.T) {
	t.Parallel()
	p := start(t, "serve", "--listen", "127.0.0.1:0", "--peer-listen", "127.0.0.1:0", "--data-dir",
		filepath.Join(t.TempDir(), "data"))
	url := "fencelock://" + p.await("fencelock: serving clients at ")
	at := []string{"--backend", url}
	const text = "max-hold=10s jobs"
	succeed(t, append([]string{"policies", "set", fileOf(t, "policies", text+"\n")}, at...)...)
	if out := succeed(t, append([]string{"policies", "get"}, at...)...); out != text {
		t.Errorf("get: %q", out)
	}
	run := []string{"run", "--name", "jobs/1", "--ttl", "20s", "--backend", url, "--", "true"}
	start(t, run...).expectExit(exitUsage, "longer than the maximum hold time")
	succeed(t, append([]string{"policies", "remove"}, at...)...)
	if out := succeed(t, append([]string{"policies", "get"}, at...)...); out != "" {
		t.Errorf("without policies: %q", out)
	}
	succeed(t, run...)
	wrong := fileOf(t, "wrong", "# one\nmax-hold=1 jobs\n")
	for args, want := range map[string]string{
		"":                                "get, set or remove is missing",
		"set":                             "FILE is missing",
		"set " + wrong:                    wrong + `: line 2: "max-hold=1": want none, or a duration`,
		"set " + fileOf(t, "empty", "\n"): `to delete the policies, run "fencelock policies remove"`,
		"get --backend redis://127.0.0.1": "its scheme is not one of fencelock, fencelocks",
	} {
		start(t, append([]string{"policies"}, strings.Fields(args)...)...).expectExit(exitUsage, want)
	}
	p.terminate()
}
