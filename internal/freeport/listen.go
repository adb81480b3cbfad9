package freeport

import (
	"errors"
	"net"
	"time"
)

// Again calls start, which listens where this process has listened before, and for ten seconds again while it cannot: a
// process that this one starts has copies of all descriptors until its program begins, among them that of a listener
// which was closed here meanwhile.
func Again(start func() error) error {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		err := start()
		if failed := (*net.OpError)(nil); !errors.As(err, &failed) || failed.Op != "listen" || time.Now().After(end) {
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
