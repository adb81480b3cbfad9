package containers

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/freeport"
)

// peerNet is the network between the nodes of a cluster. Each ordered pair of nodes has its own links.
//
// All nodes must agree on all addresses, so an address cannot identify the dialling node. But a node can dial through
// a SOCKS proxy. Each node has its own SOCKS proxy, which thereby knows the dialling node, and reads the target in
// the request. It then connects through the fault.Proxy of that pair.
//
//	node 0 ─► SOCKS proxy of node 0 ─┬─► link 0→1 ─► node 1
//	                                 └─► link 0→2 ─► node 2
//
// A path between two nodes has links in both directions, since each node dials the other, and messages travel in both
// directions on a connection. Methods are safe for concurrent use.
type peerNet struct {
	ports   [Nodes][]*freeport.Port      // where the nodes listen for their peers
	named   map[string]peerPort          // by the address that the nodes dial, host:port
	links   [Nodes][Nodes][]*fault.Proxy // by dialler and dialled, one for each port; nil from a node to itself
	dialers [Nodes]*net.TCPListener      // the SOCKS proxy of each node
	work    sync.WaitGroup               // all goroutines

	mu     sync.Mutex // protects the following fields
	closed bool
	conns  map[net.Conn]struct{}
}

// peerPort is a port of a node.
type peerPort struct{ node, number int }

// newPeerNet makes the network of nodes with that number of ports each. Name returns the address that the other nodes
// dial for a port.
func newPeerNet(ports int, name func(node int, p *freeport.Port) string) (*peerNet, error) {
	n := &peerNet{conns: map[net.Conn]struct{}{}, named: map[string]peerPort{}}
	if err := n.open(ports, name); err != nil {
		n.close()
		return nil, err
	}
	for i, l := range n.dialers {
		n.work.Go(func() { n.accept(i, l) })
	}
	return n, nil
}

func (n *peerNet) open(ports int, name func(int, *freeport.Port) string) (err error) {
	for i := range n.dialers {
		if n.dialers[i], err = net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}); err != nil {
			return err
		}
		for number := range ports {
			p, err := freeport.Reserve()
			if err != nil {
				return err
			}
			n.ports[i] = append(n.ports[i], p)
			n.named[name(i, p)] = peerPort{i, number}
		}
	}
	for i := range n.links {
		for j := range n.links[i] {
			for _, p := range n.ports[j] {
				if i == j {
					continue
				}
				l, err := fault.NewProxy(p.Addr())
				if err != nil {
					return err
				}
				n.links[i][j] = append(n.links[i][j], l)
			}
		}
	}
	return nil
}

// dialer returns the address of the SOCKS proxy that node i must use for its peers.
func (n *peerNet) dialer(i int) string { return n.dialers[i].Addr().String() }

func (n *peerNet) close() {
	n.mu.Lock()
	n.closed = true
	for c := range n.conns {
		c.Close()
	}
	n.mu.Unlock()
	for _, l := range n.dialers {
		if l != nil {
			l.Close()
		}
	}
	n.work.Wait()
	n.each(func(l *fault.Proxy) { l.Close() })
	for _, ports := range n.ports {
		for _, p := range ports {
			p.Close()
		}
	}
}

// keep registers a connection, so that close can end it.
func (n *peerNet) keep(c net.Conn) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.closed {
		n.conns[c] = struct{}{}
	}
	return !n.closed
}

// end closes a connection abruptly: a broken link in one half must be visible in the other.
func (n *peerNet) end(c *net.TCPConn) {
	c.SetLinger(0)
	c.Close()
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.conns, c)
}

func (n *peerNet) accept(from int, l *net.TCPListener) {
	for {
		c, err := l.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(time.Millisecond) // out of file descriptors: other code must close some first
			continue
		}
		n.work.Go(func() { n.serve(from, c) })
	}
}

