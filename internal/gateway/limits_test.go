package gateway

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/internal/testcert"
)

// pipes is a listener of connections within the process, so that time can be simulated.
type pipes struct {
	conns chan net.Conn
	done  chan struct{}
}

// piped is a connection that appears to come from an address.
type piped struct {
	net.Conn
	from net.Addr
}

func (p piped) RemoteAddr() net.Addr { return p.from }

func (l pipes) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l pipes) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 7481} }

func (l pipes) Close() error {
	close(l.done)
	return nil
}

// dial connects from an address.
func (l pipes) dial(host string) net.Conn {
	client, server := net.Pipe()
	l.conns <- piped{server, &net.TCPAddr{IP: net.ParseIP(host), Port: 9}}
	return client
}

// socketed runs a test against a gateway that serves connections, in simulated time.
func socketed(t *testing.T, config *tls.Config, test func(t *testing.T, l pipes, d *door)) {
	simulated(t, func(t *testing.T, d *door) {
		l := pipes{make(chan net.Conn), make(chan struct{})}
		ctx, stop := context.WithCancel(t.Context())
		served := make(chan error, 1)
		go func() { served <- d.g.Serve(ctx, l, config) }()
		test(t, l, d)
		stop()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
}

// ends returns the time until the gateway closes a connection, and the text that the gateway writes before.
func ends(t *testing.T, c net.Conn) (time.Duration, string) {
	t.Helper()
	began := time.Now()
	text, err := io.ReadAll(c)
	if err != nil {
		t.Errorf("the connection ends with %v", err)
	}
	return time.Since(began), string(text)
}

// tell writes text as the client. It ignores errors: the gateway may have closed the connection.
func tell(c net.Conn, text string) { _, _ = io.WriteString(c, text) }

const postX = "POST /v1/locks/x/acquire HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

// A client that sends slowly, sends nothing, or reads nothing keeps no connection.
func TestSlowClients(t *testing.T) {
	body := acquireOf("a", "")
	request := fmt.Sprintf(postX+"Content-Length: %d\r\n\r\n%s", len(body), body)
	for _, c := range []struct {
		name, says string
		most       time.Duration
		answer     string
	}{
		{"silence", "", headerTime, ""},
		{"half a header", "POST /v1/locks/x/acquire HTTP/1.1\r\nHost: localhost\r\nX-", headerTime, ""},
		{"half a body", postX + "Content-Length: 50\r\n\r\n{\"ownerId\"", bodyTime, "the body could not be read"},
		{"half a chunk", postX + "Transfer-Encoding: chunked\r\n\r\n32\r\n{", bodyTime, "the body could not be read"},
		{"half a refused body", "POST / HTTP/1.1\r\nHost: evil.test\r\nContent-Length: 50\r\n\r\n{", bodyTime, "MISDIRECTED"},
		{"idle", request, idleTime, "lockToken"},
	} {
		t.Run(c.name, func(t *testing.T) {
			socketed(t, nil, func(t *testing.T, l pipes, _ *door) {
				conn := l.dial("127.0.0.1")
				go tell(conn, c.says)
				took, said := ends(t, conn)
				if took < c.most-time.Second || took > c.most+time.Second || !strings.Contains(said, c.answer) {
					t.Errorf("it took %v, want %v, and the answer is %q", took, c.most, said)
				}
			})
		})
	}
	t.Run("drops", func(t *testing.T) { // each byte comes soon after the last one, but the whole body takes too long
		socketed(t, nil, func(t *testing.T, l pipes, _ *door) {
			conn := l.dial("127.0.0.1")
			var dripping sync.WaitGroup
			dripping.Go(func() {
				tell(conn, postX+"Content-Length: 5000\r\n\r\n")
				for err := error(nil); err == nil; time.Sleep(time.Second) {
					_, err = io.WriteString(conn, " ")
				}
			})
			if took, said := ends(t, conn); took > bodyTime+time.Second {
				t.Errorf("it took %v: %q", took, said)
			}
			dripping.Wait()
		})
	})
	t.Run("reads nothing", func(t *testing.T) {
		socketed(t, nil, func(t *testing.T, l pipes, _ *door) {
			conn := l.dial("127.0.0.1")
			tell(conn, request)
			time.Sleep(pollMost + answerTime + time.Second)
			synctest.Wait()
			if _, err := io.WriteString(conn, request); err == nil {
				t.Error("the connection is still served")
			}
		})
	})
	t.Run("watches and reads nothing", func(t *testing.T) {
		socketed(t, nil, func(t *testing.T, l pipes, d *door) {
			conn := l.dial("127.0.0.1")
			tell(conn, "GET /v1/locks/x/watch HTTP/1.1\r\nHost: localhost\r\n\r\n")
			time.Sleep(beatTime + sendTime + time.Second)
			synctest.Wait()
			d.g.mu.Lock()
			defer d.g.mu.Unlock()
			if d.g.watches.all != 0 {
				t.Error("the watch is still counted")
			}
		})
	})
}

func TestLargeBodies(t *testing.T) {
	large := strings.Repeat(" ", maxBody) + acquireOf("a", "")
	for _, c := range []struct{ name, says, answer string }{
		{"announced", fmt.Sprintf(postX+"Content-Length: %d\r\n\r\n%s", len(large), large), " 413 "},
		{"in chunks", fmt.Sprintf(postX+"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n", len(large), large), " 413 "},
		{"without end", fmt.Sprintf(postX+"Content-Length: %d\r\n\r\n%s", 1<<40, large), " 413 "},
		{"headers", postX + "X: " + strings.Repeat("x", headersMost+8<<10) + "\r\n\r\n", " 431 "},
		{"negative", postX + "Content-Length: -1\r\n\r\n", " 400 "},
	} {
		t.Run(c.name, func(t *testing.T) {
			socketed(t, nil, func(t *testing.T, l pipes, d *door) {
				conn := l.dial("127.0.0.1")
				go tell(conn, c.says)
				line, err := bufio.NewReader(conn).ReadString('\n')
				if err != nil || !strings.Contains(line, c.answer) {
					t.Errorf("the answer is %q (%v), want%s", line, err, c.answer)
				}
				if err := conn.Close(); err != nil {
					t.Error(err)
				}
				d.is(d.get(atX), 404, `{"locked":false}`)
			})
		})
	}
}

// from is a listener whose clients appear to come from a host.
type from struct {
	net.Listener
	host string
}

func (l from) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return piped{c, &net.TCPAddr{IP: net.ParseIP(l.host), Port: 9}}, err
}

// identified returns a TLS configuration for each name, with a certificate of that name; the empty name has no
// certificate.
func identified(t *testing.T, a *testcert.Authority, names ...string) map[string]*tls.Config {
	t.Helper()
	text, err := os.ReadFile(a.File)
	if err != nil {
		t.Fatal(err)
	}
	trusted := x509.NewCertPool()
	trusted.AppendCertsFromPEM(text)
	all := map[string]*tls.Config{}
	for _, name := range names {
		config := &tls.Config{RootCAs: trusted, ServerName: "door", MinVersion: tls.VersionTLS13}
		if name != "" {
			pair, err := tls.LoadX509KeyPair(a.Sign(t, name))
			if err != nil {
				t.Fatal(err)
			}
			config.Certificates = []tls.Certificate{pair}
		}
		all[name] = config
	}
	return all
}

// The connection determines who may force-release, and the scope of a requestId.
func TestClientCertificates(t *testing.T) {
	t.Parallel()
	authority, stranger := testcert.New(t), testcert.New(t)
	clients := identified(t, authority, "", "one", "two")
	foreign := identified(t, stranger, "one")["one"]
	foreign.RootCAs = clients["one"].RootCAs
	strict := authority.Server(t, "door")
	lax := strict.Clone()
	lax.ClientAuth = tls.NoClientCert
	driver := memory.New(nil)
	defer driver.Close(context.WithoutCancel(t.Context()))
	own := func() *x509.Certificate { return strict.Certificates[0].Leaf }
	g, err := New(Options{Driver: driver, Key: testKey, Certificate: own})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close(context.WithoutCancel(t.Context()))
	serve := func(host string, config *tls.Config) net.Addr {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
		served := make(chan error, 1)
		go func() { served <- g.Serve(ctx, from{l, host}, config) }()
		t.Cleanup(func() { stop(); <-served })
		return l.Addr()
	}
	post := func(at net.Addr, config *tls.Config, call, body string) (int, string) {
		dial := func(context.Context, string, string) (net.Conn, error) { return net.Dial("tcp", at.String()) }
		transport := &http.Transport{DialContext: dial, TLSClientConfig: config, ForceAttemptHTTP2: true}
		defer transport.CloseIdleConnections()
		scheme := "https"
		if config == nil {
			scheme = "http"
		}
		client := &http.Client{Transport: transport}
		resp, err := client.Post(scheme+"://door"+atX+call, "application/json", strings.NewReader(body))
		if err != nil {
			return 0, err.Error()
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			return 0, err.Error()
		}
		return resp.StatusCode, string(text)
	}
	const near, far = "127.0.0.1", "192.0.2.1"
	nearCA, farCA, nearTLS, farTLS := serve(near, strict), serve(far, strict), serve(near, lax), serve(far, lax)

	const force = `{"reason":"r"}`
	for _, c := range []struct {
		what   string
		at     net.Addr
		client *tls.Config
		want   int
	}{
		{"a certificate of the authority", farCA, clients["one"], 404},
		{"no certificate where one is wanted", nearCA, clients[""], 0},
		{"a certificate of another authority", nearCA, foreign, 0},
		{"TLS without a certificate, from afar", farTLS, clients[""], 403},
		{"a certificate that nobody has verified", farTLS, clients["one"], 403},
		{"TLS on the same machine", nearTLS, clients[""], 404},
	} {
		if status, text := post(c.at, c.client, "/force-release", force); status != c.want {
			t.Errorf("%s: force-release answers %d %s, want %d", c.what, status, text, c.want)
		}
	}

	ask := longOf("a", `,"requestId":"req-1"`)
	status, first := post(farCA, clients["one"], "/acquire", ask)
	if status != 200 {
		t.Fatalf("acquire: %d %s", status, first)
	}
	if status, text := post(farCA, clients["two"], "/acquire", ask); status != 409 {
		t.Errorf("the same owner and requestId with another certificate: %d %s", status, text)
	}
	status, again := post(nearCA, clients["one"], "/acquire", ask)
	if status != 200 || tokenIn(t, again) != tokenIn(t, first) {
		t.Errorf("the same request on another connection: %d %s, want %s", status, again, first)
	}
}

func tokenIn(t *testing.T, text string) string {
	t.Helper()
	return (&door{t: t}).granted(reply{200, nil, text}).LockToken
}

// flood is an HTTP/2 connection that sends frames.
type flood struct {
	*http2.Framer
	header strings.Builder
	hpack  *hpack.Encoder
	next   uint32
}

func flooding(t *testing.T, l *live, client *tls.Config) *flood {
	t.Helper()
	config := client.Clone()
	config.NextProtos = []string{"h2"}
	c, err := tls.Dial("tcp", l.addr, config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	tell(c, http2.ClientPreface)
	f := &flood{Framer: http2.NewFramer(c, c), next: 1}
	f.hpack = hpack.NewEncoder(&f.header)
	if err := f.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	return f
}

// ask opens a stream that waits for the lock x.
func (f *flood) ask(owner string) (stream uint32, err error) {
	f.header.Reset()
	for _, h := range [][2]string{
		{":method", "POST"}, {":scheme", "https"}, {":authority", "door"}, {":path", acquireX},
		{"content-type", "application/json"},
	} {
		_ = f.hpack.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]}) // no error: the encoder writes to memory
	}
	stream, f.next = f.next, f.next+2
	block := []byte(f.header.String())
	err = f.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: block, EndHeaders: true})
	if err == nil {
		err = f.WriteData(stream, true, []byte(longOf(owner, `,"wait":true`)))
	}
	return stream, err
}

