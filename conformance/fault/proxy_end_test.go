package fault_test

import (
	"bytes"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/fault"
)

func TestProxyCloseEndsEverything(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	before := ownGoroutines()
	p := newProxy(t, s.Addr().String())
	for i := range 20 {
		c := dial(t, p)
		write(t, c, "x")
		switch i {
		case 5:
			p.Hold(fault.Requests)
		case 10:
			p.Drop(fault.Both)
		case 15:
			p.Delay(fault.Both, time.Hour)
		}
	}
	for range 2 {
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := net.Dial("tcp", p.Addr()); err == nil {
		t.Error("a closed proxy accepts connections")
	}
	p.Pass() // methods after Close do nothing
	p.SetUpstream(s.Addr().String())
	if _, err := net.Dial("tcp", p.Addr()); err == nil {
		t.Error("a closed proxy accepts connections after Pass")
	}
	eventually(t, "goroutines of the proxy ended", func() bool { return ownGoroutines() <= before })
}

// ownGoroutines counts the goroutines that run code of a proxy.
func ownGoroutines() int {
	buf := make([]byte, 1<<20)
	buf = buf[:runtime.Stack(buf, true)]
	n := 0
	for _, g := range strings.Split(string(buf), "\n\n") {
		if strings.Contains(g, "fault.(*pipe)") || strings.Contains(g, "fault.(*Proxy).accept") {
			n++
		}
	}
	return n
}

// Whatever is set and in whatever order, a client reads a prefix of its own echo, and after Pass everything works.
func TestProxyUnderConcurrentChanges(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	p := newProxy(t, s.Addr().String())
	stop := make(chan struct{})
	var wg, echoes sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case srv := <-s.conns:
				echoes.Go(func() {
					io.Copy(srv, srv)
					srv.Close()
				})
			case <-stop:
				return
			}
		}
	})
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				dir := fault.Direction(1 + rand.IntN(3))
				switch rand.IntN(8) {
				case 0:
					p.Hold(dir)
				case 1:
					p.Drop(dir)
				case 2:
					p.Delay(dir, time.Duration(rand.IntN(1000))*time.Microsecond)
				case 3:
					p.Reset()
				case 4:
					p.Refuse()
				default:
					p.Pass()
				}
				p.Seen(dir)
				p.Conns()
				time.Sleep(time.Duration(rand.IntN(500)) * time.Microsecond)
			}
		})
	}
	for range 8 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				c, err := net.Dial("tcp", p.Addr())
				if err != nil {
					continue
				}
				sent := bytes.Repeat([]byte{byte(rand.IntN(256)), byte(rand.IntN(256)), 1}, 1+rand.IntN(3000))
				c.SetDeadline(time.Now().Add(20 * time.Millisecond))
				c.Write(sent)
				got, _ := io.ReadAll(c)
				if !bytes.HasPrefix(sent, got) {
					t.Errorf("a client read what it never sent")
				}
				c.Close()
			}
		})
	}
	time.AfterFunc(500*time.Millisecond, func() { close(stop) })
	wg.Wait()
	p.Pass()
	p.Reset()
	client := dial(t, p)
	const text = "after all"
	write(t, client, text)
	late := time.After(patience)
	arrived, whole := make(chan struct{}, 1), false
	for !whole { // connections of before wait to be accepted as well
		select {
		case srv := <-s.conns:
			t.Cleanup(func() { srv.Close() })
			wg.Go(func() {
				got := make([]byte, len(text))
				if _, err := io.ReadFull(srv, got); err == nil && string(got) == text {
					arrived <- struct{}{}
				}
			})
		case <-arrived:
			whole = true
		case <-late:
			t.Fatal("nothing passes after Pass")
		}
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	echoes.Wait()
	wg.Wait()
}

func BenchmarkProxyRoundTrip(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go io.Copy(c, c)
		}
	}()
	p, err := fault.NewProxy(l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	for name, addr := range map[string]string{"direct": l.Addr().String(), "proxied": p.Addr()} {
		b.Run(name, func(b *testing.B) {
			c, err := net.Dial("tcp", addr)
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			buf := make([]byte, 64)
			for b.Loop() {
				if _, err := c.Write(buf); err != nil {
					b.Fatal(err)
				}
				if _, err := io.ReadFull(c, buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
