package redlock

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// lateLink is a proxy that delays the first request with a given text, but not other connections.
type lateLink struct {
	text  []byte
	first atomic.Bool
	pass  chan struct{} // closed to forward the request
	later atomic.Bool   // another request with the text has come earlier
}

func newLateLink(t *testing.T, to, text string) (l *lateLink, addr string) {
	t.Helper()
	in, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l = &lateLink{text: []byte(text), pass: make(chan struct{})}
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
	return l, in.Addr().String()
}

// carry forwards the client's data, and then the end of its connection.
func (l *lateLink) carry(server *net.TCPConn, client net.Conn) {
	defer server.CloseWrite()
	chunk := make([]byte, 1<<16)
	for {
		n, err := client.Read(chunk)
		if bytes.Contains(chunk[:n], l.text) {
			if l.first.CompareAndSwap(false, true) {
				<-l.pass
			} else {
				l.later.Store(true)
			}
		}
		if _, failed := server.Write(chunk[:n]); failed != nil || err != nil {
			return
		}
	}
}

// The release of a hold on a new connection does not overtake the request for its vote, which is still on its way on
// the abandoned previous connection: otherwise the vote would stay for a TTL.
func TestReleaseBehindALateVote(t *testing.T) {
	t.Parallel()
	s := start(t, 3)
	r := backend.Request{
		Name: "n", Owner: "o", RequestID: backend.NewRequestID(), HoldID: backend.NewRequestID(),
		Fresh: true, TTL: time.Minute,
	}
	link, addr := newLateLink(t, s[0].Addr(), r.RequestID)
	var clients []goredis.UniversalClient
	for _, addr := range []string{addr, s[1].Addr(), s[2].Addr()} {
		c := goredis.NewClient(&goredis.Options{Addr: addr})
		defer c.Close()
		clients = append(clients, c)
	}
	d := New(clients, &Options{TrustFresh: true})
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	defer d.Close(ctx)
	warm := r
	warm.Name, warm.RequestID = "warm-up", backend.NewRequestID()
	g, err := d.Acquire(ctx, warm)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Release(ctx, g); err != nil {
		t.Fatal(err)
	}
	if g, err = d.Acquire(ctx, r); err != nil {
		t.Fatal(err)
	}
	if err := d.Release(ctx, g); err != nil {
		t.Fatal(err)
	}
	failed := time.Now()
	for !d.service.nodes[0].sick.Load() && time.Since(failed) < 10*time.Second {
		time.Sleep(time.Millisecond)
	}
	failed = time.Now()
	time.Sleep(time.Second / 4) // without waiting, the release would come in this time
	if link.later.Load() && time.Since(failed) < time.Second {
		t.Error("the release went out before the request for the vote had arrived")
	}
	close(link.pass)
	for deadline := time.Now().Add(20 * time.Second); s.votes(t, r.Name) > 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the late vote stays")
		}
	}
}

// A repetition gets the existing hold of the request, and the removal of the attempt that made the hold does not end
// it. A hold without a majority is replaced.
func TestRepeatSharesTheHold(t *testing.T) {
	t.Parallel()
	s := start(t, 3)
	a, b := s.driver(t, nil), s.driver(t, nil)
	ctx := within(t, 30*time.Second)
	for i, c := range []struct {
		lost int // votes of the first attempt
		by   *Driver
		wait bool
	}{{0, b, false}, {1, b, false}, {2, b, false}, {0, b, true}, {1, b, true}, {0, a, false}, {0, a, true}} {
		lost, b := c.lost, c.by
		r := request(fmt.Sprint("case ", i))
		r.Fresh, r.Wait = false, c.wait
		p, err := a.service.Enter(ctx, engine.Entering{Request: r, Attempt: "first"})
		if err != nil || !p.Held {
			t.Fatalf("Enter = %+v, %v", p, err)
		}
		eventually(t, "all servers have voted", func() bool { return s.votes(t, r.Name) == 3 })
		for i := range lost {
			s.expire(t, i, r.Name)
		}
		g, err := b.Acquire(ctx, r)
		if err != nil {
			t.Fatal(err)
		}
		if same := g.Nonce == p.Nonce; same != (lost < 2) {
			t.Errorf("%d votes lost: a repeat has the same nonce: %v", lost, same)
		}
		of := r.Grant()
		of.Incarnation = p.Incarnation
		nonce := redisscript.NonceIn(redisconn.StartOf(of))
		place := place{may: a.service.all(), nonce: nonce, px: redisscript.Millis(r.TTL)}
		if _, err := a.service.Leave(ctx, engine.Leaving{Grant: r.Grant(), Place: place.String()}); err != nil {
			t.Error(err)
		}
		if err := b.Renew(ctx, []backend.Grant{g})[0].Err; err != nil {
			t.Errorf("%d votes lost: renewal after the removal of the first attempt = %v", lost, err)
		}
		if err := b.Release(ctx, g); err != nil {
			t.Error(err)
		}
		eventually(t, "no vote is left", func() bool { return s.votes(t, r.Name) == 0 })
	}
}
