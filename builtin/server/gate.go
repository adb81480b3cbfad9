package server

import (
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// reservedFiles is how many of the process's file descriptors are kept from connections: the log, the snapshots and the
// connections to other members need some at any time, and a log that gets none for its next file ends the server.
const reservedFiles = 64

// connectionsAllowed is how many connections of clients and of members a process may have that has so many file
// descriptors.
func connectionsAllowed(files int) (clients, members int) {
	members = max(files/8, 8)
	return max(files-reservedFiles-members, 8), members
}

// connGate is a listener that closes at once what comes while it has so many connections open.
type connGate struct {
	net.Listener
	most int64
	what string // for the log
	log  *slog.Logger

	open   atomic.Int64
	warned atomic.Int64 // when that was last told, Unix seconds
}

func newGate(l net.Listener, most int, what string, log *slog.Logger) *connGate {
	return &connGate{Listener: l, most: int64(most), what: what, log: log}
}

// warnEvery is how often a full gate is told, in seconds.
const warnEvery = 60

// Accept implements net.Listener.
func (g *connGate) Accept() (net.Conn, error) {
	for {
		conn, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if g.open.Add(1) <= g.most {
			return &gatedConn{Conn: conn, gate: g}, nil
		}
		g.open.Add(-1)
		conn.Close()
		if now, last := time.Now().Unix(), g.warned.Load(); now-last >= warnEvery && g.warned.CompareAndSwap(last, now) {
			g.log.Warn("connections are turned away: there are too many", "of", g.what, "limit", g.most,
				"from", conn.RemoteAddr().String())
		}
	}
}

type gatedConn struct {
	net.Conn
	gate *connGate
	once sync.Once
}

func (c *gatedConn) Close() error {
	c.once.Do(func() { c.gate.open.Add(-1) })
	return c.Conn.Close()
}