// serve connects one connection of node from to the node that it requests.
func (n *peerNet) serve(from int, c *net.TCPConn) {
	defer n.end(c)
	if !n.keep(c) {
		return
	}
	c.SetDeadline(time.Now().Add(10 * time.Second))
	name, err := readSOCKS(c)
	to, known := n.named[name]
	if err != nil || !known || to.node == from {
		return
	}
	if !listens(n.ports[to.node][to.number].Addr()) {
		c.Write(socksReply(5)) // the link would accept and then reset it, which services treat as another fault
		return
	}
	up, err := net.Dial("tcp", n.links[from][to.node][to.number].Addr())
	if err != nil {
		c.Write(socksReply(5)) // connection refused
		return
	}
	upstream := up.(*net.TCPConn)
	defer n.end(upstream)
	if _, err := c.Write(socksReply(0)); err != nil || !n.keep(upstream) {
		return
	}
	c.SetDeadline(time.Time{})
	ends := make(chan struct{}, 2)
	pump := func(dst, src *net.TCPConn) {
		if _, err := io.Copy(dst, src); err != nil || dst.CloseWrite() != nil {
			// Reset, and not close, both halves: the other half must not wait.
			dst.Close()
			src.Close()
		}
		ends <- struct{}{}
	}
	go pump(upstream, c)
	go pump(c, upstream)
	<-ends
	<-ends
}

// listens reports whether a connection to addr is accepted.
func listens(addr string) bool {
	c, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return false
	}
	c.(*net.TCPConn).SetLinger(0)
	c.Close()
	return true
}

// readSOCKS reads the greeting and the request of a SOCKS5 client (RFC 1928), and returns the requested host:port.
func readSOCKS(c net.Conn) (addr string, err error) {
	var head [4]byte
	if _, err := io.ReadFull(c, head[:2]); err != nil {
		return "", err
	}
	if _, err := io.CopyN(io.Discard, c, int64(head[1])); err != nil { // the methods that it offers
		return "", err
	}
	if _, err := c.Write([]byte{5, 0}); err != nil { // no authentication
		return "", err
	}
	if _, err := io.ReadFull(c, head[:]); err != nil {
		return "", err
	}
	const connect, ipv4, name = 1, 1, 3
	size := [1]byte{net.IPv4len}
	switch {
	case head[0] != 5 || head[1] != connect || head[3] != ipv4 && head[3] != name:
		return "", fmt.Errorf("not a SOCKS5 request to connect: %v", head)
	case head[3] == name:
		if _, err := io.ReadFull(c, size[:]); err != nil {
			return "", err
		}
	}
	rest := make([]byte, int(size[0])+2) // and the port
	if _, err := io.ReadFull(c, rest); err != nil {
		return "", err
	}
	host := string(rest[:size[0]])
	if head[3] == ipv4 {
		host = net.IP(rest[:size[0]]).String()
	}
	return net.JoinHostPort(host, strconv.Itoa(int(binary.BigEndian.Uint16(rest[size[0]:])))), nil
}

func socksReply(code byte) []byte { return []byte{5, code, 0, 1, 0, 0, 0, 0, 0, 0} }

// each calls act with every link.
func (n *peerNet) each(act func(*fault.Proxy)) {
	for _, row := range n.links {
		for _, links := range row {
			for _, l := range links {
				act(l)
			}
		}
	}
}

// Cut keeps back all messages from node from to node to until Heal, which then delivers them late. Messages in the
// other direction pass. Connections stay open.
func (n *peerNet) Cut(from, to int) {
	for _, l := range n.links[from][to] { // connections that from dialled
		l.Hold(fault.Requests)
	}
	for _, l := range n.links[to][from] { // connections that to dialled
		l.Hold(fault.Replies)
	}
}

// Isolate cuts node i off from the other nodes, in both directions. Clients reach it as before.
func (n *peerNet) Isolate(i int) {
	for j := range Nodes {
		if j != i {
			n.Cut(i, j)
			n.Cut(j, i)
		}
	}
}

// Heal ends every Cut.
func (n *peerNet) Heal() { n.each((*fault.Proxy).Pass) }

// Said returns the number of bytes that node from has sent to node to so far, delivered or not.
func (n *peerNet) Said(from, to int) (total int64) {
	for _, l := range n.links[from][to] {
		total += l.Seen(fault.Requests)
	}
	for _, l := range n.links[to][from] {
		total += l.Seen(fault.Replies)
	}
	return total
}
