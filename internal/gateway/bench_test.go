package gateway_test

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/builtin/embedded"
	"github.com/fencelock/fencelock/internal/gateway"
)

// BenchmarkCycle measures an acquire and a release on one durable server: through the SDK, and through a gateway over
// HTTP/1.1.
func BenchmarkCycle(b *testing.B) {
	quiet := slog.New(slog.DiscardHandler)
	server, err := embedded.Start(b.Context(), embedded.Options{DataDir: b.TempDir(), Logger: quiet})
	if err != nil {
		b.Fatal(err)
	}
	defer server.Close(context.Background())
	b.Run("sdk", func(b *testing.B) {
		locks, err := fencelock.ForCorrectness(server.Driver(nil), nil)
		if err != nil {
			b.Fatal(err)
		}
		defer locks.Close(context.Background())
		for b.Loop() {
			lease, err := locks.Acquire(b.Context(), "x")
			if err == nil {
				err = lease.Release(b.Context())
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("http", func(b *testing.B) {
		driver := server.Driver(nil)
		defer driver.Close(context.Background())
		g, err := gateway.New(gateway.Options{Driver: driver, Log: quiet})
		if err != nil {
			b.Fatal(err)
		}
		defer g.Close(context.Background())
		door := httptest.NewServer(g.Handler())
		defer door.Close()
		post := func(call, body string) (answer gateway.Lock) {
			resp, err := http.Post(door.URL+"/v1/locks/x/"+call, "application/json", strings.NewReader(body))
			if err != nil {
				b.Fatal(err)
			}
			defer resp.Body.Close()
			text, err := io.ReadAll(resp.Body)
			if err != nil || resp.StatusCode != http.StatusOK || json.Unmarshal(text, &answer) != nil {
				b.Fatalf("%s: %d %s %v", call, resp.StatusCode, text, err)
			}
			return answer
		}
		for b.Loop() {
			l := post("acquire", `{"ownerId":"a","ttlMillis":30000}`)
			post("release", `{"lockToken":"`+l.LockToken+`"}`)
		}
	})
}
