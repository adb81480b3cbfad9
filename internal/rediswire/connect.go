package rediswire

// This file makes the connections of lines. Each is a client of go-redis with one connection, which greets the server
// (TLS, HELLO, AUTH, SELECT, CLIENT SETNAME, the user's OnConnect), writes requests and reads replies. So every option
// of a client has the same meaning here.

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// ConnectTime is the maximum duration of connecting; the options' DialTimeout bounds the dial alone.
const ConnectTime = 3 * time.Second

// Conn is a connection on which a server carries out steps.
type Conn struct {
	client *goredis.Client
	net    *netConn
	used   bool // a step has left on it, or the caller of one, or it was at rest
}

// Connect makes a connection as a client with opt would. Whatever fails, no step was sent.
func Connect(opt goredis.Options) (*Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), ConnectTime)
	defer cancel()
	raw, err := opt.Dialer(ctx, opt.Network, opt.Addr)
	if err != nil {
		return nil, err
	}
	c := &Conn{net: &netConn{Conn: raw, drained: make(chan struct{})}}
	dialled := false
	opt.Dialer = func(context.Context, string, string) (net.Conn, error) {
		if dialled { // a dialer that fails is called again and again
			return ended{raw}, nil
		}
		dialled = true
		if of := socketOf(raw); of != nil {
			return checkedConn{c.net, of}, nil
		}
		return c.net, nil
	}
	opt.Protocol = 2 // the server sends replies only
	opt.PoolSize, opt.MinIdleConns, opt.MaxIdleConns, opt.MaxActiveConns, opt.PipelinePoolSize = 1, 0, 1, 1, -1
	opt.ConnMaxIdleTime, opt.ConnMaxLifetime = -1, -1
	opt.ReadTimeout, opt.WriteTimeout = answerTime, answerTime
	opt.MaxRetries, opt.DialerRetries, opt.ContextTimeoutEnabled = -1, 1, true
	opt.PushNotificationProcessor, opt.Limiter = nil, nil // of the other client
	opt.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	c.client = goredis.NewClient(&opt)
	if err := c.client.Ping(ctx).Err(); err != nil {
		return nil, errors.Join(err, c.client.Close(), c.net.Close()) // the client may not have asked for it
	}
	return c, nil
}

// netConn is the network connection of a Conn.
type netConn struct {
	net.Conn

	// Of the present exchange. Its goroutine uses them, and Close.
	owes  bool // it has no reply yet
	wrote bool // some of it has left

	once    sync.Once
	drained chan struct{} // closed when the server has executed all requests or never will

	mu      sync.Mutex // protects the following fields
	aborted bool
	closed  bool
}

// Write implements net.Conn.
func (c *netConn) Write(p []byte) (n int, err error) {
	n, err = c.Conn.Write(p)
	c.wrote = c.wrote || n > 0
	return n, err
}

// Close implements net.Conn. A connection that owes a reply is half-closed and read to its end: the server carries out
// the requests that it has received, and then closes the connection.
func (c *netConn) Close() error {
	c.once.Do(func() {
		c.mu.Lock()
		c.closed = true
		c.mu.Unlock()
		half, ok := c.Conn.(interface{ CloseWrite() error })
		if !c.owes || !ok || c.Conn.SetDeadline(time.Now().Add(answerTime)) != nil {
			_ = c.Conn.Close() // there is nothing to lose
			close(c.drained)
			return
		}
		go func() { // TLS sends a message for it, which may have to wait
			if half.CloseWrite() == nil {
				_, _ = io.Copy(io.Discard, c.Conn) // only its end matters
			}
			_ = c.Conn.Close()
			close(c.drained)
		}()
	})
	return nil
}

// abort ends the exchange that is in progress, and the connection with it. A closed connection is read to its end.
func (c *netConn) abort() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.aborted = true
		_ = c.Conn.SetDeadline(past) // an error: the exchange has ended
	}
}

// past is a deadline that has passed.
var past = time.Unix(1, 0)

// deadline sets a deadline, unless the exchange was aborted.
func (c *netConn) deadline(set func(time.Time) error, at time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.aborted {
		at = past
	}
	return set(at)
}

// SetDeadline implements net.Conn, as do SetReadDeadline and SetWriteDeadline.
func (c *netConn) SetDeadline(at time.Time) error     { return c.deadline(c.Conn.SetDeadline, at) }
func (c *netConn) SetReadDeadline(at time.Time) error { return c.deadline(c.Conn.SetReadDeadline, at) }
func (c *netConn) SetWriteDeadline(at time.Time) error {
	return c.deadline(c.Conn.SetWriteDeadline, at)
}

// checkedConn is a connection of which go-redis notices before an exchange that the server has closed it at rest.
type checkedConn struct {
	*netConn
	syscall.Conn
}

// socketOf returns the socket of a connection, also below TLS; nil without one. Any data on an idle TLS connection
// means that the server closes it, or costs another connection at worst.
func socketOf(c net.Conn) syscall.Conn {
	for {
		if of, ok := c.(syscall.Conn); ok {
			return of
		}
		outer, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		c = outer.NetConn()
	}
}

// ended is the connection that a client gets in place of another one after its connection has ended.
type ended struct{ net.Conn }

var errEnded = errors.New("the connection has ended")

// Read implements net.Conn, as do Write, Close and SetDeadline.
func (ended) Read([]byte) (int, error)         { return 0, errEnded }
func (ended) Write([]byte) (int, error)        { return 0, errEnded }
func (ended) Close() error                     { return nil }
func (ended) SetDeadline(time.Time) error      { return nil }
func (ended) SetReadDeadline(time.Time) error  { return nil }
func (ended) SetWriteDeadline(time.Time) error { return nil }
