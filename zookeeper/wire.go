package zookeeper

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
)

// wire is a connection to one server. It reads what passes, for what the client library keeps to itself, learns too
// late or gets wrong:
//
//   - the timeout that was granted and the session that goes on, in the server's answer to the connect request;
//   - the zxid in each reply. The library writes it in one goroutine and reads it in another without care, so that it
//     never gets one; the wire puts the zxid into the requests that need it. It also knows one from before the session,
//     which the library does not send;
//   - the zxid that created a node. The library does not ask for it when it creates an entry; the wire does, which
//     saves every acquire one request.
type wire struct {
	net.Conn
	s       *session
	address string
	sent    backend.Instant // before the connection was opened
	zxid    int64           // the last one that the session had seen then
	seen    int64           // the highest one that the driver had seen then

	// For the goroutine that reads.
	buffer [16 << 10]byte
	read   []byte          // of buffer: what the library has not read yet
	head   [headBytes]byte // of the server's message
	have   int             // bytes of head
	rest   int             // bytes of the message that follow
	shaken bool
	keep   bool   // the message answers a creation
	kept   []byte // what of it follows the head

	// For the goroutine that writes.
	greeted bool

	mu      sync.Mutex     // protects the following field
	creates map[int32]bool // numbers of creations that are not answered
}

// headBytes is what counts of a message: length, protocol version, timeout and session id of the first one, length,
// number, zxid and error of all others.
const headBytes = 4 + 4 + 4 + 8

// maxHello bounds the answer to the connect request. More is said only by what is no ZooKeeper.
const maxHello = 1 << 10

var errEnded = errors.New("the ZooKeeper session has ended")

// dial opens a connection for the client library. Once the session has ended there is none any more: the library would
// make another session on it, and requests of the old one that wait in its queue would be sent there.
func (s *session) dial(network, address string, timeout time.Duration) (net.Conn, error) {
	if err := s.paceDial(); err != nil {
		return nil, err
	}
	timeout = min(timeout, max(s.asked/3, 100*time.Millisecond))
	ctx, cancel := context.WithTimeout(s.dialing, timeout)
	defer cancel()
	w := &wire{s: s, address: address, sent: s.d.clock.Now(), zxid: s.zxid.Load(), creates: map[int32]bool{}}
	if !s.probe {
		w.seen = s.d.zxid.Load()
	}
	dial := s.d.o.Dial
	if dial == nil {
		dial = (&net.Dialer{}).DialContext
	}
	conn, err := dial(ctx, network, address)
	if err == nil && s.d.o.TLS != nil {
		if conn, err = secure(ctx, conn, address, s.d.o.TLS); err != nil {
			err = fmt.Errorf("TLS with %s: %w", address, err)
		}
	}
	if err != nil {
		s.dialFailed(err)
		return nil, err
	}
	// The library would wait ten times longer, and a server that says nothing would keep it from the next one.
	_ = conn.SetReadDeadline(time.Now().Add(timeout))
	w.Conn = conn
	if !s.setWire(w) {
		_ = conn.Close()
		return nil, errEnded
	}
	return w, nil
}

func secure(ctx context.Context, conn net.Conn, address string, config *tls.Config) (net.Conn, error) {
	if config.ServerName == "" {
		config = config.Clone()
		config.ServerName, _, _ = net.SplitHostPort(address)
	}
	secured := tls.Client(conn, config)
	if err := secured.HandshakeContext(ctx); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return secured, nil
}

// SetReadDeadline keeps the deadline of the dialer until the server has answered.
func (w *wire) SetReadDeadline(t time.Time) error {
	if !w.shaken {
		return nil
	}
	return w.Conn.SetReadDeadline(t)
}

// Read returns what the server sent. The library reads each message in two small pieces, the wire in large ones.
func (w *wire) Read(p []byte) (int, error) {
	if len(w.read) == 0 {
		n, err := w.Conn.Read(w.buffer[:])
		if refused := w.follow(w.buffer[:n]); refused != nil {
			return 0, refused
		}
		if n == 0 {
			if !w.shaken {
				w.s.turnedAway(w, err)
			}
			return 0, err
		}
		w.read = w.buffer[:n] // an error comes again
	}
	n := copy(p, w.read)
	w.read = w.read[n:]
	return n, nil
}

// follow finds the server's messages in what was read, and takes the zxids out.
func (w *wire) follow(p []byte) error {
	for len(p) > 0 {
		if w.rest > 0 {
			n := min(w.rest, len(p))
			if w.keep {
				w.kept = append(w.kept, p[:n]...)
			}
			if w.rest -= n; w.rest == 0 {
				w.created()
			}
			p = p[n:]
			continue
		}
		n := copy(w.head[w.have:], p)
		if w.shaken {
			clear(p[min(max(8-w.have, 0), n):min(max(16-w.have, 0), n)])
		}
		w.have += n
		p = p[n:]
		if w.have < headBytes {
			continue
		}
		w.have = 0
		w.rest = max(0, 4+int(binary.BigEndian.Uint32(w.head[:]))-headBytes)
		if err := w.message(); err != nil {
			return err
		}
	}
	return nil
}

