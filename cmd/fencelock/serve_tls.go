package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
)

// certificates are a certificate and its key, as files in PEM.
type certificates struct{ cert, key string }

// forClients returns what clients see, nil without certificates. With ca, they need a certificate of that authority.
func (c certificates) forClients(ca string) (*tls.Config, error) {
	if c == (certificates{}) && ca == "" {
		return nil, nil
	}
	config, err := c.load("--tls-cert", "--tls-key")
	if err != nil || ca == "" {
		return config, err
	}
	config.ClientAuth = tls.RequireAndVerifyClientCert
	config.ClientCAs, err = authority("--tls-client-ca", ca)
	return config, err
}

// forPeers returns what members see of each other, in both directions; nil without certificates.
func (c certificates) forPeers(ca string) (*tls.Config, error) {
	if c == (certificates{}) && ca == "" {
		return nil, nil
	}
	if ca == "" {
		return nil, errors.New("--peer-ca is missing: without it every member would take anybody for one")
	}
	config, err := c.load("--peer-cert", "--peer-key")
	if err != nil {
		return nil, err
	}
	pool, err := authority("--peer-ca", ca)
	config.ClientAuth, config.ClientCAs, config.RootCAs = tls.RequireAndVerifyClientCert, pool, pool
	return config, err
}

func (c certificates) load(cert, key string) (*tls.Config, error) {
	if c.cert == "" || c.key == "" {
		return nil, fmt.Errorf("%s and %s belong together", cert, key)
	}
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", cert, err)
	}
	return &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13}, nil
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
