package server

import (
	"context"
	"errors"
	"io"
	"testing"
)

// A client in this process keeps connecting while the server closes, and afterwards. The race detector sees whether
// Close can miss a connection.
func TestAttachWhileClosing(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{})
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		if err := s.Close(context.Background()); err != nil {
			t.Errorf("Close = %v", err)
		}
	}()
	for open := true; open; {
		select {
		case <-closed:
			open = false
		default:
		}
		stream := s.Attach(t.Context())
		_ = stream.CloseSend()
		for {
			if _, err := stream.Recv(); errors.Is(err, io.EOF) {
				break
			}
		}
	}
}
