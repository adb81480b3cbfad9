package fault_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/freeport"
)

var _ fault.Link = (*fault.Proxy)(nil)

func TestProxyPassesBytesAndEnds(t *testing.T) {
	t.Parallel()
	p, client, srv := link(t)
	write(t, client, "request")
	expect(t, srv, "request")
	write(t, srv, "reply")
	expect(t, client, "reply")
	if got := [3]int64{p.Seen(fault.Requests), p.Seen(fault.Replies), p.Seen(fault.Both)}; got != [3]int64{7, 5, 12} {
		t.Errorf("seen %v; want 7 requests, 5 replies, 12 both", got)
	}
	if n := p.Conns(); n != 1 {
		t.Errorf("%d connections; want 1", n)
	}
	// Half-close: the client has said everything, the server still answers.
	client.CloseWrite()
	if err := expectEnd(t, srv); err != nil {
		t.Fatalf("the server read %v; want an orderly end", err)
	}
	write(t, srv, "late reply")
	expect(t, client, "late reply")
	srv.Close()
	if err := expectEnd(t, client); err != nil {
		t.Fatalf("the client read %v; want an orderly end", err)
	}
	eventually(t, "no connection left", func() bool { return p.Conns() == 0 })
}

func TestProxyServerMaySpeakFirst(t *testing.T) {
	t.Parallel()
	_, client, srv := link(t)
	write(t, srv, "welcome")
	expect(t, client, "welcome")
}

func TestProxyPassesResets(t *testing.T) {
	t.Parallel()
	_, client, srv := link(t)
	srv.SetLinger(0)
	srv.Close()
	expectReset(t, client)

	_, client, srv = link(t)
	write(t, client, "last words")
	expect(t, srv, "last words")
	client.SetLinger(0)
	client.Close()
	expectEnd(t, srv)
}

func TestProxyKeepsStreamsIntact(t *testing.T) {
	t.Parallel()
	for name, disturb := range map[string]func(*fault.Proxy){
		"pass":  func(*fault.Proxy) {},
		"delay": func(p *fault.Proxy) { p.Delay(fault.Both, 2*time.Millisecond) },
		"hold and pass": func(p *fault.Proxy) {
			p.Hold(fault.Direction(1 + rand.IntN(3)))
			p.Pass()
		},
		"everything that loses nothing": func(p *fault.Proxy) {
			switch rand.IntN(3) {
			case 0:
				p.Hold(fault.Direction(1 + rand.IntN(3)))
			case 1:
				p.Delay(fault.Direction(1+rand.IntN(3)), time.Duration(rand.IntN(3))*time.Millisecond)
			case 2:
				p.Pass()
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, client, srv := link(t)
			stop, stopped := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(stopped)
				defer p.Pass()
				for {
					select {
					case <-stop:
						return
					default:
						disturb(p)
						runtime.Gosched()
					}
				}
			}()
			time.AfterFunc(300*time.Millisecond, func() { close(stop) })
			const size = 8 << 20
			var wg sync.WaitGroup
			for _, ends := range [][2]*net.TCPConn{{client, srv}, {srv, client}} {
				sent, got := sha256.New(), sha256.New()
				wg.Go(func() {
					r := rand.NewChaCha8([32]byte{1})
					if _, err := io.CopyN(io.MultiWriter(ends[0], sent), r, size); err != nil {
						t.Errorf("write: %v", err)
					}
					ends[0].CloseWrite()
				})
				wg.Go(func() {
					n, err := io.Copy(got, ends[1])
					if n != size || err != nil {
						t.Errorf("read %d bytes, %v; want %d", n, err, size)
					}
				})
				defer func() {
					if !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
						t.Error("the stream was changed on its way")
					}
				}()
			}
			wg.Wait()
			<-stopped
		})
	}
}

func TestProxyHoldsUntilPass(t *testing.T) {
	t.Parallel()
	p, client, srv := link(t)
	p.Hold(fault.Requests)
	write(t, client, "one ")
	awaitSeen(t, p, fault.Requests, 4)
	write(t, client, "two")
	expectSilence(t, srv)
	write(t, srv, "replies go on") // one way
	expect(t, client, "replies go on")
	p.Pass()
	expect(t, srv, "one two")

	p.Hold(fault.Replies)
	write(t, srv, "held")
	write(t, client, "requests go on")
	expect(t, srv, "requests go on")
	expectSilence(t, client)
	p.Pass()
	expect(t, client, "held")
}

