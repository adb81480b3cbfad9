package server

// Whose a connection is. Limits count by client, so that one that takes too much is refused itself, and not the others.

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"

	"google.golang.org/grpc/credentials"
	grpcpeer "google.golang.org/grpc/peer"
)

// clientOf says whose a connection is: the certificate's, by its name, or where there is none the address's. What all
// connections of one client have counts together. It is empty for those within the process.
func clientOf(ctx context.Context) string {
	p, ok := grpcpeer.FromContext(ctx)
	if !ok || p.Addr == nil {
		return ""
	}
	if t, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(t.State.VerifiedChains) > 0 {
		leaf := t.State.PeerCertificates[0]
		name := leaf.Subject.CommonName
		if len(leaf.DNSNames) > 0 {
			name = cmp.Or(name, leaf.DNSNames[0])
		}
		if plain(name) {
			return "certificate " + name
		}
		sum := sha256.Sum256(leaf.RawSubjectPublicKeyInfo)
		return "certificate of key " + hex.EncodeToString(sum[:8])
	}
	return "address " + hostOf(p.Addr)
}

// plain reports whether a name can be shown and kept as it is: it stands in tables, in the log and in the state.
func plain(name string) bool {
	for _, r := range name {
		if r <= ' ' || r > '~' {
			return false
		}
	}
	return name != "" && len(name) <= 128
}

// connections is how many connections of clients this member takes.
func (s *Server) connections() int {
	clients, _ := connectionsAllowed(cmp.Or(s.config.files, fileLimit()))
	return clients
}

// streamsOfOne is how many streams one client may have.
func (s *Server) streamsOfOne() int { return s.config.Limits.Share(s.connections()) }

func (s *Server) streamsOf(client string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if client == "" {
		return 0
	}
	return s.clients[client]
}
