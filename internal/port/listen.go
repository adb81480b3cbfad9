package port

import (
	"errors"
	"net"
	"syscall"
	"time"
)

// Again calls start, which listens on a port where this process has listened before, for a second as long as the port is
// in use: a process that this one starts has copies of all descriptors until its program begins, among them that of a
// listener which was closed here meanwhile.
func Again(start func() error) error {
	for end := time.Now().Add(time.Second); ; time.Sleep(time.Millisecond) {
		if err := start(); !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(end) {
			return err
		}
	}
}

func listen(addr string) (l net.Listener, err error) {
	err = Again(func() (err error) {
		l, err = net.Listen("tcp4", addr)
		return err
	})
	return l, err
}
