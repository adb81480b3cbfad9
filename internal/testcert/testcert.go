// Package testcert makes certificates for the tests of drivers: an authority, and its certificates, as files in PEM
// form. They are valid for an hour.
package testcert

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// Authority signs certificates.
type Authority struct {
	File string // its own certificate

	dir         string
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

// New returns an authority that only the test trusts.
func New(t testing.TB) *Authority {
	t.Helper()
	a := &Authority{dir: t.TempDir()}
	template := template("authority")
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage = x509.KeyUsageCertSign
	a.File, _, a.certificate, a.key = a.make(t, template)
	return a
}

func template(name string) *x509.Certificate {
	return &x509.Certificate{
		Subject:      pkix.Name{CommonName: name},
		SerialNumber: big.NewInt(time.Now().UnixNano()),
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(time.Hour),
	}
}

// Sign returns the files of a certificate, for a server called host or a client of that name, and of its key. It is for
// the given uses, or for both.
func (a *Authority) Sign(t testing.TB, host string, uses ...x509.ExtKeyUsage) (certificate, key string) {
	t.Helper()
	template := template(host)
	template.DNSNames = []string{host}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	if template.ExtKeyUsage = uses; len(uses) == 0 {
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	}
	certificate, key, _, _ = a.make(t, template)
	return certificate, key
}

// make writes a certificate and its key; an authority without a certificate signs itself.
func (a *Authority) make(t testing.TB, template *x509.Certificate) (
	string, string, *x509.Certificate, *ecdsa.PrivateKey,
) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	parent, signer := a.certificate, a.key
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	base := filepath.Join(a.dir, rand.Text())
	write(t, base+".pem", "CERTIFICATE", der)
	write(t, base+".key", "PRIVATE KEY", secret)
	return base + ".pem", base + ".key", certificate, key
}

func write(t testing.TB, file, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

// Server returns the settings of a server called host that takes only clients with a certificate of the authority.
func (a *Authority) Server(t testing.TB, host string) *tls.Config {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(a.Sign(t, host))
	if err != nil {
		t.Fatal(err)
	}
	clients := x509.NewCertPool()
	clients.AddCert(a.certificate)
	return &tls.Config{
		MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}, ClientCAs: clients,
		ClientAuth: tls.RequireAndVerifyClientCert,
	}
}

// Terminate accepts TLS at the address it returns, and speaks to upstream in the clear, until the test ends.
func Terminate(t testing.TB, config *tls.Config, upstream string) (addr string) {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", config)
	if err != nil {
		t.Fatal(err)
	}
	p := &terminator{upstream: upstream, open: map[net.Conn]struct{}{}}
	p.work.Go(func() { p.accept(l) })
	t.Cleanup(func() {
		_ = l.Close()
		p.close()
	})
	return l.Addr().String()
}

type terminator struct {
	upstream string
	work     sync.WaitGroup

	mu     sync.Mutex // protects the following fields
	closed bool
	open   map[net.Conn]struct{}
}

func (p *terminator) accept(l net.Listener) {
	for {
		down, err := l.Accept()
		if err != nil {
			return
		}
		if p.keep(down) {
			p.work.Go(func() { p.serve(down) })
		}
	}
}

// keep notes a connection, so that close ends it.
func (p *terminator) keep(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		_ = c.Close()
		return false
	}
	p.open[c] = struct{}{}
	return true
}

func (p *terminator) drop(c net.Conn) {
	_ = c.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.open, c)
}

func (p *terminator) serve(down net.Conn) {
	defer p.drop(down)
	if err := down.(*tls.Conn).Handshake(); err != nil {
		return
	}
	up, err := net.Dial("tcp", p.upstream)
	if err != nil || !p.keep(up) {
		return
	}
	p.work.Go(func() {
		_, _ = io.Copy(up, down)
		p.drop(up)
	})
	_, _ = io.Copy(down, up)
}

func (p *terminator) close() {
	p.mu.Lock()
	p.closed = true
	for c := range p.open {
		_ = c.Close()
	}
	p.mu.Unlock()
	p.work.Wait()
}
