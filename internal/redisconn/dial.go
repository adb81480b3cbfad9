package redisconn

// This file connects to the servers of a URL and remembers why that failed. go-redis answers a connection that cannot
// be made in time with the bare end of the context; the reason, such as a certificate that nobody trusts, is the
// information for the URL's author. See URL.Look.

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// dialer connects to the servers of a URL.
type dialer struct {
	// For the connection and the TLS handshake together.
	timeout time.Duration
	// nil: no TLS.
	tls *tls.Config
	// Why the last attempt failed; shared by all connections of the URL.
	failed *atomic.Pointer[error]
}

// dial is a go-redis Options.Dialer.
func (d *dialer) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := d.connect(ctx, network, addr)
	if err != nil {
		d.failed.Store(&err)
	}
	return conn, err
}

// connect connects. A failed TLS handshake is reported as such: a server that does not speak TLS takes the handshake
// for a command and waits for its end, and all that shows is that time is over. The handshake is made here for that
// reason and not left to go-redis.
func (d *dialer) connect(ctx context.Context, network, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, d.timeout)
	defer cancel()
	plain := &net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second}}
	conn, err := plain.DialContext(ctx, network, addr)
	if err != nil || d.tls == nil {
		return conn, err
	}
	// The configuration is shared by all connections, so that a copy gets the name.
	config, err := kit.DialTLS(d.tls)
	if err != nil {
		_ = conn.Close() // the reason is err
		return nil, err
	}
	// Without a server name the certificate must be for the host of the address.
	if config.ServerName == "" {
		config = config.Clone()
		if config.ServerName, _, err = net.SplitHostPort(addr); err != nil {
			config.ServerName = addr
		}
	}
	secure := tls.Client(conn, config)
	if err := secure.HandshakeContext(ctx); err != nil {
		_ = conn.Close() // the reason is err
		return nil, handshakeFailure(addr, err)
	}
	return secure, nil
}

// handshakeFailure describes a TLS handshake that failed with err. What only a change of the URL or the
// server can mend is Fatal.
func handshakeFailure(addr string, err error) *Failure {
	config := &backend.ConfigError{}
	var untrusted *tls.CertificateVerificationError
	var stranger tls.RecordHeaderError
	switch {
	case errors.As(err, &untrusted):
		config.Setting, config.Value = "TLS certificate", "not trusted"
		config.Want = "signed by an authority of ca, for server-name"
		config.Why = "the server at " + addr + " cannot be told from an impostor"
	// The server answered in plain text, as one without TLS does to anything.
	case errors.As(err, &stranger):
		config.Setting, config.Value, config.Want = "TLS", "asked for", "left out for a port without it"
		config.Why = "the server at " + addr + " does not speak TLS on this port"
	default:
		return &Failure{
			Cause: fmt.Errorf("TLS handshake with %s: %w: it does not speak TLS on this port, or is too slow",
				addr, err),
		}
	}
	return &Failure{Cause: fmt.Errorf("%w: %w", config, err), Fatal: true}
}
