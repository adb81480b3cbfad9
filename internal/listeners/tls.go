// Package listeners is the common part of all listeners: a limit for the connections of a process, TLS with files that
// are reread when they change, the ops listener, and Unix sockets.
package listeners

import (
	"crypto/tls"
	"crypto/x509"
	"log/slog"

	"github.com/fencelock/fencelock/internal/tlsfiles"
)

// Material is the content of the TLS files.
type Material struct {
	Pair      tls.Certificate
	Authority *x509.CertPool // verifies the peer's certificate; nil: no certificate is required
}

// TLS is a TLS configuration from files that are reread when they change. If a file cannot be read, or does not match
// the others, the last valid files stay in use and TLS logs a warning. All methods are safe for concurrent use.
type TLS struct{ files *tlsfiles.Files[*tls.Config] }

// NewTLS reads the files. read reads all of them; paths are the files to watch.
func NewTLS(read func() (*Material, error), log *slog.Logger, paths ...string) (*TLS, error) {
	files, err := tlsfiles.Read(func() (*tls.Config, error) {
		m, err := read()
		if err != nil {
			return nil, err
		}
		return m.config(), nil
	}, func(config *tls.Config, err error) {
		until := config.Certificates[0].Leaf.NotAfter
		if err != nil {
			log.Warn("the TLS files are invalid: the previous files stay in use", "files", paths, "error", err,
				"valid-until", until)
			return
		}
		log.Info("the TLS files were read", "files", paths, "valid-until", until)
	}, paths...)
	if err != nil {
		return nil, err
	}
	return &TLS{files}, nil
}

// config returns a configuration for clients and servers.
func (m *Material) config() *tls.Config {
	c := &tls.Config{
		Certificates: []tls.Certificate{m.Pair}, MinVersion: tls.VersionTLS13, NextProtos: []string{"h2", "http/1.1"},
	}
	if m.Authority != nil {
		c.ClientAuth, c.ClientCAs, c.RootCAs = tls.RequireAndVerifyClientCert, m.Authority, m.Authority
	}
	return c
}

// Config returns a configuration for servers, which uses the files in use when a connection begins. A client calls its
// GetConfigForClient to get a configuration. Config returns nil if t is nil.
func (t *TLS) Config() *tls.Config {
	if t == nil {
		return nil
	}
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return t.Current(), nil },
	}
}

// Certificate returns the certificate in use.
func (t *TLS) Certificate() *x509.Certificate { return t.Current().Certificates[0].Leaf }

// Current returns the configuration from the files in use, for clients and servers. The caller must not change it.
func (t *TLS) Current() *tls.Config { return t.files.Current() }

// Reload reads the files immediately, even if they have not changed. It does nothing if t is nil.
func (t *TLS) Reload() {
	if t != nil {
		t.files.Reload()
	}
}
