// Package grpctls gives gRPC a configuration of TLS whose files may be replaced while the program runs.
package grpctls

import (
	"context"
	"crypto/tls"
	"net"

	"google.golang.org/grpc/credentials"

	"github.com/fencelock/fencelock/backend/kit"
)

// Credentials returns the credentials of a client. Each connection has the configuration that kit.DialTLS returns.
func Credentials(config *tls.Config) credentials.TransportCredentials {
	return &rotating{TransportCredentials: credentials.NewTLS(config), config: config}
}

type rotating struct {
	credentials.TransportCredentials // of the configuration at the start
	config                           *tls.Config
}

func (r *rotating) ClientHandshake(
	ctx context.Context, authority string, conn net.Conn,
) (net.Conn, credentials.AuthInfo, error) {
	config, err := kit.DialTLS(r.config)
	if err != nil {
		return nil, nil, err
	}
	return credentials.NewTLS(config).ClientHandshake(ctx, authority, conn)
}

func (r *rotating) Clone() credentials.TransportCredentials {
	return &rotating{TransportCredentials: r.TransportCredentials.Clone(), config: r.config}
}
