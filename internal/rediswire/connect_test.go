package rediswire

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/testcert"
)

// pair returns both ends of a connection.
func (s *server) pair() (mine, theirs net.Conn) {
	s.t.Helper()
	mine, err := net.Dial("tcp", s.in.Addr().String())
	if err == nil {
		s.t.Cleanup(func() { mine.Close() })
		theirs, err = s.in.Accept()
	}
	if err != nil {
		s.t.Error(err)
		return nil, nil
	}
	return mine, s.peer(theirs)
}

// deadlineConn remembers its deadline.
type deadlineConn struct {
	*net.TCPConn
	at time.Time
}

func (c *deadlineConn) SetDeadline(at time.Time) error {
	c.at = at
	return c.TCPConn.SetDeadline(at)
}

// A caller whose context ends when its exchange has just failed by its deadline does not cut short the reading of a
// connection to its end: what was sent counts as under way until the server has read that.
func TestAbortComesLate(t *testing.T) {
	t.Parallel()
	mine, theirs := newServer(t).pair()
	under := &deadlineConn{TCPConn: mine.(*net.TCPConn)}
	c := &netConn{Conn: under, drained: make(chan struct{}), owes: true}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	c.abort()
	if left := time.Until(under.at); left < answerTime/2 {
		t.Errorf("the connection is read for another %v", left)
	}
	theirs.Close()
	select {
	case <-c.drained:
	case <-time.After(time.Minute):
		t.Error("the end of what was sent is never known")
	}
}

// fullConn is a connection whose half-close has to wait.
type fullConn struct {
	*net.TCPConn
	waits chan struct{}
}

func (c *fullConn) CloseWrite() error {
	<-c.waits
	return c.TCPConn.CloseWrite()
}

// A half-close that has to wait, as that of TLS for room in a buffer, keeps neither the caller nor the line waiting.
func TestCloseDoesNotWait(t *testing.T) {
	t.Parallel()
	mine, theirs := newServer(t).pair()
	waits, closed := make(chan struct{}), make(chan error)
	c := &netConn{Conn: &fullConn{mine.(*net.TCPConn), waits}, drained: make(chan struct{}), owes: true}
	go func() { closed <- c.Close() }()
	select {
	case err := <-closed:
		if err != nil {
			t.Error(err)
		}
		close(waits)
	case <-time.After(time.Minute):
		t.Error("it waits")
		close(waits)
		<-closed
	}
	theirs.Close()
	select {
	case <-c.drained:
	case <-time.After(time.Minute):
		t.Error("the end of what was sent is never known")
	}
}

// A dialer that overruns the time for connecting leaves no connection.
func TestConnectClosesALateConnection(t *testing.T) {
	t.Parallel()
	mine, theirs := newServer(t).pair()
	_, err := Connect(goredis.Options{Dialer: func(ctx context.Context, _, _ string) (net.Conn, error) {
		<-ctx.Done()
		return mine, nil
	}})
	if err == nil {
		t.Error("it connects beyond its time")
	}
	if _, err := theirs.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the server's end is read with %v, want EOF", err)
	}
}

// A step for a TLS connection that the server has closed at rest goes out on the next one.
func TestLineNoticesTheEndOfTLS(t *testing.T) {
	t.Parallel()
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		s := newServer(t)
		config := testcert.New(t).Server(t, "localhost")
		config.ClientAuth, config.MaxVersion = tls.NoClientCert, version
		l := NewLine(Options{
			Clock: backend.SystemClock(), Report: func(*redisconn.Failure) {}, patience: time.Minute,
			Connect: func() (*Conn, error) {
				return Connect(goredis.Options{
					DisableIdentity: true,
					Dialer: func(context.Context, string, string) (net.Conn, error) {
						mine, theirs := s.pair()
						p := s.peer(tls.Server(theirs, config))
						go func() {
							p.greet()
							s.peers <- p
						}()
						return tls.Client(mine, &tls.Config{InsecureSkipVerify: true}), nil
					},
				})
			},
		})
		t.Cleanup(func() { l.Close() })
		for range 3 {
			o := setting("n")
			l.Submit(o.Step)
			p := <-s.peers
			p.request()
			p.reply("+OK\r\n")
			o.want(t, redisscript.TakeGranted)
			s.awaitRest(l)
			again := setting("again")
			l.Submit(again.Step)
			p.request()
			p.reply("$-1\r\n")
			again.want(t, redisscript.TakeRefused)
			s.awaitRest(l)
			p.Close()
		}
	}
}
