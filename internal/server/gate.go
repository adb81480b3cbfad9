package server

// How many connections there may be. The bound is on file descriptors, before TLS and gRPC have cost anything; how many
// streams one client may have is counted by its name (client.go).

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

// connGate is a listener that closes at once what comes while it has so many connections open, of all or from one
// address.
type connGate struct {
	net.Listener
	most, share int    // in all, and from one address
	what        string // for the log
	log         *slog.Logger
	warned      atomic.Int64 // when that was last told, Unix seconds

	mu   sync.Mutex
	open int
	from map[string]int // by address
}

func newGate(l net.Listener, most, share int, what string, log *slog.Logger) *connGate {
	return &connGate{Listener: l, most: most, share: share, what: what, log: log, from: map[string]int{}}
}

// enter counts a connection, unless there are too many.
func (g *connGate) enter(address string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.open >= g.most || g.from[address] >= g.share {
		return false
	}
	g.open++
	g.from[address]++
	return true
}

func (g *connGate) leave(address string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open--
	if g.from[address]--; g.from[address] == 0 {
		delete(g.from, address)
	}
}

// hostOf is an address without its port.
func hostOf(a net.Addr) string {
	if host, _, err := net.SplitHostPort(a.String()); err == nil {
		return host
	}
	return a.String()
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
		address := hostOf(conn.RemoteAddr())
		if g.enter(address) {
			return &gatedConn{Conn: conn, gate: g, address: address}, nil
		}
		conn.Close()
		now, last := time.Now().Unix(), g.warned.Load()
		if now-last >= warnEvery && g.warned.CompareAndSwap(last, now) {
			g.log.Warn("connections are turned away: there are too many", "of", g.what, "limit", g.most,
				"of one address", g.share, "from", conn.RemoteAddr().String())
		}
	}
}

type gatedConn struct {
	net.Conn
	gate    *connGate
	address string
	once    sync.Once
}

func (c *gatedConn) Close() error {
	c.once.Do(func() { c.gate.leave(c.address) })
	return c.Conn.Close()
}
