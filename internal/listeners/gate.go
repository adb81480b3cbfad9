package listeners

import (
	"cmp"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// reservedFiles is the number of the process's file descriptors that connections of clients leave: the log, the snapshots
// and the connections to other members need some at any time, and a log without one for its next file ends the server.
// Probes and operators have their own.
const reservedFiles = 64 + opsConnections + AdminConnections

// AdminConnections bounds the connections of operators at the listener for changes.
const AdminConnections = 32

// Connections divides so many file descriptors of a process between connections of clients, over all listeners, and of
// other members.
func Connections(files int) (clients, members int) {
	members = max(files/8, 8)
	return max(files-reservedFiles-members, 8), members
}

// Gate bounds the connections of a process, over all listeners that it admits: in all, and of one address. It closes
// at once what comes beyond, before TLS or a request has cost anything. All methods are safe for concurrent use.
type Gate struct {
	most, share int
	log         *slog.Logger
	warned      atomic.Int64 // when that was last told, Unix seconds

	mu   sync.Mutex // protects the following fields, and the listeners' fields
	open int
	from map[string]int // by client
}

// NewGate returns a gate for so many connections, of which one address may have share.
func NewGate(most, share int, log *slog.Logger) *Gate {
	return &Gate{most: most, share: share, log: log, from: map[string]int{}}
}

// Admit returns l with the bounds of g, of which l takes no more than most connections. The share of addresses in
// trusted networks, such as proxies, is not bounded. what names the connections in the log.
func (g *Gate) Admit(l net.Listener, most int, what string, trusted ...netip.Prefix) net.Listener {
	return g.AdmitShare(l, most, g.share, what, trusted...)
}

// AdmitShare is Admit with a separate share for the addresses at l; 0: the share of g.
func (g *Gate) AdmitShare(l net.Listener, most, share int, what string, trusted ...netip.Prefix) net.Listener {
	return &gatedListener{Listener: l, gate: g, most: most, share: cmp.Or(share, g.share), trusted: trusted, what: what}
}

type gatedListener struct {
	net.Listener
	gate    *Gate
	most    int
	share   int
	trusted []netip.Prefix
	what    string
	open    int
}

// ClientOf names the client behind an address without a port: the address, or the network of an IPv6 address, of which
// one client has 2^64 addresses.
func ClientOf(host string) string {
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return host
	}
	if ip = ip.Unmap().WithZone(""); ip.Is4() {
		return ip.String()
	}
	return netip.PrefixFrom(ip, 64).Masked().String()
}

// HostOf is an address without its port.
func HostOf(address string) string {
	if host, _, err := net.SplitHostPort(address); err == nil {
		return host
	}
	return address
}

// Trusted reports whether an address without a port is in one of some networks.
func Trusted(host string, networks []netip.Prefix) bool {
	ip, err := netip.ParseAddr(host)
	return err == nil && slices.ContainsFunc(networks, func(p netip.Prefix) bool { return p.Contains(ip.Unmap()) })
}

// enter counts a connection, unless there are too many.
func (l *gatedListener) enter(host, client string) bool {
	g := l.gate
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.open >= g.most || l.open >= l.most || g.from[client] >= l.share && !Trusted(host, l.trusted) {
		return false
	}
	g.open++
	l.open++
	g.from[client]++
	return true
}

func (l *gatedListener) leave(client string) {
	g := l.gate
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open--
	l.open--
	if g.from[client]--; g.from[client] == 0 {
		delete(g.from, client)
	}
}

// warnEvery is the minimum time between two warnings about a full gate, in seconds.
const warnEvery = 60

// Accept implements net.Listener.
func (l *gatedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		host := HostOf(conn.RemoteAddr().String())
		client := ClientOf(host)
		if l.enter(host, client) {
			return &gatedConn{Conn: conn, listener: l, client: client}, nil
		}
		conn.Close()
		g := l.gate
		now, last := time.Now().Unix(), g.warned.Load()
		if now-last >= warnEvery && g.warned.CompareAndSwap(last, now) {
			g.log.Warn("connections are refused: there are too many", "of", l.what, "limit", min(l.most, g.most),
				"of one address", l.share, "from", conn.RemoteAddr().String())
		}
	}
}

type gatedConn struct {
	net.Conn
	listener *gatedListener
	client   string
	once     sync.Once
}

func (c *gatedConn) Close() error {
	c.once.Do(func() { c.listener.leave(c.client) })
	return c.Conn.Close()
}
