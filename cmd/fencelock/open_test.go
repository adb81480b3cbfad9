//go:build unix

package main

import (
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/freeport"
)

// A restored cluster says everywhere until when it is closed, and an operator can open it.
func TestClosedUntil(t *testing.T) {
	t.Parallel()
	p, url := serving(t, "--data-dir", filepath.Join(t.TempDir(), "old"))
	holding := start(t, "run", "--backend", url, "--name", "x", "--ttl", "7s", "--", "sh", "-c", "echo held; exec sleep 60")
	holding.await("held")
	file, dir := filepath.Join(t.TempDir(), "locks.backup"), filepath.Join(t.TempDir(), "new")
	succeed(t, "backup", file, "--backend", url)
	p.terminate()
	if text := succeed(t, "restore", file, "--data-dir", dir); !strings.Contains(text, "refuses clients for 1h0m0s") ||
		!strings.Contains(text, "7s") {
		t.Errorf("restore prints:\n%s", text)
	}

	ops := freeport.Addresses(t, 1)[0]
	p, url = serving(t, "--data-dir", dir, "--http-listen", "127.0.0.1:0", "--ops-listen", ops)
	door, watched := p.await("fencelock: serving HTTP at "), "http://"+ops
	var closed []member
	eventually(t, "the status says until when it is closed", func() bool {
		closed = objects[member](t, start(t, "status", "--backend", url, "--json").output())
		return len(closed) == 1 && closed[0].Role == roleClosed
	})
	until, err := time.Parse(time.RFC3339, closed[0].ClosedUntil)
	if left := time.Until(until); err != nil || left < 55*time.Minute || left > time.Hour {
		t.Errorf("closed until %q, %v from now: %v", closed[0].ClosedUntil, left, err)
	}
	const sentence = "the cluster was restored and is closed until "
	for _, own := range [][]string{nil, {"--own"}} {
		start(t, append([]string{"status", "--backend", url}, own...)...).
			expectExit(exitUnavailable, sentence, "closed until ")
	}
	start(t, "holder", "x", "--backend", url).expectExit(exitUnavailable, sentence)
	start(t, "run", "--backend", url, "--name", "x", "--try", "--", "true").expectExit(exitUnavailable, sentence)
	start(t, "member", "list", "--backend", url).expectExit(exitUnavailable, sentence)
	for _, at := range []string{door, watched} {
		status, text := fetch(t, at+"/readyz")
		if status != http.StatusServiceUnavailable || !strings.Contains(text, sentence) {
			t.Errorf("readyz: %d %s", status, text)
		}
	}
	if _, text := fetch(t, watched+"/metrics"); !strings.Contains(text, "\nfencelock_member_closed_seconds 35") {
		t.Errorf("metrics:\n%s", text)
	}
	if states := objects[closedState](t, succeed(t, "open", "--backend", url, "--json")); len(states) != 1 ||
		states[0].UsedTTL != 7 {
		t.Errorf("open shows %+v", states)
	}
	start(t, "status", "--backend", url).expectExit(exitUnavailable, sentence)

	succeed(t, "open", "--yes", "--backend", url)
	succeed(t, "open", "--yes", "--backend", url) // once more
	tokenAt(t, url)
	succeed(t, "status", "--backend", url)
}

// fetch returns the answer to a GET.
func fetch(t *testing.T, url string) (status int, text string) {
	t.Helper()
	r, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	all, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(all)
}
