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

// reservedFiles is the number of file descriptors that client connections must not use. The log, the snapshots and the
// connections to other members always need some: a log that cannot open its next file stops the server. Probes and
// operators have their own share.
const reservedFiles = 64 + opsConnections + AdminConnections

// AdminConnections bounds the connections of operators to the admin listener.
const AdminConnections = 32

// Connections divides the file descriptors of a process between client connections, over all listeners, and connections
// of other members.
func Connections(files int) (clients, members int) {
	members = max(files/8, 8)
	return max(files-reservedFiles-members, 8), members
}

// Gate bounds the connections of a process over all of its listeners: in total, and from one address. It closes further
// connections immediately, before TLS and before any request. All methods are safe for concurrent use.
type Gate struct {
	most, share int
	log         *slog.Logger
	warned      atomic.Int64 // the time of the last warning, in Unix seconds

	mu   sync.Mutex // protects the following fields, and the listeners' fields
	open int
	from map[string]int // by client
}

// NewGate returns a gate for at most most connections, of which at most share may come from one address.
func NewGate(most, share int, log *slog.Logger) *Gate {
	return &Gate{most: most, share: share, log: log, from: map[string]int{}}
}

// Admit returns l with the bounds of g. l itself accepts at most most connections. Addresses in trusted networks, such
// as those of proxies, have no bound per address. what names the connections in the log.
func (g *Gate) Admit(l net.Listener, most int, what string, trusted ...netip.Prefix) net.Listener {
	return g.AdmitShare(l, most, g.share, what, trusted...)
}

// AdmitShare is like Admit, with a separate share for each address at l; 0 means the share of g.
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

// ClientOf returns a name for the client at an address without a port: the address itself, or for IPv6 its /64 network,
// since one client usually has all addresses of such a network.
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

// HostOf returns an address without its port.
func HostOf(address string) string {
	if host, _, err := net.SplitHostPort(address); err == nil {
		return host
	}
	return address
}

// Trusted reports whether an address without a port is in one of the networks.
func Trusted(host string, networks []netip.Prefix) bool {
	ip, err := netip.ParseAddr(host)
	return err == nil && slices.ContainsFunc(networks, func(p netip.Prefix) bool { return p.Contains(ip.Unmap()) })
}

// enter counts a connection, or returns false if there are too many.
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
