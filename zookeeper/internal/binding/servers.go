package binding

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// configNode lists the members of the ensemble; it is empty for a standalone server.
const configNode = "/zookeeper/config"

// recallTimeout is the maximum time of a question about the history.
const recallTimeout = 3 * time.Second

// voters counts the participants in lines such as server.1=host:2888:3888:participant;0.0.0.0:2181. Observers take no
// part in agreement and do not count.
func voters(config string) (n int) {
	for line := range strings.Lines(config) {
		member, _, _ := strings.Cut(line, ";")
		if strings.HasPrefix(member, "server.") && !strings.HasSuffix(strings.TrimSpace(member), ":observer") {
			n++
		}
	}
	return n
}

// dial opens a connection to a server, with TLS if it is on. A dialer of the caller's gets ctx.
func (e *service) dial(ctx context.Context, address string) (net.Conn, error) {
	dial := e.o.Dial
	if dial == nil {
		dial = (&net.Dialer{}).DialContext
	}
	conn, err := dial(ctx, "tcp", address)
	if err != nil || e.o.TLS == nil {
		return conn, err
	}
	config, err := kit.DialTLS(e.o.TLS)
	if err == nil {
		if config.ServerName == "" {
			config = config.Clone()
			config.ServerName, _, _ = net.SplitHostPort(address)
		}
		secured := tls.Client(conn, config)
		if err = secured.HandshakeContext(ctx); err == nil {
			return secured, nil
		}
	}
	_ = conn.Close() // the reason is err
	return nil, fmt.Errorf("TLS with %s: %w", address, err)
}

// greeting is a server's answer to a connect request.
type greeting struct {
	timeout  time.Duration
	id       int64
	password []byte
}

// maxHello bounds the answer to the connect request, which has some 40 bytes. A longer one is not from a ZooKeeper: the
// first four bytes of an HTTP answer or of a TLS alert, read as a length, are far above.
const maxHello = 1 << 10

// hello sends a connect request, of a client that has seen the changes up to a zxid: a server that has seen less closes
// the connection.
func hello(conn net.Conn, in io.Reader, seen int64, ttl time.Duration, id int64, password []byte) (g greeting, err error) {
	if password == nil {
		password = make([]byte, 16)
	}
	p := appendLong(appendInt(nil, 0), seen)
	p = appendText(appendLong(appendInt(p, int32(ttl.Milliseconds())), id), password)
	if _, err := conn.Write(appendText(nil, p)); err != nil {
		return g, err
	}
	if p, err = frame(in, maxHello); err != nil {
		return g, err
	}
	r := reader{p: p}
	r.int()
	g.timeout, g.id = time.Duration(r.int())*time.Millisecond, r.long()
	g.password = append([]byte(nil), r.bytes()...)
	return g, r.err
}

// probe is a session on a connection that serves nothing else.
type probe struct {
	conn net.Conn
	in   *bufio.Reader
	stop func() bool
	greeting
	last int32
}

// probe makes a session that claims no zxid. A server that has forgotten would refuse one that claims more.
func (e *service) probe(ctx context.Context, address string, ttl time.Duration) (*probe, error) {
	conn, err := e.dial(ctx, address)
	if err != nil {
		return nil, err
	}
	p := &probe{conn: conn, in: bufio.NewReader(conn), stop: context.AfterFunc(ctx, func() { conn.Close() })}
	if p.greeting, err = hello(conn, p.in, 0, ttl, 0, nil); err != nil {
		p.close()
		if ctx.Err() != nil {
			err = kit.Ended(ctx)
		}
		if !errors.Is(err, errNoZooKeeper) {
			err = fmt.Errorf("%s: %w: %w", address, errHello, err)
		}
		return nil, err
	}
	if e.o.User != "" {
		_, err = p.conn.Write(message(numberAuth,
			request{opAuth, appendText(appendText(appendInt(nil, 0), "digest"), e.o.User+":"+e.o.Password)}))
	}
	return p, err
}

// message is one request with its number.
func message(number int32, r request) []byte {
	return appendText(nil, append(appendInt(appendInt(nil, number), r.op), r.body...))
}

// ask sends requests, and waits for the replies.
func (p *probe) ask(reqs ...request) ([]reply, error) {
	for _, r := range reqs {
		p.last++
		if _, err := p.conn.Write(message(p.last, r)); err != nil {
			return nil, err
		}
	}
	var replies []reply
	for len(replies) < len(reqs) {
		all, err := frame(p.in, maxFrame)
		if err != nil {
			return nil, err
		}
		r := reader{p: all}
		number, zxid, failed := r.int(), r.long(), code(r.int())
		if number < 0 {
			continue
		}
		a := reply{zxid: zxid, body: r.p}
		if failed != 0 {
			a.err = failed
		}
		replies = append(replies, a)
	}
	return replies, nil
}

// close ends the session. Without the request it would end with its timeout.
func (p *probe) close() {
	p.stop()
	_ = p.conn.SetDeadline(time.Now().Add(endTimeout / 10))
	_, _ = p.conn.Write(message(1<<30, request{op: opClose}))
	_ = p.conn.Close()
}

// examine refuses a server at which a session may not be: one with a tick longer than Options.Tick, or, for a session
// that goes on, one that would let it end before its TTL is over. A server applies its own limits to every session that
// comes to it, and the leader counts with the result from then on. So the server is asked before it sees the session:
// the answer to the session's own request may be lost, and its holders would believe for longer than it lives.
//
// The shortest session that a server grants has two ticks, unless its minSessionTimeout is set otherwise.
func (e *service) examine(ctx context.Context, address string, ttl time.Duration) error {
	asks := []time.Duration{time.Millisecond}
	if ttl > 0 {
		asks = append(asks, ttl)
	}
	errs := make([]error, len(asks))
	var all sync.WaitGroup
	for i, ask := range asks {
		all.Go(func() {
			p, err := e.probe(ctx, address, ask)
			if errs[i] = err; err != nil {
				return
			}
			defer p.close()
			switch tick := p.timeout / 2; {
			case i > 0 && p.timeout < ask:
				errs[i] = tooLong(ask, p.timeout)
			case i == 0 && tick > e.o.Tick:
				errs[i] = &backend.ConfigError{
					Setting: "Options.Tick (tick in a URL)", Value: e.o.Tick.String(), Want: tick.String() + " or more",
					Why: "the servers grant no session of less than " + p.timeout.String() + ", which is two of their ticks " +
						"unless minSessionTimeout is set; with a shorter one a hold could be believed for longer than its " +
						"session lasts",
				}
			}
		})
	}
	all.Wait()
	return cmp.Or(errs...)
}

// tooLong is the error of a TTL for which the servers grant no session.
func tooLong(ttl, longest time.Duration) error {
	return &backend.InvalidError{
		Kind: backend.ErrInvalidTTL, What: "TTL", Value: ttl.String(),
		Why: fmt.Sprintf("the servers grant no session of more than %v (maxSessionTimeout, or 20 times tickTime)",
			longest),
	}
}
