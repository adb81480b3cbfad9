package replica

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
)

// The certificate of a member identifies members at the hosts that it names, and no others. A certificate from the
// right authority only permits its owner to ask for membership. So a server that dials for raft must have a certificate
// that names the host of a member, and a dialled server must have a certificate that names the dialled host.
//
// A member that was down may not know newer members. It refuses the first connection of a newer member, asks the
// members that it knows, whose certificates it checks, and then accepts the next connection.

// certificateOf returns the certificate of the other side; nil without TLS.
func certificateOf(conn net.Conn) *x509.Certificate {
	if t, ok := conn.(*trackedConn); ok {
		conn = t.Conn
	}
	if t, ok := conn.(*tls.Conn); ok {
		if all := t.ConnectionState().PeerCertificates; len(all) > 0 {
			return all[0]
		}
	}
	return nil
}

// certifiedFor reports whether the certificate names host. A nil certificate names no host.
func certifiedFor(c *x509.Certificate, host string) bool {
	return c != nil && c.VerifyHostname(host) == nil
}

// hostOf returns the host that the certificate of a member at an address must name.
func (p *peerNet) hostOf(address string) string {
	if p.tls != nil && p.tls.ServerName != "" {
		return p.tls.ServerName
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return address
	}
	return host
}

// checkCertificate returns an error for a raft connection from a server that is not a known member. It then asks the
// known members for further members in the background.
func (p *peerNet) checkCertificate(c *x509.Certificate) error {
	known := p.now.Load().members()
	if p.tls == nil || len(known) == 0 { // no identity without TLS, and a member without a cluster accepts any
		return nil
	}
	p.mu.Lock()
	told := slices.AppendSeq(slices.Clone(p.told), maps.Values(p.book))
	p.mu.Unlock()
	names := func(address string) bool { return certifiedFor(c, p.hostOf(address)) }
	if slices.ContainsFunc(slices.Concat(known, told), names) {
		return nil
	}
	select {
	case p.asking <- struct{}{}:
		p.serving.Go(func() {
			defer func() { <-p.asking }()
			p.askAround(known)
		})
	default:
	}
	if c == nil {
		return errNoCertificate
	}
	return fmt.Errorf("its certificate, for %q, names the host of no member", c.Subject.CommonName)
}

var errNoCertificate = errors.New("it shows no certificate")

// askAround asks the known members for further members.
func (p *peerNet) askAround(known []string) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stopped := make(chan struct{})
	defer close(stopped)
	go func() {
		select {
		case <-p.done:
			cancel()
		case <-stopped:
		}
	}()
	var told []string
	for _, address := range known {
		if address == p.advertise {
			continue
		}
		if a, err := p.ask(ctx, address, question{}); err == nil {
			told = append(told, a.Members...)
		}
	}
	p.mu.Lock()
	p.told = told
	p.mu.Unlock()
}

// nonceBytes is the minimum length of the nonce of a proof.
const nonceBytes = 16

// proofOfKey returns a proof, for the member that chose the nonce, that m knows the key. The proof is valid only for m
// at its address, so a server that forwards the request to m cannot use it. The key itself is never sent.
func proofOfKey(key, nonce []byte, m member) []byte {
	sum := hmac.New(sha256.New, key)
	fmt.Fprintf(sum, "fencelock join\n%x\n%q\n%q\n", nonce, m.ID, m.Peer)
	return sum.Sum(nil)
}

// askForKey asks for the identity of the server at an address. proven reports whether it knows the key of this cluster.
func (r *Replica) askForKey(ctx context.Context, address string) (a answer, proven bool, err error) {
	return r.askProven(ctx, address, question{})
}

// askProven asks q of the server at an address. proven reports whether the server knows the key of this cluster.
func (r *Replica) askProven(ctx context.Context, address string, q question) (a answer, proven bool, err error) {
	if len(r.config.JoinKey) > 0 {
		q.Prove = make([]byte, nonceBytes)
		rand.Read(q.Prove) // never fails
	}
	a, err = r.peers.ask(ctx, address, q)
	if err != nil || q.Prove == nil {
		return a, false, err
	}
	want := proofOfKey(r.config.JoinKey, q.Prove, member{ID: a.ID, Peer: address})
	return a, hmac.Equal(a.Proof, want), nil
}
