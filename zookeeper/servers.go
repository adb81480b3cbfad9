package zookeeper

import (
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

// dial opens a connection to a server, with TLS if it is configured. A custom dialer gets ctx.
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

// maxHello bounds the answer to the connect request, which has some 40 bytes. A longer answer is not from a ZooKeeper:
// the first four bytes of an HTTP answer or of a TLS alert, read as a length, are far larger.
const maxHello = 1 << 10

var errNoZooKeeper = errors.New("the server is not ZooKeeper, or requires TLS")

// hello sends a connect request, of a client that has seen the changes up to a zxid: a server that has seen less closes
// the connection.
func hello(
	conn net.Conn, in io.Reader, seen int64, ask time.Duration, id int64, password []byte,
) (g greeting, err error) {
	if password == nil {
		password = make([]byte, 16)
	}
	p := appendLong(appendInt(nil, 0), seen)
	p = appendText(appendLong(appendInt(p, int32(ask.Milliseconds())), id), password)
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

// question starts a session on one server, and on one connection, that claims no zxid and asks for a timeout. The
// caller ends it.
func (e *service) question(ctx context.Context, address string, ask time.Duration) *session {
	s := e.newSession(spareTTL, ask, address)
	context.AfterFunc(ctx, s.end)
	go s.run()
	return s
}

// examine refuses a server on which a session must not be: one with a tick longer than Options.Tick, or, for a session
// that continues, one that would end it before its TTL is over. A server applies its own limits to every session that
// connects to it, and the leader uses the result from then on. So the server is asked before it sees the session: the
// answer to the session's own request may be lost, and its holds would be valid for longer than it lives.
//
// The shortest session that a server grants has two ticks, unless its minSessionTimeout is set otherwise. The spare
// session is such a session: where it is connected, the tick is known.
func (e *service) examine(ctx context.Context, address string, ttl time.Duration) error {
	var asks []time.Duration
	if !e.spareAt(address) {
		asks = append(asks, time.Millisecond)
	}
	if ttl > 0 {
		asks = append(asks, ttl)
	}
	errs := make([]error, len(asks))
	var all sync.WaitGroup
	for i, ask := range asks {
		all.Go(func() {
			s := e.question(ctx, address, ask)
			defer s.end()
			switch errs[i] = s.opened(ctx); {
			case errs[i] != nil:
			case ask < ttl || ttl == 0:
				errs[i] = e.checkTick(s.ttl)
			case s.ttl < ttl:
				errs[i] = tooLong(ttl, s.ttl)
			}
		})
	}
	all.Wait()
	return cmp.Or(errs...)
}

// spareAt reports whether the spare session is connected to a server.
func (e *service) spareAt(address string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.spare == nil {
		return false
	}
	l, _ := e.spare.current()
	return l != nil && l.address == address
}

// checkTick refuses the servers' tick, of which the shortest session has two, if it is longer than Options.Tick: a hold
// could be valid for longer than its session.
func (e *service) checkTick(shortest time.Duration) error {
	tick := shortest / 2
	if tick <= e.o.Tick {
		return nil
	}
	return &backend.ConfigError{
		Setting: "Options.Tick (tick in a URL)", Value: e.o.Tick.String(), Want: tick.String() + " or more",
		Why: "the servers grant no session of less than " + shortest.String() + ", which is two of their ticks " +
			"unless minSessionTimeout is set; with a shorter one a hold could be believed for longer than its " +
			"session lasts",
	}
}

// tooLong is the error of a TTL for which the servers grant no session.
func tooLong(ttl, longest time.Duration) error {
	return &backend.InvalidError{
		Kind: backend.ErrInvalidTTL, What: "TTL", Value: ttl.String(),
		Why: fmt.Sprintf("the servers grant no session of more than %v (maxSessionTimeout, or 20 times tickTime)",
			longest),
	}
}
