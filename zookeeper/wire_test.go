package zookeeper

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
)

// pipe is a connection whose server says what it was given, and remembers what it is sent.
type pipe struct {
	net.Conn
	io.Reader
	sent   bytes.Buffer
	broken bool
}

func (p *pipe) Read(b []byte) (int, error) { return p.Reader.Read(b) }

func (p *pipe) Write(b []byte) (int, error) {
	if p.broken {
		return 0, net.ErrClosed
	}
	return p.sent.Write(b)
}

// message is one of the server, or of the library, with its length in front.
func message(fields ...any) []byte {
	var body bytes.Buffer
	for _, f := range fields {
		_ = binary.Write(&body, binary.BigEndian, f)
	}
	return append(binary.BigEndian.AppendUint32(nil, uint32(body.Len())), body.Bytes()...)
}

// TestWire lets a conversation pass in pieces of several sizes.
func TestWire(t *testing.T) {
	t.Parallel()
	const path = "/fencelock/lock:a/0123456789abcdef.0000000007"
	hello := message(int32(0), int32(4000), int64(77), int32(16), [16]byte{}, false)
	stat := make([]byte, 68)
	binary.BigEndian.PutUint64(stat, 0x500000003) // czxid
	created := message(int32(1), int64(0x500000004), int32(0), int32(len(path)), []byte(path), stat)
	const own = math.MinInt32 // marks numbers of the wire's requests
	listed := message(int32(2), int32(1), []byte("a"), int32(2), []byte("bc"), stat)[4:]
	queue := message(int32(own+1), int64(0x500000005), int32(0), listed)
	told := path + "\x00" + string(stat[:8]) + string(listed) // in place of the path
	born := message(int32(1), int64(0x500000004), int32(0), int32(len(told)), []byte(told))
	event := message(int32(-1), int64(-1), int32(0), int32(2), int32(3), int32(1), []byte("x"))
	pong := message(int32(-2), int64(0x500000009), int32(0))
	refused := message(int32(2), int64(0x500000006), int32(-101))
	failed := message(int32(own+2), int64(0x500000006), int32(-101))
	made := message(int32(own+ownNumbers-1), int64(0x500000003), int32(-110))
	said := bytes.Join([][]byte{hello, event, made, created, queue, pong, refused, failed}, nil)
	heard := bytes.Join([][]byte{hello, event, born, pong, refused}, nil) // by the library

	for name, pieces := range map[string]func(io.Reader) io.Reader{
		"as they come": func(r io.Reader) io.Reader { return r },
		"byte by byte": iotest.OneByteReader,
		"in halves":    iotest.HalfReader,
		"end with err": iotest.DataErrReader,
	} {
		t.Run(name, func(t *testing.T) {
			d := New([]string{"localhost:2181"}, nil)
			s := d.newSession(4 * time.Second)
			s.zxid.Store(0x400000001)
			conn := &pipe{Reader: pieces(bytes.NewReader(said))}
			w := &wire{Conn: conn, s: s, zxid: s.zxid.Load(), seen: 0x400000009, births: map[int32][]byte{}}

			write := func(p []byte) []byte {
				t.Helper()
				conn.sent.Reset()
				if n, err := w.Write(p); n != len(p) || err != nil {
					t.Fatalf("Write = %d, %v", n, err)
				}
				return conn.sent.Bytes()
			}
			want := message(int32(0), int64(0x400000009), int32(4000), int64(0))
			if got := write(message(int32(0), int64(0), int32(4000), int64(0))); !bytes.Equal(got, want) {
				t.Errorf("connect request = %x, want %x with the highest zxid", got, want)
			}
			create := func(number, op, flags int32) []byte {
				return message(number, op, int32(len(path)), []byte(path), flags)
			}
			dir := parent(path)
			s.makeFirst(dir)
			for number := range int32(3) {
				want := create(number, opCreate2, 3)
				want = append(want, message(own+number, int32(opGetChildren2), int32(len(dir)), []byte(dir), false)...)
				if number == 0 {
					const scheme, id = "world", "anyone"
					want = append(message(int32(own+ownNumbers-1), int32(opCreateContainer), int32(len(dir)),
						[]byte(dir), int32(0),
						int32(1), int32(zk.PermAll), int32(len(scheme)), []byte(scheme), int32(len(id)),
						[]byte(id), int32(4)), want...)
				}
				if got := write(create(number, opCreate, zk.FlagEphemeral|zk.FlagSequence)); !bytes.Equal(got, want) {
					t.Errorf("creation of an entry = %x, want %x: the name's node once, create2, and the queue",
						got, want)
				}
			}
			if got := write(create(7, opCreate, zk.FlagPersistent)); !bytes.Equal(got, create(7, opCreate, 0)) {
				t.Errorf("another creation = %x, want it unchanged", got)
			}
			want = message(int32(5), int32(opSetWatches), int64(0x400000001), int32(0))
			if got := write(message(int32(5), int32(opSetWatches), int64(0), int32(0))); !bytes.Equal(got, want) {
				t.Errorf("watches = %x, want %x with the zxid at which the connection was opened", got, want)
			}

			got, err := io.ReadAll(w)
			if err != nil {
				t.Fatal(err)
			}
			blank := bytes.Clone(heard)
			for at := len(hello); at < len(blank); at += 4 + int(binary.BigEndian.Uint32(blank[at:])) {
				clear(blank[at+8 : at+16])
			}
			if !bytes.Equal(got, blank) {
				t.Errorf("read %x, want %x: everything that is not the wire's, without zxids", got, blank)
			}
			if s.id != 77 || s.zxid.Load() != 0x500000006 {
				t.Errorf("session %d, zxid %x; want 77, and that of the last reply", s.id, s.zxid.Load())
			}
			if never, there := w.births[0]; len(w.births) != 1 || !there || never != nil {
				t.Errorf("of creations %v are kept, want the one that was not answered", w.births)
			}
		})
	}
}

