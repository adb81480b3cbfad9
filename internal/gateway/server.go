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

// Bounds of connections. A waiting request costs one, or one stream of HTTP/2.
const (
	streamsMost  = 250
	headersMost  = 16 << 10
	headerTime   = 5 * time.Second
	idleTime     = 2 * time.Minute
	shutdownTime = 5 * time.Second
)

// Serve serves g at l, with TLS if config is not nil, until ctx ends; then it ends the waits with an answer and waits
// for other requests to be answered. It closes l, which bounds the connections: see package listeners.
func (g *Gateway) Serve(ctx context.Context, l net.Listener, config *tls.Config) error {
	return Serve(ctx, l, config, g.o.Log, g.Handler(), g.End)
}

// Serve serves a handler as Gateway.Serve does. It calls end before it waits for pending requests.
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
		s.TLSConfig = config.Clone() // the server adds to it
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
