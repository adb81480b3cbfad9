package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/fencelock/fencelock/internal/listeners"
)

// certificates are a certificate and its key, as files in PEM.
type certificates struct{ cert, key string }

// definePeer adds the options for the certificates of members.
func (c *certificates) definePeer(o *options, ca *string) {
	o.StringVar(&c.cert, "peer-cert", "", "a `FILE` in PEM with the certificate for connections between members. All "+
		"members need certificates of the same authority. The certificate must name the host of --peer-advertise, or "+
		"else of --peer-listen")
	o.StringVar(&c.key, "peer-key", "", "a `FILE` with the key of --peer-cert")
	o.StringVar(ca, "peer-ca", "", "a `FILE` with the authority of the members' certificates")
}

// forClients returns the TLS settings for clients, nil without certificates. With ca, clients need a certificate of
// that authority.
func (c certificates) forClients(ca string, log *slog.Logger) (*listeners.TLS, error) {
	if c == (certificates{}) && ca == "" {
		return nil, nil
	}
	return c.load("--tls-cert", "--tls-key", "--tls-client-ca", ca, log)
}

// forPeers returns the TLS settings for members, in both directions; nil without certificates.
func (c certificates) forPeers(ca string, log *slog.Logger) (*listeners.TLS, error) {
	if c == (certificates{}) && ca == "" {
		return nil, nil
	}
	if ca == "" {
		return nil, errors.New("--peer-ca is missing: without it, members would accept any certificate")
	}
	return c.load("--peer-cert", "--peer-key", "--peer-ca", ca, log)
}

// load reads the files of the options. ca may be empty.
func (c certificates) load(cert, key, authorityOption, ca string, log *slog.Logger) (*listeners.TLS, error) {
	if c.cert == "" || c.key == "" {
		return nil, fmt.Errorf("%s and %s belong together", cert, key)
	}
	paths := []string{c.cert, c.key}
	if ca != "" {
		paths = append(paths, ca)
	}
	return listeners.NewTLS(func() (m *listeners.Material, err error) {
		m = &listeners.Material{}
		if m.Pair, err = tls.LoadX509KeyPair(c.cert, c.key); err != nil {
			return nil, fmt.Errorf("%s: %w", cert, err)
		}
		if ca != "" {
			m.Authority, err = authority(authorityOption, ca)
		}
		return m, err
	}, log, paths...)
}

func authority(option, file string) (*x509.CertPool, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", option, err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s: %s contains no certificate", option, file)
	}
	return pool, nil
}

// reloader is the content of files; Reload rereads them.
type reloader interface{ Reload() }

// reloadOnHangup rereads files on each SIGHUP, until ctx ends. SIGHUP ends no server: tools that replace certificates
// or log files send it.
func reloadOnHangup(ctx context.Context, log *slog.Logger, all ...reloader) {
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	go func() {
		defer signal.Stop(hangups)
		for {
			select {
			case <-hangups:
				log.Info("SIGHUP: reloading files")
				for _, t := range all {
					t.Reload()
				}
			case <-ctx.Done():
				return
			}
		}
	}()
}
