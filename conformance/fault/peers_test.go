package fault_test

import (
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/fault"
)

// patience is how long a test waits for what must happen; silence is how long it watches for what must not.
const (
	patience = 20 * time.Second
	silence  = 50 * time.Millisecond
)

// server hands over every connection that it accepts.
type server struct {
	net.Listener
	conns chan *net.TCPConn
}

func newServer(t *testing.T) *server {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &server{l, make(chan *net.TCPConn, 1000)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s.conns <- c.(*net.TCPConn)
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
		close(s.conns)
		for c := range s.conns {
			c.Close()
		}
	})
	return s
}

// next returns the next accepted connection; it is closed at the end of the test.
func (s *server) next(t *testing.T) *net.TCPConn {
	t.Helper()
	select {
	case c := <-s.conns:
		t.Cleanup(func() { c.Close() })
		return c
	case <-time.After(patience):
		t.Fatal("the server got no connection")
		return nil
	}
}

func newProxy(t *testing.T, upstream string) *fault.Proxy {
	t.Helper()
	p, err := fault.NewProxy(upstream)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return p
}

func dial(t *testing.T, p *fault.Proxy) *net.TCPConn {
	t.Helper()
	c, err := net.DialTimeout("tcp", p.Addr(), patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*net.TCPConn)
}

// link returns both ends of one connection through a new proxy.
func link(t *testing.T) (p *fault.Proxy, client, srv *net.TCPConn) {
	t.Helper()
	s := newServer(t)
	p = newProxy(t, s.Addr().String())
	client = dial(t, p)
	return p, client, s.next(t)
}

func write(t *testing.T, c net.Conn, text string) {
	t.Helper()
	c.SetWriteDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatalf("write %q: %v", text, err)
	}
}

// expect reads exactly text.
func expect(t *testing.T, c net.Conn, text string) {
	t.Helper()
	got := make([]byte, len(text))
	c.SetReadDeadline(time.Now().Add(patience))
	if n, err := io.ReadFull(c, got); err != nil || string(got) != text {
		t.Fatalf("read %q, %v; want %q", got[:n], err, text)
	}
}

// expectSilence fails if anything arrives, be it the end.
func expectSilence(t *testing.T, c net.Conn) {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(silence))
	n, err := c.Read(make([]byte, 100))
	var timeout net.Error
	if n != 0 || !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Fatalf("read %d bytes, %v; want silence", n, err)
	}
}

// expectEnd reads until the end and returns it: nil for an orderly one.
func expectEnd(t *testing.T, c net.Conn) error {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(patience))
	_, err := io.Copy(io.Discard, c)
	if errors.Is(err, net.ErrClosed) {
		t.Fatal(err)
	}
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		t.Fatal("the connection did not end")
	}
	return err
}

func expectReset(t *testing.T, c net.Conn) {
	t.Helper()
	if err := expectEnd(t, c); !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("connection ended with %v; want a reset", err)
	}
}

// eventually polls: for state that nothing announces.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never happened: %s", what)
		}
	}
}

func awaitSeen(t *testing.T, p *fault.Proxy, dir fault.Direction, n int) {
	t.Helper()
	eventually(t, "bytes seen", func() bool { return p.Seen(dir) >= int64(n) })
}
