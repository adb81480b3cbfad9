package objectguard_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/golden"
	"github.com/fencelock/fencelock/fencing/objectguard"
)

func TestGolden(t *testing.T) {
	var out strings.Builder
	var mu sync.Mutex
	b := &bucket{dir: t.TempDir()}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		recorded := httptest.NewRecorder()
		b.ServeHTTP(recorded, r)
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprintf(&out, "%s %s", r.Method, r.URL.EscapedPath())
		for _, name := range []string{"If-Match", "If-None-Match", "Cache-Control"} {
			if value := r.Header.Get(name); value != "" {
				fmt.Fprintf(&out, "  %s: %s", name, value)
			}
		}
		fmt.Fprintf(&out, "  → %d", recorded.Code)
		if etag := recorded.Header().Get("ETag"); etag != "" {
			fmt.Fprintf(&out, " ETag: %s", etag)
		}
		out.WriteString("\n")
		for line := range strings.Lines(string(body)) {
			fmt.Fprintf(&out, "  | %s\n", strings.TrimSuffix(line, "\n"))
		}
		for name, values := range recorded.Header() {
			w.Header()[name] = values
		}
		w.WriteHeader(recorded.Code)
		w.Write(recorded.Body.Bytes())
	}))
	defer server.Close()
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	guard, err := objectguard.New(&objectguard.HTTP{URL: server.URL + "/bucket", Client: client},
		&objectguard.Options{Prefix: "guarded/"})
	if err != nil {
		t.Fatal(err)
	}
	title := func(text string) { mu.Lock(); fmt.Fprintf(&out, "\n# %s\n", text); mu.Unlock() }
	nonce, err := fencing.ParseNonce("5a2f19fbb6b44c5f8f7b1d3c9a0e6f21")
	if err != nil {
		t.Fatal(err)
	}
	claim := fencing.Claim{Resource: "state", Token: 33, Space: "cluster 1", Nonce: nonce}
	out.WriteString("UNIQUE and ID are random, UNIQUE is another one in each PUT; TAG is what the store gave.\n")
	title("create")
	if err := guard.Create(t.Context()); err != nil {
		t.Error(err)
	}
	title("the first claim of all, shown")
	if err := guard.Check(t.Context(), claim); err != nil {
		t.Error(err)
	}
	title("the 7th write of the hold")
	if err := guard.Put(t.Context(), claim.At(7), []byte("first\nsecond\n")); err != nil {
		t.Error(err)
	}
	title("accept etcd/2 from token 5 on")
	if err := guard.Accept(t.Context(), "etcd/2", 5); err != nil {
		t.Error(err)
	}
	text := regexp.MustCompile(`"[0-9a-f]{32}"`).ReplaceAllString(out.String(), `"TAG"`)
	text = regexp.MustCompile(` 2 [0-9a-f]{32} `).ReplaceAllString(text, " 2 ID ")
	golden.Compare(t, "object.txt", regexp.MustCompile(`\b[A-Z2-7]{26}\b`).ReplaceAllString(text, "UNIQUE"))
}
