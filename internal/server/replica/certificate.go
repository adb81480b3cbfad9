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
	"net"
	"slices"
)

// The certificate of a member speaks for members at the hosts that it names, and for no others: that it comes from the
// right authority says that its owner may ask to be a member, not that it is one. So a server that dials for raft must
// show one that names the host of a member, and one that is dialled must show one that names the host that was dialled.
//
// A member that was away may not know the newer ones. It asks those that it does know, who show that they are who they
// are, and lets the next attempt through.

// certificateOf is what the other side has shown; nil without TLS.
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

// certifiedFor reports whether the certificate names host. None names nothing.
func certifiedFor(c *x509.Certificate, host string) bool {
	return c != nil && c.VerifyHostname(host) == nil
}

// hostOf is what the certificate of a member at that address has to name.
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

// checkCertificate refuses a connection for raft of one that is no member.
func (p *peerNet) checkCertificate(c *x509.Certificate) error {
	known := p.members()
	if p.tls == nil || len(known) == 0 { // without TLS nobody can show who it is; and who is in no cluster serves any
		return nil
	}
	p.mu.Lock()
	told := p.told
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

// askAround asks the members that are known here which others there are.
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

// nonceBytes is the least length of what a proof is made over.
const nonceBytes = 16

// proofOfKey shows that m knows the key to the member that chose the nonce, and for nobody else than m at its address:
// one that only passes the question on to m gets a proof that is of no use to it. The key itself is never sent.
func proofOfKey(key, nonce []byte, m member) []byte {
	sum := hmac.New(sha256.New, key)
	fmt.Fprintf(sum, "fencelock join\n%x\n%q\n%q\n", nonce, m.ID, m.Peer)
	return sum.Sum(nil)
}

// askForKey asks who is at an address, and whether it knows the key of this cluster.
func (r *Replica) askForKey(ctx context.Context, address string) (a answer, proven bool, err error) {
	var q question
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
