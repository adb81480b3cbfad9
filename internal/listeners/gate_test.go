package listeners

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"
)

// gated opens a listener that accepts and keeps connections.
func gated(t *testing.T, g *Gate, most int, trusted ...netip.Prefix) (dial func() bool, closeOne func()) {
	t.Helper()
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := g.Admit(plain, most, "tests", trusted...)
	t.Cleanup(func() { l.Close() })
	accepted := make(chan net.Conn, 100)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if _, err := c.Write([]byte{1}); err != nil {
				c.Close()
				continue
			}
			accepted <- c
		}
	}()
	dial = func() bool {
		t.Helper()
		c, err := net.Dial("tcp", plain.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		c.SetReadDeadline(time.Now().Add(patience))
		_, err = c.Read(make([]byte, 1))
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
			t.Fatal(err)
		}
		return err == nil
	}
	return dial, func() { (<-accepted).Close() }
}

// All listeners of a process share one limit. Each listener has its own limit below it, and each client a share.
func TestGate(t *testing.T) {
	t.Parallel()
	count := func(want int, dial func() bool) {
		t.Helper()
		n := 0
		for range want + 3 {
			if dial() {
				n++
			}
		}
		if n != want {
			t.Errorf("%d connections are admitted, want %d", n, want)
		}
	}
	g := NewGate(10, 10, slog.New(slog.DiscardHandler))
	first, closeFirst := gated(t, g, 4)
	second, _ := gated(t, g, 10)
	count(4, first)
	count(6, second)
	closeFirst()
	count(1, first)

	shared := NewGate(10, 3, slog.New(slog.DiscardHandler))
	one, _ := gated(t, shared, 10)
	other, _ := gated(t, shared, 10)
	proxies, _ := gated(t, shared, 10, netip.MustParsePrefix("127.0.0.0/8"))
	count(3, one)
	count(0, other)
	count(7, proxies)
}

func TestClientOf(t *testing.T) {
	t.Parallel()
	for host, want := range map[string]string{
		"192.0.2.1": "192.0.2.1", "::ffff:192.0.2.1": "192.0.2.1", "2001:db8:1:2:3:4:5:6": "2001:db8:1:2::/64",
		"2001:db8:1:2::1": "2001:db8:1:2::/64", "fe80::1%eth0": "fe80::/64", "pipe": "pipe",
	} {
		if got := ClientOf(host); got != want {
			t.Errorf("%s is %s, want %s", host, got, want)
		}
	}
}
