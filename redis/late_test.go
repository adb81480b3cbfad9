package redis

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// lateLink is a proxy that delays one request, and all later data of its connection, but not the other connections.
type lateLink struct {
	addr    string
	request []byte        // a part of the delayed request
	first   atomic.Bool   // the request has come
	held    chan struct{} // closed when the request has come
	pass    chan struct{} // closed to forward the request
	removal chan struct{} // receives when a removal of the same request comes
}

func newLateLink(t *testing.T, to string, request string) *lateLink {
	t.Helper()
	in, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &lateLink{
		addr: in.Addr().String(), request: []byte(request), held: make(chan struct{}), pass: make(chan struct{}),
		removal: make(chan struct{}, 1),
	}
	var all sync.WaitGroup
	t.Cleanup(func() {
		in.Close()
		all.Wait()
	})
	all.Go(func() {
		for {
			client, err := in.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", to)
			if err != nil {
				client.Close()
				continue
			}
			all.Go(func() { l.carry(server.(*net.TCPConn), client) })
			all.Go(func() {
				io.Copy(client, server)
				client.Close()
			})
		}
	})
	return l
}

// carry forwards the client's data, and then the end of its connection.
func (l *lateLink) carry(server *net.TCPConn, client net.Conn) {
	defer server.CloseWrite()
	chunk := make([]byte, 1<<16)
	for {
		n, err := client.Read(chunk)
		switch {
		case !bytes.Contains(chunk[:n], l.request):
		case l.first.CompareAndSwap(false, true):
			close(l.held)
			<-l.pass
		case bytes.Contains(chunk[:n], []byte("\r\n"+redisscript.Remove+"\r\n")):
			select {
			case l.removal <- struct{}{}:
			default:
			}
		}
		if _, failed := server.Write(chunk[:n]); failed != nil || err != nil {
			return
		}
	}
}

// passRelease releases by request, as the core does, and forwards the delayed request when the release has waited for
// it.
func (l *lateLink) passRelease(t *testing.T, d *Driver, r backend.Request, what string) {
	t.Helper()
	released := make(chan error, 1)
	go func() { released <- d.Release(within(t, 10*slack), r.Grant()) }()
	select {
	case <-l.removal:
		t.Errorf("%s: the removal went out before the request had arrived", what)
	case <-time.After(200 * time.Millisecond): // it would have come immediately
	}
	close(l.pass)
	if err := <-released; err != nil {
		t.Errorf("%s: release by request: %v", what, err)
	}
}

// The release of a cancelled acquire comes after the acquire, even if it uses another connection, which the server
// reads first.
func TestCancelledRequestArrivesLast(t *testing.T) {
	t.Parallel()
	for _, wait := range []bool{false, true} {
		s := startServer(t)
		r := request("n", time.Minute, wait)
		link := newLateLink(t, s.addr, r.RequestID)
		d, other := openAt(t, link.addr), s.open(t)
		mustRelease(t, d, mustAcquire(t, d, request("warm-up", time.Minute, wait)))
		ctx, cancel := context.WithCancel(context.Background())
		failed := make(chan error, 1)
		go func() {
			_, err := d.Acquire(ctx, r)
			failed <- err
		}()
		<-link.held
		cancel()
		if err := <-failed; !errors.Is(err, backend.ErrUnknown) || !errors.Is(err, context.Canceled) {
			t.Errorf("wait %v: cancelled: %v", wait, err)
		}
		link.passRelease(t, d, r, fmt.Sprint("wait ", wait))
		g, err := other.Acquire(within(t, 10*slack), request("n", time.Minute, true))
		if err != nil {
			t.Fatalf("wait %v: the name stays closed: %v", wait, err)
		}
		mustRelease(t, other, g)
		nothingLeft(t, s)
	}
}
