package fault

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/fencelock/fencelock/internal/freeport"
)

// Proxy is a Link for TCP: it listens on a free port of the loopback interface, and forwards each accepted connection
// to the upstream address. Each client has its own Proxy, so that a test can break its link while its rivals' links
// work.
//
// The rules beyond those of Link:
//
//   - Hold, Drop and Delay each replace the earlier setting of that direction. Drop also discards the bytes that
//     Hold or Delay kept back until then.
//   - Opening and closing a connection travel as requests (or, when the server closes, as replies) and obey the same
//     faults as bytes: under Hold(Requests) the server sees neither new connections nor closed ones. The client's
//     connect still succeeds, since the proxy accepts it.
//   - A byte stream never has a gap: a connection that has lost bytes delivers no more bytes in that direction, and the
//     next Pass resets it.
//   - Refuse makes connecting fail with ECONNREFUSED, as on a machine where the server does not run.
//   - Reset, Refuse and Close discard bytes kept back on the connections that they close.
//   - Memory: a connection queues at most 1 MiB in each direction; then the proxy stops reading, and TCP flow
//     control stops the sender.
//
// Methods are safe for concurrent use. They do not wait for a peer.
type Proxy struct {
	addr   string
	ctx    context.Context // ends with Close
	cancel context.CancelFunc

	control sync.Mutex // serialises the methods that change the state, so that each has taken effect when it returns

	mu       sync.Mutex // protects the following fields, and all pipes
	upstream string     // empty: no server, connections are refused
	refused  bool
	closed   bool
	err      error
	state    [2]direction
	conns    map[*conn]struct{}
	severed  int64        // connections that resetAll has closed
	listener net.Listener // nil while connections are refused
	port     *freeport.Port

	wg sync.WaitGroup // all goroutines
}

// direction is the treatment of the bytes of one direction.
type direction struct {
	mode  mode
	delay time.Duration
	seen  int64
}

type mode uint8

const (
	pass mode = iota
	hold
	drop
)

// NewProxy starts a proxy in front of upstream, a TCP address host:port. It connects only when a client does, so the
// server need not run yet. With an empty upstream, it refuses connections until SetUpstream. The caller must call
// Close.
func NewProxy(upstream string) (*Proxy, error) {
	reserved, err := freeport.Reserve()
	if err != nil {
		return nil, fmt.Errorf("fault: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &Proxy{
		addr: reserved.Addr(), ctx: ctx, cancel: cancel, port: reserved, upstream: upstream,
		conns: map[*conn]struct{}{},
	}
	p.mu.Lock()
	p.listen()
	err = p.err
	p.mu.Unlock()
	if err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// Addr returns the address to connect to, host:port. It never changes.
func (p *Proxy) Addr() string { return p.addr }

// SetUpstream changes the server for new connections: a restarted server may listen on another port, while its clients
// keep the proxy's address. Open connections stay with the earlier server. With an empty upstream, the proxy refuses
// new connections, as on a machine where the server does not run.
func (p *Proxy) SetUpstream(upstream string) {
	p.control.Lock()
	defer p.control.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.upstream = upstream
	p.listen()
}

// Conns returns the number of connections that are open on the client's side.
func (p *Proxy) Conns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for c := range p.conns {
		if !c.up.ended {
			n++
		}
	}
	return n
}

// Close resets every connection and ends every goroutine of the proxy before it returns. It returns an error if the
// proxy could not reopen its port after Refuse. Close is idempotent.
func (p *Proxy) Close() error {
	p.control.Lock()
	defer p.control.Unlock()
	p.mu.Lock()
	p.closed = true
	p.cancel()
	p.listen()
	p.resetAll(func(*conn) bool { return true })
	p.mu.Unlock()
	p.wg.Wait()
	p.port.Close()
	return p.err
}

// Pass implements Link.
func (p *Proxy) Pass() {
	p.control.Lock()
	defer p.control.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.state {
		p.state[i].mode, p.state[i].delay = pass, 0
	}
	p.refused = false
	p.resetAll(func(c *conn) bool { return c.up.gap || c.down.gap })
	p.listen()
	p.wake()
}

// Hold implements Link.
func (p *Proxy) Hold(dir Direction) { p.set(dir, hold, 0) }

// Drop implements Link.
func (p *Proxy) Drop(dir Direction) { p.set(dir, drop, 0) }

// Delay implements Link.
func (p *Proxy) Delay(dir Direction, d time.Duration) { p.set(dir, pass, d) }

// Reset implements Link.
func (p *Proxy) Reset() {
	p.control.Lock()
	defer p.control.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.resetAll(func(*conn) bool { return true })
}

// Refuse implements Link.
func (p *Proxy) Refuse() {
	p.control.Lock()
	defer p.control.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refused = true
	p.listen()
	p.resetAll(func(*conn) bool { return true })
}

// Seen implements Link.
func (p *Proxy) Seen(dir Direction) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	var n int64
	for i := range p.state {
		if dir&(1<<i) != 0 {
			n += p.state[i].seen
		}
	}
	return n
}

// Severed returns the number of connections that Reset, Refuse and Pass have closed abruptly so far. A test uses it
// to assert that a connection was open.
func (p *Proxy) Severed() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.severed
}

// set gives each direction in dir a mode, and stops its writes in progress: they must not go on after the method has
// returned.
func (p *Proxy) set(dir Direction, m mode, delay time.Duration) {
	p.control.Lock()
	defer p.control.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.state {
		if dir&(1<<i) != 0 {
			p.state[i].mode, p.state[i].delay = m, delay
		}
	}
	for c := range p.conns {
		for _, q := range []*pipe{c.up, c.down} {
			if q.dir&dir == 0 {
				continue
			}
			if m != pass || delay > 0 {
				q.interrupt()
			}
			if m == drop && len(q.queue) > 0 {
				q.swallow()
			}
		}
	}
	p.wake()
}

func (p *Proxy) of(dir Direction) *direction { return &p.state[dir>>1] }

// wake makes every pipe recheck the state. p.mu is held.
func (p *Proxy) wake() {
	for c := range p.conns {
		c.up.cond.Broadcast()
		c.down.cond.Broadcast()
	}
}

// resetAll abruptly closes the matching connections. p.mu is held.
func (p *Proxy) resetAll(match func(*conn) bool) {
	for c := range p.conns {
		if match(c) {
			c.close(true)
			p.severed++
		}
	}
}

// listen opens or closes the listener, according to the state. p.mu is held.
func (p *Proxy) listen() {
	want := !p.closed && !p.refused && p.upstream != ""
	if want == (p.listener != nil) {
		return
	}
	if !want {
		p.listener.Close() // resets connections that accept has not returned yet
		p.listener = nil
		return
	}
	l, err := p.port.Listen()
	if err != nil {
		p.err = err
		return
	}
	p.listener = l
	p.wg.Go(func() { p.accept(l) })
}

func (p *Proxy) accept(l net.Listener) {
	for {
		client, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(time.Millisecond) // out of file descriptors: other code must close some first
			continue
		}
		p.open(client.(*net.TCPConn), l)
	}
}

// open registers an accepted connection, unless its listener was closed meanwhile.
func (p *Proxy) open(client *net.TCPConn, l net.Listener) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != l {
		abort(client)
		return
	}
	newConn(p, client)
}