// A request that is delivered after its caller gave up is what strands locks.
func TestProxyDeliversLateAfterTheClientClosed(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*net.TCPConn){
		"closed": func(c *net.TCPConn) { c.Close() },
		"reset":  func(c *net.TCPConn) { c.SetLinger(0); c.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			p, client, srv := link(t)
			p.Hold(fault.Requests)
			write(t, client, "late")
			awaitSeen(t, p, fault.Requests, 4) // a reset discards what the proxy's machine has not read
			end(client)
			eventually(t, "the proxy knows that the client is gone", func() bool { return p.Conns() == 0 })
			expectSilence(t, srv)
			p.Pass()
			expect(t, srv, "late")
			expectEnd(t, srv)
		})
	}
	t.Run("a connection that the server has not seen", func(t *testing.T) {
		s := newServer(t)
		p := newProxy(t, s.Addr().String())
		p.Hold(fault.Requests)
		client := dial(t, p)
		write(t, client, "late")
		client.Close()
		eventually(t, "the proxy knows that the client is gone", func() bool { return p.Conns() == 0 })
		select {
		case <-s.conns:
			t.Fatal("the server got a connection while requests were held")
		case <-time.After(silence):
		}
		p.Pass()
		srv := s.next(t)
		expect(t, srv, "late")
		expectEnd(t, srv)
	})
}

func TestProxyHoldStopsAWriteUnderWay(t *testing.T) {
	t.Parallel()
	p, client, srv := link(t)
	client.SetWriteDeadline(time.Now().Add(patience))
	written := make(chan error, 1)
	data := bytes.Repeat([]byte("0123456789abcdef"), 4<<20/16)
	go func() {
		_, err := client.Write(data) // more than all buffers take: the server does not read
		written <- err
	}()
	eventually(t, "the proxy waits for the server", func() bool {
		before := p.Seen(fault.Requests)
		time.Sleep(20 * time.Millisecond)
		return before > 0 && before == p.Seen(fault.Requests)
	})
	p.Hold(fault.Requests) // returns, although the server does not read
	srv.SetReadDeadline(time.Now().Add(time.Second))
	before, err := io.Copy(io.Discard, srv) // what the kernel has
	var timeout net.Error
	if !errors.As(err, &timeout) {
		t.Fatalf("read %v; want silence after what was sent before", err)
	}
	p.Pass()
	srv.SetReadDeadline(time.Now().Add(patience))
	rest := make([]byte, int64(len(data))-before)
	if _, err := io.ReadFull(srv, rest); err != nil || !bytes.Equal(rest, data[before:]) {
		t.Fatalf("the rest did not arrive intact: %v", err)
	}
	if err := <-written; err != nil {
		t.Fatal(err)
	}
}

func TestProxyBoundsWhatItHolds(t *testing.T) {
	t.Parallel()
	p, client, _ := link(t)
	p.Hold(fault.Requests)
	client.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
	if _, err := client.Write(make([]byte, 64<<20)); err == nil {
		t.Fatal("64 MiB were taken in while requests were held")
	}
	if n := p.Seen(fault.Requests); n > 2<<20 {
		t.Errorf("the proxy took in %d bytes", n)
	}
}

func TestProxyDropsForGood(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	p := newProxy(t, s.Addr().String())
	hit, spared := dial(t, p), dial(t, p)
	write(t, hit, "h")
	write(t, spared, "s")
	ends := map[byte]*net.TCPConn{}
	for range 2 {
		c, first := s.next(t), make([]byte, 1)
		if _, err := io.ReadFull(c, first); err != nil {
			t.Fatal(err)
		}
		ends[first[0]] = c
	}
	p.Drop(fault.Requests)
	write(t, hit, "swallowed")
	awaitSeen(t, p, fault.Requests, len("hs")+len("swallowed"))
	expectSilence(t, ends['h'])
	write(t, ends['h'], "reply") // one way
	expect(t, hit, "reply")
	expectSilence(t, hit)
	p.Pass()
	expectReset(t, hit)
	expectReset(t, ends['h'])
	write(t, spared, "whole") // its stream has no gap
	expect(t, ends['s'], "whole")
}

func TestProxyNeverDeliversAfterAGap(t *testing.T) {
	t.Parallel()
	p, client, srv := link(t)
	p.Hold(fault.Requests)
	write(t, client, "held")
	awaitSeen(t, p, fault.Requests, 4)
	p.Drop(fault.Requests) // swallows what was held
	p.Delay(fault.Requests, time.Millisecond)
	write(t, client, "after the gap")
	awaitSeen(t, p, fault.Requests, 17)
	expectSilence(t, srv)
	p.Pass()
	expectReset(t, client)
	expectReset(t, srv)
}

