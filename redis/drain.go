package redis

import (
	"context"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// drain makes the connections of a client that the driver has made itself. One that is given up in the middle of an
// exchange is not just closed: the server may read what was sent later than what other connections bring it then, which
// is what tidies up behind it. It is closed for writing, and read until the server closes it too, which it does when it
// has run everything.
type drain struct {
	dialled func() // told of each new connection

	mu       sync.Mutex // protects the following fields, and those of the connections
	busy     int        // exchanges under way: what is closed meanwhile may carry one of them
	draining map[*ownedConn]bool
	shut     bool
}

type dialFunc = func(ctx context.Context, network, addr string) (net.Conn, error)

// dialer connects as dial does.
func (d *drain) dialer(dial dialFunc) dialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		d.dialled()
		owned := &ownedConn{Conn: conn, d: d, drained: make(chan struct{})}
		if raw, ok := conn.(syscall.Conn); ok {
			return checkedConn{owned, raw}, nil
		}
		return owned, nil
	}
}

// newDrain makes the connections of client drain, which is the driver's own and has none yet, and tells of each new
// one. It is nil for a client of another kind.
func newDrain(client goredis.UniversalClient, dialled func()) *drain {
	d := &drain{dialled: dialled, draining: map[*ownedConn]bool{}}
	switch c := client.(type) {
	case *goredis.Client:
		c.Options().Dialer = d.dialer(c.Options().Dialer)
	case *goredis.ClusterClient:
		opt := c.Options()
		if opt.Dialer == nil {
			opt.Dialer = goredis.NewDialer(&goredis.Options{DialTimeout: opt.DialTimeout, TLSConfig: opt.TLSConfig})
		}
		opt.Dialer = d.dialer(opt.Dialer)
	default:
		return nil
	}
	return d
}

// begin and end surround every exchange. d may be nil, for a client of the user's.
func (d *drain) begin() {
	if d != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.busy++
	}
}

func (d *drain) end() {
	if d != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.busy--
	}
}

// drained returns what is closed when the servers have run all that the connections carried which have failed by now,
// or nothing if none is draining.
func (d *drain) drained() <-chan struct{} {
	if d == nil {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.draining) == 0 {
		return nil
	}
	var all []<-chan struct{}
	for c := range d.draining {
		all = append(all, c.drained)
	}
	if len(all) == 1 {
		return all[0]
	}
	done := make(chan struct{})
	go func() {
		for _, c := range all {
			<-c
		}
		close(done)
	}()
	return done
}

// close ends all draining.
func (d *drain) close() {
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.shut = true
	for c := range d.draining {
		_ = c.SetDeadline(past) // an error means that it is closed
	}
}

// ownedConn is a connection that drains.
type ownedConn struct {
	net.Conn
	d       *drain
	drained chan struct{} // closed when the server has run all that was sent, or flightTime after the end

	closed bool // or draining; protected by d.mu
}

// ownedOf returns the connection that a drain's dialer has made.
func ownedOf(c net.Conn) *ownedConn {
	if checked, ok := c.(checkedConn); ok {
		return checked.ownedConn
	}
	owned, _ := c.(*ownedConn)
	return owned
}

// checkedConn is one of which go-redis can see whether it is alive.
type checkedConn struct {
	*ownedConn
	raw syscall.Conn
}

func (c checkedConn) SyscallConn() (syscall.RawConn, error) { return c.raw.SyscallConn() }

// NetConn lets go-redis look at the connection below TLS.
func (c *ownedConn) NetConn() net.Conn { return c.Conn }

// interrupt ends the exchange on the connection.
func (c *ownedConn) interrupt() {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	if !c.closed {
		_ = c.SetDeadline(past) // an error means that it is closed
	}
}

// Close closes the connection, or lets it drain.
func (c *ownedConn) Close() error {
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if first, drain := c.retire(ok); !first {
		return nil
	} else if !drain {
		return c.Conn.Close()
	}
	go func() {
		if half.CloseWrite() == nil {
			_, _ = io.Copy(io.Discard, c.Conn) // its end is all that matters
		}
		_ = c.Conn.Close() // of no more use
		close(c.drained)
		c.d.mu.Lock()
		defer c.d.mu.Unlock()
		delete(c.d.draining, c)
	}()
	return nil
}

// retire decides what becomes of the connection: it drains if it can, and an exchange under way may have sent something
// on it.
func (c *ownedConn) retire(can bool) (first, drain bool) {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	if c.closed {
		return false, false
	}
	c.closed = true
	if !can || c.d.busy == 0 || c.d.shut {
		return true, false
	}
	c.d.draining[c] = true
	_ = c.SetDeadline(time.Now().Add(flightTime)) // an error shows in the next use
	return true, true
}
