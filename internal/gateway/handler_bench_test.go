package gateway

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend/memory"
)

// unread is an answer that nobody reads.
type unread struct {
	header http.Header
	status int
	body   []byte
}

func (u *unread) Header() http.Header { return u.header }
func (u *unread) Write(text []byte) (int, error) {
	u.body = append(u.body, text...)
	return len(text), nil
}
func (u *unread) WriteHeader(status int) { u.status = status }

// BenchmarkHandler measures an acquire and a release by the handler alone, with the access log and metrics.
func BenchmarkHandler(b *testing.B) {
	driver := memory.New(nil)
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	g, err := New(Options{
		Driver: driver, Key: make([]byte, 32), Log: log, AccessLog: true,
		Observe: func(string, string, int, time.Duration) {}, Limits: Limits{ClientOperations: 1e9},
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		g.Close(b.Context())
		_ = driver.Close(b.Context())
	})
	out := &unread{header: http.Header{}}
	post := func(call, body string) string {
		r := httptest.NewRequestWithContext(b.Context(), http.MethodPost, "/v1/locks/x/"+call, strings.NewReader(body))
		r.Host, r.RemoteAddr = "localhost:7481", "127.0.0.1:9"
		r.Header.Set("Content-Type", "application/json")
		clear(out.header)
		out.status, out.body = 0, out.body[:0]
		g.Handler().ServeHTTP(out, r)
		if out.status != http.StatusOK {
			b.Fatalf("%s: %d %s", call, out.status, out.body)
		}
		return string(out.body)
	}
	b.ReportAllocs()
	for b.Loop() {
		_, rest, _ := strings.Cut(post("acquire", `{"ownerId":"a","ttlMillis":30000,"wait":true}`), `"lockToken":"`)
		token, _, _ := strings.Cut(rest, `"`)
		post("release", `{"lockToken":"`+token+`"}`)
	}
}