func TestProxyDropsConnectionsAndEnds(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	p := newProxy(t, s.Addr().String())
	closed := dial(t, p)
	srv := s.next(t)
	p.Drop(fault.Requests)
	closed.Close()
	expectSilence(t, srv) // the peer never learns
	opened := dial(t, p)
	write(t, opened, "into the void")
	awaitSeen(t, p, fault.Requests, 13)
	expectSilence(t, opened)
	p.Pass()
	expectReset(t, opened)
	expectReset(t, srv)
	select {
	case <-s.conns:
		t.Fatal("a swallowed connection was opened after all")
	default:
	}
}

func TestProxyDelays(t *testing.T) {
	t.Parallel()
	p, client, srv := link(t)
	const d = 200 * time.Millisecond
	p.Delay(fault.Requests, d)
	start := time.Now()
	write(t, client, "a")
	time.Sleep(d / 4)
	write(t, client, "b")
	expect(t, srv, "a")
	if took := time.Since(start); took < d {
		t.Errorf("the first byte arrived after %v; want at least %v", took, d)
	}
	expect(t, srv, "b")
	if took := time.Since(start); took < d+d/4 {
		t.Errorf("the second byte arrived after %v; want at least %v", took, d+d/4)
	}
	p.Delay(fault.Requests, time.Hour)
	write(t, srv, "c") // replies are not delayed
	expect(t, client, "c")
	write(t, client, "d")
	awaitSeen(t, p, fault.Requests, 3)
	p.Pass() // delivers at once what was delayed
	expect(t, srv, "d")
}

func TestProxyResets(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	p := newProxy(t, s.Addr().String())
	client := dial(t, p)
	srv := s.next(t)
	p.Reset()
	expectReset(t, client)
	expectReset(t, srv)
	if n := p.Severed(); n != 1 {
		t.Errorf("%d connections were severed; want 1", n)
	}
	again := dial(t, p)
	write(t, again, "again")
	expect(t, s.next(t), "again")
	if n := (fault.Links{p, p}).Severed(); n != 2 {
		t.Errorf("%d connections of two links were severed; want 2", n)
	}
}

func TestProxyRefusesUntilPass(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	p := newProxy(t, s.Addr().String())
	client := dial(t, p)
	srv := s.next(t)
	for range 3 {
		p.Refuse()
		p.Refuse()
		if client != nil {
			expectReset(t, client)
			expectReset(t, srv)
			client = nil
		}
		if c, err := net.Dial("tcp", p.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
			if err == nil {
				c.Close()
			}
			t.Fatalf("connect: %v; want refused", err)
		}
		p.Pass()
		again := dial(t, p)
		write(t, again, "again")
		expect(t, s.next(t), "again")
	}
}

func TestProxyFollowsARestartedServer(t *testing.T) {
	t.Parallel()
	p := newProxy(t, "")
	if _, err := net.Dial("tcp", p.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatalf("connect without a server: %v; want refused", err)
	}
	addr := p.Addr()
	for range 3 {
		s := newServer(t)
		p.SetUpstream(s.Addr().String())
		client := dial(t, p)
		srv := s.next(t)
		write(t, client, "hello")
		expect(t, srv, "hello")
		p.SetUpstream("")
		if _, err := net.Dial("tcp", p.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatalf("connect without a server: %v; want refused", err)
		}
		write(t, client, "still open")
		expect(t, srv, "still open")
	}
	p.Refuse()
	p.SetUpstream(newServer(t).Addr().String())
	if _, err := net.Dial("tcp", p.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatalf("connect while refused: %v; want refused", err)
	}
	if p.Addr() != addr {
		t.Errorf("the address changed from %s to %s", addr, p.Addr())
	}
}

func TestProxyReportsADeadServerAsReset(t *testing.T) {
	t.Parallel()
	p := newProxy(t, freeport.Addresses(t, 1)[0])
	c, err := net.Dial("tcp", p.Addr())
	if err == nil {
		defer c.Close()
		expectReset(t, c)
	} else if !errors.Is(err, syscall.ECONNRESET) { // so soon that connecting reports it
		t.Fatal(err)
	}
	p.Hold(fault.Replies) // then the client does not learn of it
	client := dial(t, p)
	expectSilence(t, client)
	p.Pass()
	expectReset(t, client)
}
