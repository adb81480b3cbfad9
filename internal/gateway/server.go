package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// Limits of a connection. A waiting request uses a connection, or a stream of HTTP/2.
const (
	streamsMost  = 250
	headersMost  = 16 << 10
	headerTime   = 5 * time.Second
	idleTime     = 2 * time.Minute
	shutdownTime = 5 * time.Second
)

// Serve serves g on l, with TLS if config is not nil, until ctx ends. It then ends waits and watches with an answer,
// waits up to shutdownTime for other pending requests, and closes l. The listener bounds the number of connections: see
// package listeners.
func (g *Gateway) Serve(ctx context.Context, l net.Listener, config *tls.Config) error {
	return Serve(ctx, l, config, g.o.Log, g.Handler(), g.End)
}

// Serve serves a handler as Gateway.Serve does. When ctx ends, it calls end before it waits for pending requests.
func Serve(
	ctx context.Context, l net.Listener, config *tls.Config, log *slog.Logger, handler http.Handler, end func(),
) error {
	s := &http.Server{
		Handler: handler, ReadHeaderTimeout: headerTime, IdleTimeout: idleTime, MaxHeaderBytes: headersMost,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: streamsMost, SendPingTimeout: idleTime / 4, WriteByteTimeout: sendTime,
		},
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1)
	go func() {
		if config == nil {
			served <- s.Serve(l)
			return
		}
		s.TLSConfig = config.Clone() // the server changes it
		served <- s.ServeTLS(l, "", "")
	}()
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	end()
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTime)
	defer cancel()
	err := s.Shutdown(bounded)
	if err != nil {
		err = errors.Join(err, s.Close())
	}
	if served := <-served; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}
