package listeners

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
)

func TestOps(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var ready atomic.Bool
	ready.Store(true)
	metrics := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "metrics") })
	handler := Ops(Probes(func(context.Context) error {
		if ready.Load() {
			return nil
		}
		return errors.New("not yet")
	}), metrics)
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- ServeOps(ctx, l, handler, slog.New(slog.DiscardHandler)) }()
	get := func(path string, want int, part string) {
		t.Helper()
		r, err := http.Get("http://" + l.Addr().String() + path)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		if text, err := io.ReadAll(r.Body); err != nil || r.StatusCode != want || !strings.Contains(string(text), part) {
			t.Errorf("%s: %d %s %v, want %d %s", path, r.StatusCode, text, err, want, part)
		}
	}
	get(LivePath, 200, `{"live":true}`)
	get(ReadyPath, 200, `{"ready":true}`)
	ready.Store(false)
	get(ReadyPath, 503, `{"ready":false,"detail":"not yet"}`)
	get(MetricsPath, 200, "metrics")
	get("/", 404, "")
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
}
