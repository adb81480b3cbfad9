package zookeeper_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/testtier"
	"github.com/fencelock/fencelock/zookeeper"
)

// peer listens, and does the same with each connection.
func peer(t testing.TB, do func(net.Conn)) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go do(c)
		}
	}()
	return l.Addr().String()
}

// TestWrongPeer connects to what is no ZooKeeper, or not as it is spoken to: the error says what was met.
func TestWrongPeer(t *testing.T) {
	t.Parallel()
	closed := peer(t, func(c net.Conn) { c.Close() })
	refusing := freeport.Addresses(t, 1)[0]
	says := func(text string) func(net.Conn) {
		return func(c net.Conn) {
			_, _ = c.Read(make([]byte, 1))
			_, _ = c.Write([]byte(text))
			// The client closes it.
		}
	}
	for name, test := range map[string]struct{ url, want string }{
		"nobody listens":    {"zk://" + refusing, "connection refused"},
		"no such host":      {"zk://nowhere.invalid", "nowhere.invalid"},
		"closes every time": {"zk://" + closed, closed + " did not answer the connect request"},
		"a web server":      {"zk://" + peer(t, says("HTTP/1.1 400 Bad Request\r\n\r\n")), "not ZooKeeper"},
		"a server that wants TLS": {
			"zk://" + peer(t, says("\x15\x03\x03\x00\x02\x02\x46 and the rest of it")), "requires TLS",
		},
		"TLS with a plain peer": {"zks://" + peer(t, says("no TLS spoken here, sorry")), "TLS"},
		"TLS with a ZooKeeper":  {"zks://" + sharedServer(t).Addr(), "TLS"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			_, err := zookeeper.Open(ctx, test.url+"?timeout=1500ms")
			if !errors.Is(err, backend.ErrUnavailable) || !strings.Contains(fmt.Sprint(err), test.want) ||
				strings.Contains(fmt.Sprint(err), "%!") {
				t.Errorf("Open = %v, want ErrUnavailable with %q", err, test.want)
			}
		})
	}
}

// TestOpenWaitsForASlowServer has a server that accepts connections and answers after more time than one Ping takes:
// Open waits for it until its timeout.
func TestOpenWaitsForASlowServer(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	addr, link := sharedServer(t).NewLink(t)
	link.Hold(fault.Both)
	time.AfterFunc(12*time.Second, link.Pass)
	d, err := zookeeper.Open(t.Context(), fmt.Sprintf("zk://%s?timeout=2m&tick=%v", addr, containers.ZooKeeperTick))
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestServersThatStart has servers that accept connections and close them, as those that start or elect a leader do,
// beside an address at which nobody listens. Open and an attempt wait until one serves.
func TestServersThatStart(t *testing.T) {
	t.Parallel()
	server := sharedServer(t)
	start := func() (addrs []string) {
		const closes = 4 // each address has its turn more than once
		var accepted atomic.Int32
		starting := peer(t, func(c net.Conn) {
			defer c.Close()
			if accepted.Add(1) <= closes {
				return
			}
			s, err := net.Dial("tcp", server.Addr())
			if err != nil {
				return
			}
			defer s.Close()
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, s)
			}()
			_, _ = io.Copy(s, c)
		})
		return append(freeport.Addresses(t, 1), starting)
	}
	t.Run("Open", func(t *testing.T) {
		t.Parallel()
		url := fmt.Sprintf("zk://%s?timeout=1m&tick=%v", strings.Join(start(), ","), containers.ZooKeeperTick)
		d, err := zookeeper.Open(t.Context(), url)
		if err != nil {
			t.Fatalf("Open = %v", err)
		}
		if err := d.Close(soon(t, 10*time.Second)); err != nil {
			t.Error(err)
		}
	})
	t.Run("TryAcquire", func(t *testing.T) {
		t.Parallel()
		d := driver(t, start()...)
		release(t, d, take(t, d, request("starting", false)))
	})
}
