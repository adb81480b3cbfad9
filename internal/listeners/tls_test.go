package listeners

import (
	"bytes"
	"crypto/tls"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/testcert"
)

// patience is the maximum time until a condition becomes true on a busy machine.
const patience = 30 * time.Second

// files are a certificate and its key, which a test replaces.
type files struct {
	*testing.T
	cert, key string
}

func (f *files) put(cert, key string) {
	f.Helper()
	for from, to := range map[string]string{cert: f.cert, key: f.key} {
		text, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(to+".next", text, 0o600)
		}
		if err == nil {
			err = os.Rename(to+".next", to)
		}
		if err != nil {
			f.Fatal(err)
		}
	}
}

// The served certificate follows the files, within a second or on Reload. Invalid files are logged and change nothing.
func TestTLSFollowsItsFiles(t *testing.T) {
	t.Parallel()
	authority, dir := testcert.New(t), t.TempDir()
	f := &files{t, filepath.Join(dir, "cert"), filepath.Join(dir, "key")}
	f.put(authority.Sign(t, "first"))
	var log bytes.Buffer
	served, err := NewTLS(func() (*Material, error) {
		pair, err := tls.LoadX509KeyPair(f.cert, f.key)
		return &Material{Pair: pair}, err
	}, slog.New(slog.NewTextHandler(&log, nil)), f.cert, f.key)
	if err != nil {
		t.Fatal(err)
	}
	name := func() string {
		c, err := served.Config().GetConfigForClient(&tls.ClientHelloInfo{})
		if err != nil {
			t.Fatal(err)
		}
		return c.Certificates[0].Leaf.Subject.CommonName
	}
	await := func(what string) {
		t.Helper()
		for end := time.Now().Add(patience); name() != what; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s is served, want %s; log: %s", name(), what, &log)
			}
		}
	}
	await("first")
	f.put(authority.Sign(t, "second"))
	await("second")

	// First a certificate with another key, as when only one of the two files has been replaced; then a truncated file.
	third, key := authority.Sign(t, "third")
	f.put(third, f.key)
	served.Reload()
	if err := os.WriteFile(f.cert, []byte("-----BEGIN"), 0o600); err != nil {
		t.Fatal(err)
	}
	served.Reload()
	if name() != "second" || strings.Count(log.String(), "level=WARN") != 2 {
		t.Errorf("%s is served; log: %s", name(), &log)
	}
	f.put(third, key)
	served.Reload()
	if name() != "third" || served.Certificate().Subject.CommonName != "third" {
		t.Errorf("%s is served; log: %s", name(), &log)
	}
}

func TestTLSNeedsItsFiles(t *testing.T) {
	t.Parallel()
	missing := errors.New("missing")
	if _, err := NewTLS(func() (*Material, error) { return nil, missing }, slog.Default()); !errors.Is(err, missing) {
		t.Error(err)
	}
	if c := (*TLS)(nil).Config(); c != nil {
		t.Errorf("without files there is a configuration: %v", c)
	}
}