// TestManyWatches splits requests for watches of all kinds, and reads the parts.
func TestManyWatches(t *testing.T) {
	t.Parallel()
	for _, sizes := range [][3]int{
		{0, 0, 0}, {3, 2, 1}, {500, 0, 0}, {0, 0, 500}, {100, 1, 100}, {50, 300, 2}, {300, 300, 300},
	} {
		var fields []any
		var want [3][]string
		for list, n := range sizes {
			fields = append(fields, int32(n))
			for i := range n {
				path := fmt.Sprintf("/fencelock/lock:a/%d-%032d", list, i)
				want[list] = append(want[list], path)
				fields = append(fields, int32(len(path)), []byte(path))
			}
		}
		p := message(append([]any{int32(7), int32(opSetWatches), int64(0x500000003)}, fields...)...)
		var got [3][]string
		for all := splitWatches(p); len(all) > 0; {
			one := all[:4+binary.BigEndian.Uint32(all)]
			all = all[len(one):]
			number := int32(anonymous)
			if len(all) == 0 {
				number = 7
			}
			head := message(number, int32(opSetWatches), int64(0x500000003))[4:]
			if len(one) > maxWatches || !bytes.HasPrefix(one[4:], head) {
				t.Fatalf("%v: a request of %d bytes with the head %x, want %x", sizes, len(one), one[4:20], head)
			}
			rest := one[4+len(head):]
			for list := range got {
				n := binary.BigEndian.Uint32(rest)
				rest = rest[4:]
				for range n {
					path, behind, ok := cutText(rest)
					if !ok {
						t.Fatalf("%v: a list ends early", sizes)
					}
					got[list], rest = append(got[list], string(path)), behind
				}
			}
			if len(rest) > 0 {
				t.Fatalf("%v: %d bytes too many", sizes, len(rest))
			}
		}
		for list := range got {
			if !slices.Equal(got[list], want[list]) {
				t.Errorf("%v: list %d has %d paths, want %d", sizes, list, len(got[list]), len(want[list]))
			}
		}
	}
}

// TestBirth reads what the wire tells of a node that was created.
func TestBirth(t *testing.T) {
	t.Parallel()
	const path, zxid = "/fencelock/lock:a/0123456789abcdef.0000000007", "\x00\x00\x00\x05\x00\x00\x00\x03"
	for told, want := range map[string]birth{
		path:                 {path: path},
		path + "\x00" + zxid: {path: path, zxid: 0x500000003}, // the queue could not be read
		path + "\x00" + zxid + "\x00\x00\x00\x02\x00\x00\x00\x01a": {path: path, zxid: 0x500000003},
		path + "\x00" + zxid + "\x00\x00\x00\x02\x00\x00\x00\x01a\x00\x00\x00\x02bc and the state": {
			path: path, zxid: 0x500000003, queue: []string{"a", "bc"},
		},
	} {
		got := readBirth(told)
		if got.path != want.path || got.zxid != want.zxid || !slices.Equal(got.queue, want.queue) ||
			(got.queue == nil) != (want.queue == nil) {
			t.Errorf("%q is read as %+v, want %+v", told, got, want)
		}
	}
}