// message looks at the head of a message.
func (w *wire) message() error {
	if !w.shaken {
		if size := binary.BigEndian.Uint32(w.head[:]); size > maxHello {
			err := errors.New("what listens there is no ZooKeeper, or wants TLS")
			w.s.turnedAway(w, err)
			return err
		}
		w.shaken = true
		timeout := time.Duration(int32(binary.BigEndian.Uint32(w.head[8:]))) * time.Millisecond
		return w.s.shaken(w, timeout, int64(binary.BigEndian.Uint64(w.head[12:])))
	}
	number := int32(binary.BigEndian.Uint32(w.head[4:]))
	zxid := int64(binary.BigEndian.Uint64(w.head[8:]))
	if number >= 0 && zxid > 0 { // a reply, and no event or answer to a ping
		w.s.zxid.Store(zxid)
		w.s.d.saw(zxid)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.keep = w.creates[number] && binary.BigEndian.Uint32(w.head[16:]) == 0 // no error
	delete(w.creates, number)
	return nil
}

// created notes which zxid created a node, at the end of the answer to its creation: the path, and its state, which
// begins with that zxid.
func (w *wire) created() {
	if !w.keep {
		return
	}
	body := w.kept
	w.keep, w.kept = false, w.kept[:0]
	if len(body) < 4 {
		return
	}
	if size := int(binary.BigEndian.Uint32(body)); len(body) >= 4+size+8 {
		w.s.noteBirth(string(body[4:4+size]), int64(binary.BigEndian.Uint64(body[4+size:])))
	}
}

// The protocol's numbers of requests.
const (
	opCreate          = 1
	opPing            = 11
	opCreate2         = 15 // as create; the answer has the node's state
	opCreateContainer = 19
	opSetWatches      = 101
)

// Write sends what the library sends, one request for each call. It counts the requests, so that one which never left
// is known to be that, and looks for the creation of a name's node: see announceDir.
//
// The library answers a request with the error of its write, whatever that is, and all others of the connection with
// ErrConnectionClosed. Here they become the same.
func (w *wire) Write(p []byte) (int, error) {
	op := int32(0)
	switch {
	case !w.greeted:
		w.greeted = true
		p = putZxid(p, 8, w.seen) // behind length and version
		if w.s.probe {
			binary.BigEndian.PutUint32(p[16:], 1) // ms
		}
	case len(p) >= 12:
		switch op = int32(binary.BigEndian.Uint32(p[8:])); {
		case op == opSetWatches:
			p = putZxid(p, 12, w.zxid) // behind length, number and kind
		case op == opCreate && binary.BigEndian.Uint32(p[len(p)-4:]) == zk.FlagEphemeral|zk.FlagSequence:
			p = w.askBirth(p)
		}
	}
	n, err := w.Conn.Write(p)
	if n > 0 && op != opPing {
		w.s.written.Add(1)
	}
	const head = 4 + 4 + 4 + 4 // length, number, kind, length of the path
	if op == opCreateContainer && len(p) > head {
		if size := int(binary.BigEndian.Uint32(p[12:])); size <= len(p)-head {
			w.s.dirSent(string(p[head : head+size]))
		}
	}
	if err != nil {
		w.s.d.o.Logger.Debug("fencelock/zookeeper: write", "error", err)
		return n, zk.ErrConnectionClosed
	}
	return n, nil
}

// askBirth makes an entry's creation one that is answered with the node's state.
func (w *wire) askBirth(p []byte) []byte {
	p = bytes.Clone(p)
	binary.BigEndian.PutUint32(p[8:], opCreate2)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.creates[int32(binary.BigEndian.Uint32(p[4:]))] = true
	return p
}

// putZxid returns the message with a zxid in it: in a connect request the highest that the driver had seen, so that a
// server which has seen less refuses; in a request for watches the last that the session had seen when the connection
// was opened. What has changed after that is what the server must tell, also if replies over this connection have come
// since.
func putZxid(p []byte, at int, zxid int64) []byte {
	p = bytes.Clone(p)
	binary.BigEndian.PutUint64(p[at:], uint64(zxid))
	return p
}

// noteBirth keeps the zxid that created a node for whoever asked for the creation.
func (s *session) noteBirth(path string, zxid int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.births[path] = zxid
}

// takeBirth returns the zxid that created a node, or 0 if it is not known.
func (s *session) takeBirth(path string) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	zxid := s.births[path]
	delete(s.births, path)
	return zxid
}

// expectDir returns a channel that is closed when the creation of dir has been sent.
func (s *session) expectDir(dir string) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	sent := s.dirs[dir]
	if sent == nil {
		sent = make(chan struct{})
		s.dirs[dir] = sent
	}
	return sent
}

func (s *session) dirSent(dir string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sent := s.dirs[dir]; sent != nil {
		close(sent)
		delete(s.dirs, dir)
	}
}

// servers hands out the addresses in turn, without the pause of a second that the library's own provider makes before
// it tries the only address again. paceDial makes shorter ones.
type servers struct {
	s     *session
	addrs []string
	next  int
}

func (p *servers) Init(addrs []string) error { p.addrs = addrs; return nil }
func (p *servers) Len() int                  { return len(p.addrs) }
func (p *servers) Connected()                {}

// Next lets the library leave its loop when the session has ended.
func (p *servers) Next() (string, bool) {
	addr := p.addrs[p.next%len(p.addrs)]
	p.next++
	return addr, p.s.over()
}
