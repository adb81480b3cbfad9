package builtin_test

import (
	"context"
	"crypto/tls"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/principal"
)

// refusesNothing is Server.RefuseRelease and, without tokens, Server.RefuseWrites: rules and policies refuse acquires
// only, and every client of a server without tokens may release and renew its holds.
func refusesNothing(testing.TB, string) func() { return nil }

// TestConformanceWithTokens runs the clauses of refusals on a server that no longer accepts the token of its clients.
func TestConformanceWithTokens(t *testing.T) {
	t.Parallel()
	s := startTokens(t, "allow token:app acquire,read \"\"\nallow token:ops acquire,read,force \"\"\n")
	lines, files := map[string]string{}, map[string]string{}
	for _, who := range []string{"token:app", "token:ops"} {
		token := principal.NewToken()
		lines[who] = principal.TokenLine(principal.Principal(who), token, time.Time{}) + "\n"
		files[who] = filepath.Join(t.TempDir(), "token")
		tokenIn(t, files[who], token)
	}
	s.knows(lines["token:app"] + lines["token:ops"])
	config := &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: s.authority.Server(t, "x").ClientCAs, ServerName: "locks.test",
	}
	var mu sync.Mutex // protects the following variable
	var connections []net.Conn
	client := func(file, addr string) *builtin.Driver {
		return builtin.New([]string{s.Addr().String()}, &builtin.Options{
			TLS: config, TokenFile: file,
			Dial: func(ctx context.Context, _ string) (net.Conn, error) {
				c, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
				if err == nil && file == files["token:app"] {
					mu.Lock()
					defer mu.Unlock()
					connections = append(connections, c)
				}
				return c, err
			},
		})
	}
	ops := client(files["token:ops"], s.Addr().String())
	t.Cleanup(func() { _ = ops.Close(context.Background()) })
	h := harness(admin{ops})
	h.Principal, h.TTL = "token:app", 9*time.Second // half of it passes while the server refuses
	h.New = func(testing.TB) backend.Driver { return client(files["token:app"], s.Addr().String()) }
	h.Linked = func(t testing.TB) (backend.Driver, fault.Link) {
		p := newProxy(t, s.Addr().String())
		return client(files["token:app"], p.Addr()), p
	}
	h.Server.RefuseWrites = func(testing.TB, string) func() {
		s.knows(lines["token:ops"])
		// The server ends the connections of a token that was removed, but not immediately.
		mu.Lock()
		defer mu.Unlock()
		for _, c := range connections {
			_ = c.Close()
		}
		connections = nil
		return func() { s.knows(lines["token:app"] + lines["token:ops"]) }
	}
	conformance.Run(t, h, "refusals")
}
