package server

// The client behind a connection. Limits count by client, so that only a client that takes too much is refused.

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"net"
	"net/netip"

	"google.golang.org/grpc/credentials"
	grpcpeer "google.golang.org/grpc/peer"

	"github.com/fencelock/fencelock/internal/listeners"
	"github.com/fencelock/fencelock/internal/principal"
)

// clientOf returns the client of a connection: the principal of its token, or else the name of its certificate, or
// else its address. The state of all connections of one client counts together. Within the process it is the name
// given to AttachDoor, or empty: no share.
func clientOf(ctx context.Context) string {
	p, ok := grpcpeer.FromContext(ctx)
	if !ok || p.Addr == nil {
		name, _ := ctx.Value(doorName{}).(string)
		return name
	}
	if b, ok := bearerOf(ctx); ok {
		return string(b.who)
	}
	if name, ok := certificateOf(p); ok {
		return "certificate " + name
	}
	return "address " + listeners.ClientOf(listeners.HostOf(p.Addr.String()))
}

// principalOf returns the proven principal of a connection: see package principal.
func principalOf(ctx context.Context) principal.Principal {
	p, ok := grpcpeer.FromContext(ctx)
	if !ok || p.Addr == nil {
		return principal.Process
	}
	if b, ok := bearerOf(ctx); ok {
		return b.who
	}
	if name, ok := certificateOf(p); ok {
		return principal.Certificate(name)
	}
	return principal.Nobody
}

// reportedOf is principalOf for events and victims, which show the address of a client without a principal.
func reportedOf(ctx context.Context) principal.Principal {
	who := principalOf(ctx)
	if p, ok := grpcpeer.FromContext(ctx); ok && who == principal.Nobody {
		return principal.Address(listeners.ClientOf(listeners.HostOf(p.Addr.String())))
	}
	return who
}

// certificateOf names the verified certificate of the other side.
func certificateOf(p *grpcpeer.Peer) (name string, ok bool) {
	t, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(t.State.VerifiedChains) == 0 {
		return "", false
	}
	return nameOf(t.State.PeerCertificates[0]), true
}

// PrincipalOf returns the principal of a client's verified certificate.
func PrincipalOf(leaf *x509.Certificate) principal.Principal {
	return principal.Certificate(nameOf(leaf))
}

// nameOf returns the name by which the owner of a certificate is known.
func nameOf(leaf *x509.Certificate) string {
	name := leaf.Subject.CommonName
	if len(leaf.DNSNames) > 0 {
		name = cmp.Or(name, leaf.DNSNames[0])
	}
	if plain(name) {
		return name
	}
	sum := sha256.Sum256(leaf.RawSubjectPublicKeyInfo)
	return "of key " + hex.EncodeToString(sum[:8]) // no plain name has a space
}

// plain reports whether a name can be shown and stored unchanged: in tables, in the log and in the state.
func plain(name string) bool {
	for _, r := range name {
		if r <= ' ' || r > '~' {
			return false
		}
	}
	return name != "" && len(name) <= 128
}

// connections bounds the connections of clients at this member.
func (s *Server) connections() int {
	clients, _ := listeners.Connections(cmp.Or(s.config.files, listeners.FileLimit()))
	return clients
}

// Admit returns a listener of this process, for clients that reach the server over another protocol, with the bounds
// that apply over gRPC: together they have no more connections than the process has file descriptors for, and l has
// no more than most, or half of them if most is 0. One address may have share of them, or its share over gRPC if
// share is 0. Connections of trusted networks, those of proxies, count towards no client's share.
func (s *Server) Admit(l net.Listener, what string, most, share int, trusted ...netip.Prefix) net.Listener {
	return s.gate.AdmitShare(l, cmp.Or(most, max(s.connections()/2, 1)), share, what, trusted...)
}

// streamsOfOne bounds the streams of one client.
func (s *Server) streamsOfOne() int { return s.config.Limits.Share(s.connections()) }

func (s *Server) streamsOf(client string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if client == "" {
		return 0
	}
	return s.clients[client]
}
