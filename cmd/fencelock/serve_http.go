package main

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"

	"github.com/fencelock/fencelock/internal/listeners"
)

// clusterClient has the client settings with which a member that serves HTTP speaks to the leader.
type clusterClient struct {
	certificates
	ca     string
	tls    *listeners.TLS // nil without --cluster-cert
	config *tls.Config    // nil without TLS
}

func (c *clusterClient) define(o *options) {
	o.StringVar(&c.cert, "cluster-cert", "", "a `FILE` with the client certificate with which this member forwards "+
		"HTTP requests to another leader; the default is --tls-cert")
	o.StringVar(&c.key, "cluster-key", "", "a `FILE` with the key of --cluster-cert")
	o.StringVar(&c.ca, "cluster-ca", "", "a `FILE` with the authority of the other members' --tls-cert. The default "+
		"is --tls-client-ca, or else the system's authorities")
}

// prepareClient sets s.cluster.config, and refuses settings with which this member would serve HTTP only while it
// leads.
func (s *serveSettings) prepareClient() (err error) {
	c := &s.cluster
	if s.tls == nil {
		if c.certificates != (certificates{}) || c.ca != "" {
			return errors.New("--cluster-ca, --cluster-cert and --cluster-key need --tls-cert")
		}
		return s.checkAdvertised()
	}
	own := s.tls
	if c.certificates != (certificates{}) {
		if c.tls, err = c.load("--cluster-cert", "--cluster-key", "", "", s.config.Log); err != nil {
			return err
		}
		own = c.tls
	}
	roots := s.tls.Current().ClientCAs
	if c.ca != "" {
		if roots, err = authority("--cluster-ca", c.ca); err != nil {
			return err
		}
	}
	c.config = &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: roots,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return &own.Current().Certificates[0], nil
		},
	}
	if s.join == "" { // a single member reaches itself without a socket
		return nil
	}
	if err := s.checkAdvertised(); err != nil {
		return err
	}
	host, _, err := net.SplitHostPort(cmp.Or(s.config.Advertise, s.config.Listen))
	if err != nil {
		return nil // the server reports that
	}
	if err := verify(s.tls, roots, host, x509.ExtKeyUsageServerAuth); err != nil {
		return fmt.Errorf("--http-listen: this member could not connect to another leader with a certificate like "+
			"that of --tls-cert: %w; give --cluster-ca, or a certificate for the host of --advertise", err)
	}
	if pool := s.tls.Current().ClientCAs; pool != nil {
		if err := verify(own, pool, "", x509.ExtKeyUsageClientAuth); err != nil {
			return fmt.Errorf("--http-listen: another leader accepts only clients with a certificate of "+
				"--tls-client-ca, and this member's certificate is not one: %w; give --cluster-cert and "+
				"--cluster-key", err)
		}
	}
	return nil
}

// checkAdvertised refuses a member of a cluster whose address for clients, by which the HTTP servers of the others find
// it, is no address of one machine.
func (s *serveSettings) checkAdvertised() error {
	host, _, err := net.SplitHostPort(cmp.Or(s.config.Advertise, s.config.Listen))
	if err != nil || s.join == "" {
		return nil // the server reports the error
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		return fmt.Errorf("--http-listen: the other members cannot connect to --listen %s when this member leads: "+
			"give --advertise", s.config.Listen)
	}
	return nil
}

// verify returns an error if the certificate of t is unfit for one purpose.
func verify(t *listeners.TLS, roots *x509.CertPool, host string, purpose x509.ExtKeyUsage) error {
	between := x509.NewCertPool()
	for _, der := range t.Current().Certificates[0].Certificate[1:] {
		if c, err := x509.ParseCertificate(der); err == nil {
			between.AddCert(c)
		}
	}
	_, err := t.Certificate().Verify(x509.VerifyOptions{
		Roots: roots, Intermediates: between, DNSName: host, KeyUsages: []x509.ExtKeyUsage{purpose},
	})
	return err
}
