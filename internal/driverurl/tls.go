// Package driverurl reads what the URLs of several drivers have in common.
package driverurl

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/url"
	"os"
)

// TLS returns the settings that the options ca, cert, key and server-name of a URL ask for: files in PEM form, and the
// name to expect in the servers' certificates. No options: the system's authorities, and the name that is dialled.
func TLS(options url.Values) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: options.Get("server-name")}
	if file := options.Get("ca"); file != "" {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("ca: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("ca: %s has no certificate in PEM form", file)
		}
	}
	cert, key := options.Get("cert"), options.Get("key")
	if (cert == "") != (key == "") {
		return nil, fmt.Errorf("cert and key belong together")
	}
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("cert: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}