// TestFailedWriteIsALostConnection: the library hands the error of a write to the maker of the request.
func TestFailedWriteIsALostConnection(t *testing.T) {
	t.Parallel()
	d := New([]string{"localhost:2181"}, &Options{Logger: slog.New(slog.DiscardHandler)})
	w := &wire{Conn: &pipe{broken: true}, s: d.newSession(4 * time.Second), greeted: true, births: map[int32][]byte{}}
	_, err := w.Write(message(int32(1), int32(opPing)))
	if !transient(err) || !errors.Is(err, zk.ErrConnectionClosed) {
		t.Errorf("Write = %v, want zk.ErrConnectionClosed", err)
	}
}

// TestConnectionBreaksAtItsStart breaks the second connection of a session before it is of use, in two ways:
// there must be a third one.
func TestConnectionBreaksAtItsStart(t *testing.T) {
	t.Parallel()
	hello := message(int32(0), int32(10_000), int64(77), int32(16), [16]byte{}, false)
	for name, second := range map[string]struct {
		hello []byte // the server's first message
		mute  bool   // the client's second message cannot be written
	}{
		"the authentication cannot be written": {hello, true},
		"half a message comes":                 {hello[:30], false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			breakSecond(t, hello, second.hello, second.mute)
		})
	}
}

func breakSecond(t *testing.T, hello, second []byte, silent bool) {
	// The server takes every connection in, and says which of the session's was authenticated. Others only ask for its
	// limits.
	var dials atomic.Int32 // of the session
	authenticated := make(chan int32, 4)
	serve := func(conn net.Conn) {
		dial := int32(0)
		for first := true; ; first = false {
			var size [4]byte
			if _, err := io.ReadFull(conn, size[:]); err != nil {
				return
			}
			request := make([]byte, binary.BigEndian.Uint32(size[:]))
			if _, err := io.ReadFull(conn, request); err != nil {
				return
			}
			if first && (dials.Load() == 0 || binary.BigEndian.Uint64(request[16:]) != 0) {
				dial = dials.Add(1)
			}
			switch {
			case first && dial == 0:
				_, _ = conn.Write(message(int32(0), request[12:16], int64(99), int32(16), [16]byte{}, false))
			case first && dial == 2:
				_, _ = conn.Write(second)
			case first:
				_, _ = conn.Write(hello)
			case binary.BigEndian.Uint32(request[4:]) == 100: // the authentication
				authenticated <- dial
				_, _ = conn.Write(message(binary.BigEndian.Uint32(request), int64(1), int32(0)))
			}
		}
	}
	servers := make(chan net.Conn, 100)
	d := New([]string{"localhost:2181"}, &Options{
		User: "ann", Password: "secret", Logger: slog.New(slog.DiscardHandler),
		Dial: func(context.Context, string, string) (net.Conn, error) {
			client, server := net.Pipe()
			servers <- server
			go serve(server)
			if silent {
				client = &mute{Conn: client, dials: &dials}
			}
			return client, nil
		},
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s := d.newSession(10 * time.Second)
	if err := s.connect(ctx); err != nil {
		t.Fatal(err)
	}
	(<-servers).Close() // the first
	for _, want := range []int32{1, 3} {
		select {
		case got := <-authenticated:
			if got != want {
				t.Errorf("connection %d was authenticated, want %d", got, want)
			}
		case <-ctx.Done():
			t.Fatalf("connection %d was not authenticated, of %d", want, dials.Load())
		}
	}
	s.end(backend.ReasonClosed)
	if err := d.Close(ctx); err != nil {
		t.Errorf("Close = %v", err)
	}
}

// mute is a connection over which the client says nothing after its first message, if that is the second of a session.
type mute struct {
	net.Conn
	dials  *atomic.Int32
	silent bool
}

func (m *mute) Write(p []byte) (int, error) {
	if m.silent {
		return 0, net.ErrClosed
	}
	const greeting = 20 // to the session's id, 0 for a new one
	m.silent = m.dials.Load() == 1 && len(p) > greeting+8 && binary.BigEndian.Uint64(p[greeting:]) != 0
	return m.Conn.Write(p)
}

// TestLowerLimitEndsASession has a server lower its limit between the question for it and the session's own: the answer
// to that ends the session at once.
func TestLowerLimitEndsASession(t *testing.T) {
	t.Parallel()
	d := New([]string{"localhost:2181"}, nil)
	s := d.newSession(10 * time.Second)
	w := &wire{s: s}
	if err := s.shaken(w, 10*time.Second, 77); err != nil || s.Ended() {
		t.Fatalf("the first answer: %v", err)
	}
	if err := s.shaken(w, 10*time.Second, 77); err != nil || s.Ended() {
		t.Fatalf("an equal answer: %v", err)
	}
	if err := s.shaken(w, 9999*time.Millisecond, 77); !errors.Is(err, errSessionLost) || !s.Ended() {
		t.Errorf("a shorter answer: %v, want the session to end", err)
	}
}
