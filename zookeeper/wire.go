// This file is the connection under the client library (go-zookeeper/zk): the driver's own net.Conn, which reads and
// rewrites the traffic. An acquire of a new name looks like this on it; the library sends and sees only the second
// request, as a plain create:
//
//	→ createContainer /fencelock/lock:orders          our own, if the node may be missing
//	→ create2         /fencelock/lock:orders/4f2a….   the library's create
//	→ getChildren2    /fencelock/lock:orders          our own
//	← done; the path and the zxid of the entry; the names of all entries
//
// The answers to the second and the third reach the library as one answer, see deliver.
//
// The library has no contexts, no create2 and no request with the zxid of a node in its answer; and it uses every
// connection for any later session. The driver rewrites instead of replacing it: the protocol is stable and small at
// this layer (lengths, numbers, zxids), while the library handles sessions, watches and reconnection well. This file
// does not keep sessions alive or decide about locks.
//
// The library calls Write from one goroutine and Read from another. Fields of wire are grouped by the goroutine that
// uses them; only births are shared, under mu.

package zookeeper

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/fencing"
)

// wire is a connection to one server. It reads the traffic, for facts that the client library does not return, has too
// late or gets wrong:
//
//   - the granted timeout and the resumed session, in the server's answer to the connect request;
//   - the zxid in each reply. The library writes it in one goroutine and reads it in another without synchronization,
//     so the wire hides it from the library, and puts the zxid into the requests that need it. The wire also sends the
//     zxid from before the session, which the library does not;
//   - the zxid that created a node, and the queue of the node. The library does not ask for them when it creates an
//     entry; the wire does, in the same write, which saves every acquire a request and a round trip.
type wire struct {
	net.Conn
	s       *session
	address string
	sent    backend.Instant // before the connection was opened
	zxid    int64           // the session's last zxid at that time
	seen    int64           // the driver's highest zxid at that time

	// Only the goroutine that reads uses these.
	buffer [16 << 10]byte

	// Bytes for the library, and the state of the current message. A message may arrive in any number of
	// pieces.
	read   []byte          // bytes that the library has not read yet
	head   [headBytes]byte // of the server's message
	have   int             // bytes of head
	rest   int             // bytes of the message that follow
	shaken bool
	ours   bool              // the message is not for the library, or not yet
	answer func(body []byte) // if not nil, is called with the body
	kept   []byte            // of that

	// Only the goroutine that writes uses these.
	greeted bool

	// The answers to creations of entries, by their numbers, until the queue has been read; nil before the answer.
	mu     sync.Mutex // protects births
	births map[int32][]byte
}

// headBytes is the size of the part that the wire reads of each message: length, protocol version, timeout and session
// id of the first one; length, number, zxid and error of all others.
const headBytes = 4 + 4 + 4 + 8

// maxHello bounds the answer to the connect request, which has some 40 bytes. A longer answer is not from a ZooKeeper:
// the first four bytes of an HTTP answer or of a TLS alert, read as a length, are far larger.
const maxHello = 1 << 10

var errNoZooKeeper = errors.New("the server is not ZooKeeper, or requires TLS")

// dial opens a connection for the client library. It fails once the session has ended: the library would make another
// session on it, and send the queued requests of the old session there.
//
// An existing session is shown only to a server on which it may continue, see examine. The instant of a later proof
// and the zxids of the greeting are read before the dial. A dial, with that examination and the TLS handshake, is
// bounded by a third of the TTL, or by 100 ms for very short TTLs, and the server's first answer by the same time: so
// there is time for another server before the session ends.
func (s *session) dial(network, address string, timeout time.Duration) (net.Conn, error) {
	if err := s.paceDial(); err != nil {
		return nil, err
	}
	timeout = min(timeout, max(s.asked/3, 100*time.Millisecond))
	ctx, cancel := context.WithTimeout(s.dialing, timeout)
	defer cancel()
	if s.exists() {
		if err := s.examine(ctx, address); err != nil {
			s.dialFailed(err)
			return nil, err
		}
	}
	// The values for the greeting and the proof are read before any byte is sent.
	w := &wire{s: s, address: address, sent: s.d.clock.Now(), zxid: s.zxid.Load(), births: map[int32][]byte{}}
	if !s.probe {
		w.seen = s.d.zxid.Load()
	}
	conn, err := s.d.connect(ctx, network, address)
	if err != nil {
		s.dialFailed(err)
		return nil, err
	}
	// The library would wait ten times longer for an unresponsive server, before it tries the next.
	_ = conn.SetReadDeadline(time.Now().Add(timeout))
	w.Conn = conn
	if !s.setWire(w) {
		_ = conn.Close()
		return nil, errSessionLost
	}
	return w, nil
}

