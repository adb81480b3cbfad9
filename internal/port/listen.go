package port

import (
	"net"
	"time"
)

// listen listens, and tries for a second: a process that this one starts has copies of all descriptors until its program
// begins, among them that of a listener which was closed here meanwhile.
func listen(addr string) (l net.Listener, err error) {
	for end := time.Now().Add(time.Second); ; time.Sleep(time.Millisecond) {
		if l, err = net.Listen("tcp4", addr); err == nil || time.Now().After(end) {
			return l, err
		}
	}
}
