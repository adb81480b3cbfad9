package zookeeper

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/conformance/containers"
)

// message is one of the server, or of the library, with its length in front.
func message(fields ...any) []byte {
	var body bytes.Buffer
	for _, f := range fields {
		_ = binary.Write(&body, binary.BigEndian, f)
	}
	return append(binary.BigEndian.AppendUint32(nil, uint32(body.Len())), body.Bytes()...)
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
	authenticated, begun := make(chan int32, 4), make(chan net.Conn, 1)
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
			if first && (dials.Load() == 0 && binary.BigEndian.Uint32(request[12:]) == 10_000 ||
				binary.BigEndian.Uint64(request[16:]) != 0) {
				if dial = dials.Add(1); dial == 1 {
					begun <- conn
				}
			}
			switch {
			case first && dial == 0:
				_, _ = conn.Write(message(int32(0), request[12:16], int64(99), int32(16), [16]byte{}, false))
			case first && dial == 2:
				_, _ = conn.Write(second)
			case first:
				_, _ = conn.Write(hello)
			case binary.BigEndian.Uint32(request[4:]) == opAuth:
				if dial > 0 {
					authenticated <- dial
				}
				_, _ = conn.Write(message(request[:4], int64(1), int32(0)))
			default:
				_, _ = conn.Write(message(request[:4], int64(1), int32(codeNoNode)))
			}
		}
	}
	d := New([]string{"localhost:2181"}, &Options{
		User: "ann", Password: "secret", Logger: slog.New(slog.DiscardHandler),
		Dial: func(context.Context, string, string) (net.Conn, error) {
			client, server := net.Pipe()
			go serve(server)
			if silent {
				client = &mute{Conn: client, dials: &dials}
			}
			return client, nil
		},
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := d.service.Open(ctx, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	(<-begun).Close()
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
	if err := d.service.End(ctx, s); err != nil {
		t.Errorf("End = %v", err)
	}
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
	s := New([]string{"localhost:2181"}, nil).service.newSession(10*time.Second, 10*time.Second, "")
	for _, test := range []struct {
		timeout time.Duration
		want    error
	}{{10 * time.Second, nil}, {10 * time.Second, nil}, {9999 * time.Millisecond, engine.ErrNoSession}} {
		err := s.greeted(&link{s: s, work: make(chan struct{}, 1)}, greeting{test.timeout, 77, nil})
		if !errors.Is(err, test.want) || s.isOver() != (test.want != nil) {
			t.Errorf("the answer %v: %v, over %v; want %v", test.timeout, err, s.isOver(), test.want)
		}
	}
}

// clock is a clock that stands still.
type clock backend.Instant

func (c *clock) Now() backend.Instant { return backend.Instant(*c) }

// TestProof checks whether a transaction that is sent at an instant proves a session since another one, with a tick of
// 100 ms.
func TestProof(t *testing.T) {
	t.Parallel()
	const ms = backend.Instant(time.Millisecond)
	for name, test := range map[string]struct {
		base        backend.Instant
		touches     []backend.Instant
		since, sent backend.Instant
		want        bool
	}{
		"soon after the connection":         {1000, nil, 1100, 1100, true},
		"a tick after the connection":       {1000, nil, 1101, 1101, false},
		"half a tick after a message":       {1000, []backend.Instant{1500}, 1550, 1550, true},
		"too soon after a message":          {1000, []backend.Instant{1500}, 1549, 1549, false},
		"more than a tick after a message":  {1000, []backend.Instant{1500}, 1601, 1601, false},
		"an earlier message is old enough":  {1000, []backend.Instant{1460, 1500}, 1510, 1510, true},
		"a message after the call":          {1000, []backend.Instant{1500}, 1400, 1550, true},
		"a message over another connection": {1450, []backend.Instant{1400}, 1560, 1560, false},
	} {
		now := clock(test.sent * ms)
		s := New([]string{"localhost:2181"}, &Options{Tick: 100 * time.Millisecond, Clock: &now}).service.
			newSession(time.Second, time.Second, "")
		s.base = test.base * ms
		for _, u := range test.touches {
			s.touch(u * ms)
		}
		if got := s.touched(test.since * ms); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

// TestPlaceMovesBeforeItsAttemptEnds has a place move to another session without the attempt's knowledge, and the former
// session end: the end of the attempt removes the place.
func TestPlaceMovesBeforeItsAttemptEnds(t *testing.T) {
	t.Parallel()
	d := New([]string{containers.ZooKeeper(t).Addr()}, &Options{Tick: containers.ZooKeeperTick})
	t.Cleanup(func() { _ = d.Close(context.WithoutCancel(t.Context())) })
	ctx, e := t.Context(), d.service
	if err := e.Probe(ctx); err != nil {
		t.Fatal(err)
	}
	r := backend.Request{Name: "x", RequestID: backend.NewRequestID(), TTL: 10 * time.Second, Wait: true}
	var places []string
	var sessions []engine.Session
	for range 2 {
		s, err := e.Open(ctx, r.TTL)
		if err != nil {
			t.Fatal(err)
		}
		pos, err := e.Enter(ctx, engine.Entering{Request: r, Session: s, Again: len(places) > 0})
		if err != nil || !pos.Placed {
			t.Fatalf("Enter = %+v, %v", pos, err)
		}
		sessions, places = append(sessions, s), append(places, pos.Place)
	}
	if err := e.End(ctx, sessions[0]); err != nil {
		t.Fatal(err)
	}
	left, err := e.Leave(ctx, engine.Leaving{Grant: r.Grant(), Place: places[0]})
	if err != nil || !left.Was {
		t.Errorf("Leave = %+v, %v, want the place on the second session", left, err)
	}
}
