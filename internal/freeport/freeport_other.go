//go:build !linux

// Package freeport reserves free ports of the loopback interface for servers that come and go.
package freeport

import "net"

// Port is a free port of the loopback interface. Elsewhere than on Linux another process may take it while the port
// has no listener.
type Port struct {
	addr  string
	first net.Listener // until the first Listen or Lend
}

// Reserve finds a free port. The caller owes Close.
func Reserve() (*Port, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	return &Port{addr: l.Addr().String(), first: l}, nil
}

// Addr returns the address, 127.0.0.1:port.
func (p *Port) Addr() string { return p.addr }

// Listen listens on the port. It may be called again after the listener was closed.
func (p *Port) Listen() (net.Listener, error) {
	if l := p.first; l != nil {
		p.first = nil
		return l, nil
	}
	return listen(p.addr)
}

// Lend makes the port free for a child process to listen on.
func (p *Port) Lend() { p.Close() }

// Close gives the port back. It is idempotent.
func (p *Port) Close() {
	if p.first != nil {
		_ = p.first.Close() // whatever it says, the port is free
		p.first = nil
	}
}