// connect opens a connection to a server, with TLS if it is configured. A custom dialer gets ctx.
func (d *Driver) connect(ctx context.Context, network, address string) (net.Conn, error) {
	dial := d.o.Dial
	if dial == nil {
		dial = (&net.Dialer{}).DialContext
	}
	conn, err := dial(ctx, network, address)
	if err == nil && d.o.TLS != nil {
		if conn, err = secure(ctx, conn, address, d.o.TLS); err != nil {
			err = fmt.Errorf("TLS with %s: %w", address, err)
		}
	}
	return conn, err
}

// secure puts TLS on a connection, and closes it if the handshake fails. Without a server name in the settings it
// expects the dialled name.
func secure(ctx context.Context, conn net.Conn, address string, config *tls.Config) (net.Conn, error) {
	config, err := kit.DialTLS(config)
	if err != nil {
		_ = conn.Close() // the reason is err
		return nil, err
	}
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

// SetReadDeadline keeps the deadline of the dialer until the server has answered: the library sets its own before
// that, which is ten times longer.
func (w *wire) SetReadDeadline(t time.Time) error {
	if !w.shaken {
		return nil
	}
	return w.Conn.SetReadDeadline(t)
}

// Read returns the server's bytes. The library reads each message in two small pieces, the wire in large ones of up to
// 16 KB. That is a large part of the rise from 0.4 to between 0.6 and 0.75 of the raw rate of create and
// delete (docs/decisions, the ZooKeeper driver watches a hold late).
func (w *wire) Read(p []byte) (int, error) {
	for len(w.read) == 0 {
		n, err := w.Conn.Read(w.buffer[:])
		if refused := w.follow(w.buffer[:n]); refused != nil {
			return 0, refused
		}
		// The connection has ended.
		if n == 0 {
			if !w.shaken {
				w.s.turnedAway(w, err)
			}
			return 0, err
		} // else the error comes back
	}
	n := copy(p, w.read)
	w.read = w.read[n:]
	if len(w.read) == 0 {
		w.read = w.read[:0:0]
	}
	return n, nil
}

// follow finds the server's messages in p, removes the zxids, and passes the rest to the library. Messages may begin
// and end anywhere in p; the state of an unfinished one stays in head, have and rest. TestWire feeds a conversation in
// pieces of several sizes, down to single bytes.
func (w *wire) follow(p []byte) error {
	for len(p) > 0 {
		if w.rest > 0 {
			// The body of a message: to answer, if it is set, and to the library unless the message is ours.
			n := min(w.rest, len(p))
			if w.answer != nil {
				w.kept = append(w.kept, p[:n]...)
			}
			if !w.ours {
				w.read = append(w.read, p[:n]...)
			}
			p, w.rest = p[n:], w.rest-n
		} else {
			// The head of the next message, part of which may have come before.
			n := copy(w.head[w.have:], p)
			p, w.have = p[n:], w.have+n
			if w.have < headBytes {
				return nil
			}
			w.have = 0
			w.rest = max(0, 4+int(binary.BigEndian.Uint32(w.head[:]))-headBytes)
			if err := w.message(); err != nil {
				return err
			}
			if !w.ours {
				w.read = append(w.read, w.head[:]...)
			}
		}
		if w.rest == 0 && w.answer != nil {
			w.answer(w.kept)
			w.answer, w.kept = nil, w.kept[:0]
		}
	}
	return nil
}

// message handles the head of a message, before any of it is passed on.
//
// The first message is the server's answer to the connect request, with the timeout and the session that it granted;
// session.shaken judges it. In all others the zxid is noted and then cleared: the library would store it without
// synchronization in one goroutine and read it in another. The library does not get the answers to the wire's own
// requests, which have numbers that the library never uses.
func (w *wire) message() error {
	// The first message has its own form.
	if !w.shaken {
		if size := binary.BigEndian.Uint32(w.head[:]); size > maxHello {
			w.s.turnedAway(w, errNoZooKeeper)
			return errNoZooKeeper
		}
		w.answer = func([]byte) { w.shaken = true } // when all of it has come
		timeout := time.Duration(int32(binary.BigEndian.Uint32(w.head[8:]))) * time.Millisecond
		return w.s.shaken(w, timeout, int64(binary.BigEndian.Uint64(w.head[12:])))
	}
	number := int32(binary.BigEndian.Uint32(w.head[4:]))
	zxid := int64(binary.BigEndian.Uint64(w.head[8:]))
	refused := binary.BigEndian.Uint32(w.head[16:]) != 0
	clear(w.head[8:16])
	w.ours = number < -ownNumbers
	// Only replies have the zxid of a change; events and answers to pings do not.
	if (number >= 0 || w.ours) && zxid > 0 {
		w.s.zxid.Store(zxid)
		w.s.d.saw(zxid)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	// The creation's answer waits for the queue's, which the server sends right behind it. A creation that was refused
	// has no queue to wait for; the answer to that request is dropped.
	number &= math.MaxInt32
	created, asked := w.births[number]
	switch {
	case !asked:
	case !w.ours && refused:
		delete(w.births, number)
	case !w.ours:
		w.ours = true
		w.answer = func(body []byte) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.births[number] = bytes.Clone(body)
		}
	default:
		delete(w.births, number)
		w.answer = func(queue []byte) { w.deliver(number, created, queue) }
	}
	return nil
}

// deliver gives the library the answer to a creation, with the known facts of the node in place of its path, for
// readBirth: the path and, behind a zero byte, which no path has, the zxid that created the node and the answer to the
// request for the queue. The answer to the creation is the path, and the node's state, which begins with that zxid.
func (w *wire) deliver(number int32, created, queue []byte) {
	if path, stat, ok := cutText(created); ok && len(stat) >= 8 {
		created = appendText(nil, slices.Concat(path, []byte{0}, stat[:8], queue))
	}
	w.read = binary.BigEndian.AppendUint32(w.read, uint32(4+8+4+len(created)))
	w.read = binary.BigEndian.AppendUint32(w.read, uint32(number))
	w.read = append(w.read, make([]byte, 8+4)...) // no zxid, no error
	w.read = append(w.read, created...)
}

// birth holds the known facts of a created node.
type birth struct {
	path    string
	zxid    int64         // that created it; 0: not known
	version int32         // see hold.version
	nonce   fencing.Nonce // of its creation, if zxid is known
	queue   []string      // the nodes of the name, this one among them; nil if they could not be read
}

// readBirth reads the library's path of a created node, which deliver may have written.
func readBirth(text string) birth {
	path, rest, more := strings.Cut(text, "\x00")
	if !more {
		return birth{path: path}
	}
	b := birth{path: strings.Clone(path), zxid: int64(binary.BigEndian.Uint64([]byte(rest[:8])))}
	b.queue = readQueue(rest[8:])
	return b
}

// readQueue parses the nodes of the name from an answer: their number, and the name of each. All names are parts of
// the answer, so that a queue of thousands is one allocation. It is nil for an unreadable answer, such as an error,
// and the caller asks for the queue.
func readQueue(answer string) []string {
	if len(answer) < 4 {
		return nil
	}
	queue := []string{}
	n, rest := binary.BigEndian.Uint32([]byte(answer[:4])), answer[4:]
	for range n {
		node, behind, ok := cutText(rest)
		if !ok {
			return nil
		}
		queue, rest = append(queue, node), behind
	}
	return queue
}

// cutText reads a text with its length before it, the form of the protocol.
func cutText[T string | []byte](p T) (text, rest T, ok bool) {
	if len(p) < 4 {
		return text, rest, false
	}
	size := int(int32(binary.BigEndian.Uint32([]byte(p[:4]))))
	if p = p[4:]; size < 0 || size > len(p) {
		return text, rest, false
	}
	return p[:size], p[size:], true
}

// The protocol's numbers of requests.
const (
	opCreate          = 1
	opPing            = 11
	opGetChildren2    = 12
	opCreate2         = 15 // as create; the answer has the node's state
	opCreateContainer = 19
	opSetWatches      = 101
)

// Write sends the library's bytes, one request for each call. It counts the requests in session.written, so that an
// unsent request can be detected.
//
// The library answers a request with the error of its write, and again, with ErrConnectionClosed, like all other
// requests of the connection. It blocks until there is room for the second answer, which the authentication on a new
// connection never has, and stops dialling. So Write hides the error of a failed write, and the request returns only
// ErrConnectionClosed, which callers have to handle anyway.
func (w *wire) Write(p []byte) (int, error) {
	op, size := int32(0), len(p)
	switch {
	case !w.greeted:
		w.greeted = true
		p = putZxid(p, 8, w.seen) // behind length and version
		if w.s.probe && w.s.asked < longestAsked {
			binary.BigEndian.PutUint32(p[16:], 1) // ms
		}
	case len(p) >= 12:
		// The kind of the request, behind its length and number.
		switch op = int32(binary.BigEndian.Uint32(p[8:])); {
		case op == opSetWatches:
			p = splitWatches(putZxid(p, 12, w.zxid)) // behind length, number and kind
		case op == opCreate && binary.BigEndian.Uint32(p[len(p)-4:]) == zk.FlagEphemeral|zk.FlagSequence:
			p = w.askBirth(p)
		}
	}
	// The library passed size bytes, and Write must not return more.
	n, err := w.Conn.Write(p)
	n = min(n, size)
	if n > 0 && op != opPing {
		w.s.written.Add(1)
	}
	if err != nil {
		w.s.d.o.Logger.Debug("fencelock/zookeeper: write", "error", err)
		if op == 0 || op == opPing { // no call waits for an answer
			return n, zk.ErrConnectionClosed
		}
		_ = w.Conn.Close()
		return size, nil
	}
	return n, nil
}

// ownNumbers bounds the numbers of requests with answers for the wire only: they are below its negative. The library's
// own are positive, and the protocol's, such as those of pings, are just below zero.
const ownNumbers = 1 << 30

// askBirth rewrites an entry's creation so that its answer has the node's state, and asks for the queue behind it in
// the same write. If the name's node is missing, its creation goes first. The server executes one session's requests
// in their order, so the queue that it returns has the new entry in it.
func (w *wire) askBirth(p []byte) []byte {
	number := int32(binary.BigEndian.Uint32(p[4:]))
	path, _, ok := cutText(p[12:])
	w.mu.Lock()
	defer w.mu.Unlock()
	// A request that cannot be parsed is sent unchanged, and the caller asks for the queue later.
	if !ok || number >= ownNumbers-1 {
		return p
	}
	// The number of our own request is the creation's with the highest bit set: it is negative, so that the library
	// never uses it, and the answer leads back to the creation.
	w.births[number] = nil
	dir := parent(string(path))
	var all []byte
	if w.s.takeMissing(dir) {
		all = w.s.creationOf(dir)
	}
	at := len(all)
	// The same request with another kind: create and create2 have one form.
	all = append(all, p...)
	binary.BigEndian.PutUint32(all[at+8:], opCreate2)
	all = binary.BigEndian.AppendUint32(all, uint32(4+4+4+len(dir)+1))
	all = binary.BigEndian.AppendUint32(all, uint32(number)|1<<31)
	all = binary.BigEndian.AppendUint32(all, opGetChildren2)
	return append(appendText(all, dir), 0) // without a watch
}

// maxWatches bounds a request for watches, in bytes. Servers close the connection for a request above jute.maxbuffer,
// which is 1 MB unless it is set; the library's requests have up to 128 KB, and it would repeat them over each
// connection.
const maxWatches = 4 << 10

// splitWatches divides the library's request for watches into several that small servers take. The last one has the
// library's number; the library does not get the answers to the others. A request that cannot be parsed is returned
// unchanged.
func splitWatches(p []byte) []byte {
	const head = 4 + 4 + 4 + 8 // length, number, kind and zxid
	if len(p) <= maxWatches {
		return p
	}
	var all []byte
	begin, kind, watches := 0, 0, 0 // of the request that is being written: its place in all, and the present list
	var counts [3]int               // the places of the lists' lengths in all: watches of data, existence and children
	open := func(at int) {
		begin, kind = len(all), at
		all = append(all, p[:head]...)
		binary.BigEndian.PutUint32(all[begin+4:], anonymous&math.MaxUint32)
		for list := range counts[:at+1] {
			counts[list] = len(all)
			all = binary.BigEndian.AppendUint32(all, 0)
		}
	}
	end := func() {
		all = append(all, make([]byte, 4*(len(counts)-1-kind))...) // the other lists are empty
		binary.BigEndian.PutUint32(all[begin:], uint32(len(all)-begin-4))
	}
	open(0)
	rest := p[head:]
	for list := range counts {
		if len(rest) < 4 {
			return p
		}
		n := binary.BigEndian.Uint32(rest)
		rest = rest[4:]
		if list > kind {
			counts[list], kind, watches = len(all), list, 0
			all = binary.BigEndian.AppendUint32(all, 0)
		}
		for range n {
			path, behind, ok := cutText(rest)
			if !ok {
				return p
			}
			if rest = behind; len(all)-begin+4+len(path) > maxWatches {
				end()
				open(list)
				watches = 0
			}
			all, watches = appendText(all, path), watches+1
			binary.BigEndian.PutUint32(all[counts[list]:], uint32(watches))
		}
	}
	end()
	copy(all[begin+4:], p[4:8])
	return all
}

// anonymous is the number of the wire's requests whose answers are ignored; no entry's creation has it.
const anonymous = -ownNumbers - 1

// creationOf is the request that makes the node of a name: a container without data. Its answer is ignored, since the
// entry's creation fails without the node.
func (s *session) creationOf(dir string) []byte {
	p := binary.BigEndian.AppendUint32(nil, 0)
	p = binary.BigEndian.AppendUint32(p, anonymous&math.MaxUint32)
	p = binary.BigEndian.AppendUint32(p, opCreateContainer)
	p = binary.BigEndian.AppendUint32(appendText(p, dir), 0)
	p = binary.BigEndian.AppendUint32(p, uint32(len(s.d.o.ACL)))
	for _, acl := range s.d.o.ACL {
		p = appendText(appendText(binary.BigEndian.AppendUint32(p, uint32(acl.Perms)), acl.Scheme), acl.ID)
	}
	p = binary.BigEndian.AppendUint32(p, zk.FlagContainer)
	binary.BigEndian.PutUint32(p, uint32(len(p)-4))
	return p
}

// appendText writes a text as cutText reads it.
func appendText[T string | []byte](p []byte, text T) []byte {
	return append(binary.BigEndian.AppendUint32(p, uint32(len(text))), text...)
}

// putZxid returns the message with a zxid in it: in a connect request the highest zxid that the driver had seen, so
// that a server with a lower one refuses; in a request for watches the last zxid of the session when the connection
// was opened. The server must report later changes, even if replies over this connection have come since.
func putZxid(p []byte, at int, zxid int64) []byte {
	p = bytes.Clone(p)
	binary.BigEndian.PutUint64(p[at:], uint64(zxid))
	return p
}

// makeFirst has the node of a name made before the next entry in it.
func (s *session) makeFirst(dir string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.missing[dir] = true
}

// takeMissing reports whether the node of a name is to be made, and returns true to the first caller only: one request
// is enough for all entries that are sent together.
func (s *session) takeMissing(dir string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	missing := s.missing[dir]
	delete(s.missing, dir)
	return missing
}

// servers returns the addresses in turn, without the pause of a second that the library's own provider makes before it
// retries the only address. paceDial makes shorter ones. Only the library's connecting goroutine calls it.
type servers struct {
	s     *session
	addrs []string
	next  int
}

func (p *servers) Init(addrs []string) error { p.addrs = addrs; return nil }
func (p *servers) Len() int                  { return len(p.addrs) }
func (p *servers) Connected()                {}

// Next returns the next address. Once the session has ended, the second result ends the library's loop.
func (p *servers) Next() (string, bool) {
	addr := p.addrs[p.next%len(p.addrs)]
	p.next++
	return addr, p.s.Ended()
}