// The gateway bounds the concurrent requests of one HTTP/2 connection, and requests that the client cancels immediately
// have no cost.
func TestFloods(t *testing.T) {
	t.Parallel()
	authority := testcert.New(t)
	client := identified(t, authority, "flood")["flood"]
	config := authority.Server(t, "door")
	started := func(t *testing.T) *live {
		l := lively(t, nil)
		secure, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
		served := make(chan error, 1)
		go func() { served <- l.g.Serve(ctx, secure, config) }()
		t.Cleanup(func() { stop(); <-served })
		l.lock(l.near(acquireX, longOf("a", "")))
		l.addr, l.proxy = secure.Addr().String(), nil
		return l
	}
	waiters := func(t *testing.T, l *live) int {
		s, err := l.g.driver.(backend.Inspector).Look(t.Context(), "x")
		if err != nil {
			t.Fatal(err)
		}
		return s.Waiters
	}
	t.Run("streams", func(t *testing.T) {
		t.Parallel()
		l := started(t)
		f := flooding(t, l, client)
		refused := make(chan uint32, 10)
		most := make(chan uint32, 1)
		go func() {
			for {
				frame, err := f.ReadFrame()
				if err != nil {
					return
				}
				switch frame := frame.(type) {
				case *http2.SettingsFrame:
					if n, ok := frame.Value(http2.SettingMaxConcurrentStreams); ok {
						most <- n
					}
				case *http2.RSTStreamFrame:
					refused <- frame.StreamID
				}
			}
		}()
		if n := <-most; n != streamsMost {
			t.Errorf("the gateway permits %d streams, want %d", n, streamsMost)
		}
		var last uint32
		for i := range streamsMost + 1 {
			var err error
			if last, err = f.ask(fmt.Sprint("b", i)); err != nil {
				t.Fatal(err)
			}
		}
		if got := <-refused; got != last {
			t.Errorf("stream %d was refused, want %d", got, last)
		}
		l.await("as many wait as are permitted", func() bool { return waiters(t, l) == streamsMost })
	})
	t.Run("rapid reset", func(t *testing.T) {
		t.Parallel()
		l := started(t)
		f := flooding(t, l, client)
		go func() {
			for {
				if _, err := f.ReadFrame(); err != nil {
					return
				}
			}
		}()
		for i := range 20 * streamsMost {
			stream, err := f.ask(fmt.Sprint("b", i))
			if err == nil {
				err = f.WriteRSTStream(stream, http2.ErrCodeCancel)
			}
			if err != nil { // the gateway closed the connection
				t.Logf("the connection ended after %d streams: %v", i, err)
				break
			}
			if n := waiters(t, l); n > streamsMost {
				t.Fatalf("%d requests of one connection wait", n)
			}
		}
		l.await("nobody waits any more", func() bool { return waiters(t, l) == 0 })
		l.await("nothing but the lock of a is remembered", func() bool {
			l.g.mu.Lock()
			defer l.g.mu.Unlock()
			return l.g.waits.all == 0 && len(l.g.attempts) == 1
		})
	})
}
