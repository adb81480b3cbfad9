package story

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"
)

// Serve serves HTTP on a free port of loopback until the story ends, and returns the URL without a path.
func (s *Story) Serve(handler http.Handler) (url string, err error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	service := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	served := make(chan error, 1)
	go func() { served <- service.Serve(listener) }()
	s.AtEnd(func(ctx context.Context) error {
		err := service.Shutdown(ctx)
		if end := <-served; !errors.Is(end, http.ErrServerClosed) {
			err = errors.Join(err, end)
		}
		return err
	})
	return "http://" + listener.Addr().String(), nil
}

// HTTPClient returns a client with its own connections, which are closed when the story ends.
func (s *Story) HTTPClient() *http.Client {
	client := &http.Client{Transport: &http.Transport{}}
	s.AtEnd(func(context.Context) error {
		client.CloseIdleConnections()
		return nil
	})
	return client
}
