//go:build unix

package main

import (
	"path/filepath"
	"testing"

	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/testcert"
)

// What changes a cluster goes through the socket in the data directory, whatever clients need; over TCP it takes the
// certificate of an operator; and clients cannot do it.
func TestChangesAreForOperators(t *testing.T) {
	t.Parallel()
	clients, operators := testcert.New(t), testcert.New(t)
	cert, key := clients.Sign(t, "localhost")
	withTLS := []string{"--tls-cert", cert, "--tls-key", key, "--tls-client-ca", clients.File}
	asClient := func(p *program) string {
		return "fencelocks://" + p.await("fencelock: serving clients at ") + "?server-name=localhost&ca=" + clients.File +
			"&cert=" + cert + "&key=" + key
	}
	serve := func(dir string, more ...string) *program {
		return start(t, append(append([]string{"serve", "--data-dir", dir, "--listen", "127.0.0.1:0", "--peer-listen",
			"127.0.0.1:0"}, withTLS...), more...)...)
	}
	file := filepath.Join(t.TempDir(), "file")

	dir := filepath.Join(t.TempDir(), "data")
	byClient := asClient(serve(dir))
	socket := "unix:" + filepath.Join(dir, "admin.sock")
	for _, by := range [][]string{{"--data-dir", dir}, {"--backend", socket}, {"--backend", byClient}} {
		if all := objects[backup](t, succeed(t, append([]string{"backup", file, "--json"}, by...)...)); len(all) != 1 {
			t.Errorf("%s: %+v", by, all)
		}
		if all := objects[peer](t, succeed(t, append([]string{"member", "list", "--json"}, by...)...)); len(all) != 1 {
			t.Errorf("%s: %+v", by, all)
		}
		start(t, append([]string{"transfer"}, by...)...).expectExit(exitRefused, "no other member with a vote")
		succeed(t, append([]string{"open", "--yes"}, by...)...)
	}
	succeed(t, "status", "--backend", socket)
	start(t, "backup", file, "--data-dir", t.TempDir()).expectExit(exitUnavailable, "admin.sock")

	byClient = asClient(serve(filepath.Join(t.TempDir(), "none"), "--admin-listen", "none"))
	succeed(t, "status", "--backend", byClient)
	start(t, "backup", file, "--backend", byClient).expectExit(exitRefused, "--admin-listen")

	at := freeport.Addresses(t, 1)[0]
	byClient = asClient(serve(filepath.Join(t.TempDir(), "tcp"), "--admin-listen", at, "--admin-client-ca", operators.File))
	start(t, "backup", file, "--backend", byClient).expectExit(exitUnavailable)
	cert, key = operators.Sign(t, "operator")
	succeed(t, "backup", file, "--backend",
		"fencelocks://"+at+"?server-name=localhost&ca="+clients.File+"&cert="+cert+"&key="+key)
}
