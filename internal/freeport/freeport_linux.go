// Package freeport reserves free ports of the loopback interface for servers that come and go.
package freeport

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"syscall"
)

// Port is a free port of the loopback interface that stays reserved without a listener: a socket is bound to it which
// never listens. Asking the kernel for a free port and closing it again is not safe: another program may get it in
// between. A server that listens on it must set SO_REUSEADDR, as package net and most servers do.
type Port struct {
	addr string
	fd   int
}

// The ports to choose from: below the range of Linux's automatic ports (32768 to 60999 by default).
const (
	firstPort = 16384
	lastPort  = 32767
)

// Reserve finds a free port. The caller owes Close.
func Reserve() (*Port, error) {
	var err error
	for range 1000 {
		number := firstPort + rand.IntN(lastPort-firstPort+1)
		var fd int
		if fd, err = bind(number); err == nil {
			return &Port{fd: fd, addr: fmt.Sprintf("127.0.0.1:%d", number)}, nil
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
	}
	return nil, fmt.Errorf("reserve a port: %w", err)
}

// bind binds a socket to the port, which no other process may have bound. Only then the port is shared with who will
// listen.
func bind(number int) (int, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	err = os.NewSyscallError("bind",
		syscall.Bind(fd, &syscall.SockaddrInet4{Port: number, Addr: [4]byte{127, 0, 0, 1}}))
	if err == nil {
		err = os.NewSyscallError("setsockopt", syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1))
	}
	if err != nil {
		_ = syscall.Close(fd) // the error before it is the one to tell
		return -1, err
	}
	return fd, nil
}

// Addr returns the address, 127.0.0.1:port.
func (p *Port) Addr() string { return p.addr }

// Listen listens on the port. It may be called again after the listener was closed.
func (p *Port) Listen() (net.Listener, error) { return listen(p.addr) }

// Lend makes the port free for a child process to listen on.
func (p *Port) Lend() {}

// Close gives the port back. It is idempotent.
func (p *Port) Close() {
	if p.fd >= 0 {
		_ = syscall.Close(p.fd) // whatever it says, the port is free
		p.fd = -1
	}
}
