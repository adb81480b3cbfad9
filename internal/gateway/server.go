package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"
)

// Bounds of connections. A waiting request costs one, or one stream of HTTP/2.
const (
	connectionsMost = 20_000
	streamsMost     = 250
	headersMost     = 16 << 10
	headerTime      = 5 * time.Second
	idleTime        = 2 * time.Minute
	shutdownTime    = 5 * time.Second
)

// Serve serves g at l, with TLS if config is not nil, until ctx ends; then it ends the waits with an answer and waits
// for other requests to be answered. It closes l.
func (g *Gateway) Serve(ctx context.Context, l net.Listener, config *tls.Config) error {
	s := &http.Server{
		Handler: g.Handler(), ReadHeaderTimeout: headerTime, IdleTimeout: idleTime, MaxHeaderBytes: headersMost,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: streamsMost, SendPingTimeout: idleTime / 4, WriteByteTimeout: sendTime,
		},
		ErrorLog: slog.NewLogLogger(g.o.Log.Handler(), slog.LevelDebug),
	}
	l = &limited{Listener: l, room: make(chan struct{}, connectionsMost), done: make(chan struct{})}
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
	g.End()
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

// limited takes no more connections than it has room for.
type limited struct {
	net.Listener
	room chan struct{}
	done chan struct{}
	once sync.Once
}

func (l *limited) Accept() (net.Conn, error) {
	select {
	case l.room <- struct{}{}:
	case <-l.done:
		return nil, net.ErrClosed
	}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.room
		return nil, err
	}
	return &counted{Conn: c, leave: func() { <-l.room }}, nil
}

func (l *limited) Close() error {
	l.once.Do(func() { close(l.done) })
	return l.Listener.Close()
}

type counted struct {
	net.Conn
	once  sync.Once
	leave func()
}

func (c *counted) Close() error {
	err := c.Conn.Close()
	c.once.Do(c.leave)
	return err
}
