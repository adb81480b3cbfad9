package server

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// doors are the ways in which a client reaches a server.
var doors = map[string]func(*testing.T, *Server) *client{
	"grpc":    func(t *testing.T, s *Server) *client { return dial(t, s.Addr().String()) },
	"process": func(t *testing.T, s *Server) *client { return attach(t, s) },
}

// A client that half-closes its stream releases its holds, also those of its last requests.
func TestHalfClosedStreamEndsItsSessions(t *testing.T) {
	t.Parallel()
	for name, open := range doors {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := alone(t, Config{Listen: "127.0.0.1:0"})
			leaver, waiter := open(t, s), attach(t, s)
			session := leaver.open(longTTL)
			leaver.hold(session, "x")
			own := waiter.open(longTTL)
			if r := waiter.call(acquireOf(own, "x", backend.NewRequestID(), true)); !r.GetAcquired().GetQueued() {
				t.Fatalf("the second: %v", r)
			}
			last := leaver.send(acquireOf(session, "y", backend.NewRequestID(), false))
			began := time.Now()
			if err := leaver.stream.CloseSend(); err != nil {
				t.Fatal(err)
			}
			if r := waiter.next(); len(r.GetGranted().GetGrants()) != 1 {
				t.Fatalf("the waiter hears %v", r)
			}
			t.Logf("freed after %v", time.Since(began))
			if r := <-last; len(r.GetAcquired().GetGrants()) != 1 {
				t.Errorf("what was asked for before is answered %v", r)
			}
			if g := leaver.next().GetGoodbye(); g.GetCode() != lockpb.Code_CODE_UNSPECIFIED {
				t.Errorf("the client that leaves gets %v", g)
			}
			waiter.hold(own, "y")
			if s.replica.State.Machine.SessionOpen([16]byte(session)) {
				t.Error("the session is open")
			}
		})
	}
}

// A connection that breaks, or that the client has left for another one, ends no session.
func TestBrokenStreamKeepsItsSessions(t *testing.T) {
	t.Parallel()
	for name, open := range doors {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := alone(t, Config{Listen: "127.0.0.1:0"})
			first := open(t, s)
			session := first.open(longTTL)
			_, token := first.hold(session, "x")
			back := func(by *client) {
				t.Helper()
				r := by.call(&lockpb.Request{Session: session, Call: &lockpb.Request_Attach{Attach: &lockpb.Attach{}}})
				if holds := r.GetSession().GetHolds(); len(holds) != 1 || holds[0].Token != token {
					t.Errorf("the client comes back to %v", r)
				}
			}
			gone := func(left int) {
				t.Helper()
				eventually(t, "the connection is forgotten", func() bool {
					s.mu.Lock()
					defer s.mu.Unlock()
					return len(s.conns) == left
				})
			}
			first.close()
			gone(0)
			second := open(t, s)
			back(second)
			third := open(t, s)
			back(third)
			if err := second.stream.CloseSend(); err != nil {
				t.Fatal(err)
			}
			gone(1)
			back(third)
		})
	}
}

// script is a connection on which the client sends the messages of said, and which ends with the error of end.
type script struct {
	ctx  context.Context
	said chan *lockpb.ClientMessage
	end  chan error
	told chan *lockpb.ServerMessage
}

func (s *script) Context() context.Context           { return s.ctx }
func (s *script) Send(m *lockpb.ServerMessage) error { s.told <- m; return nil }
func (s *script) Recv() (*lockpb.ClientMessage, error) {
	select {
	case m := <-s.said:
		return m, nil
	case err := <-s.end:
		return nil, err
	}
}

// The server distinguishes the ends of a stream, without a race between its two sides.
func TestEndOfStream(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{})
	for _, x := range []struct {
		end  error
		left int // holds
	}{{io.EOF, 0}, {errors.New("the connection broke"), 1}, {context.Canceled, 1}, {io.ErrUnexpectedEOF, 1}} {
		stream := &script{
			ctx: t.Context(), said: make(chan *lockpb.ClientMessage), end: make(chan error, 1),
			told: make(chan *lockpb.ServerMessage, 10),
		}
		over := make(chan error, 1)
		go func() { over <- s.serveStream(stream) }()
		session := sessionID()
		for _, q := range []*lockpb.Request{
			{Number: 1, Session: session, Call: &lockpb.Request_OpenSession{
				OpenSession: &lockpb.OpenSession{TtlNanos: int64(longTTL)},
			}},
			acquireOf(session, x.end.Error(), backend.NewRequestID(), false),
		} {
			stream.said <- &lockpb.ClientMessage{Requests: []*lockpb.Request{q}}
			<-stream.told
		}
		stream.end <- x.end
		if err := <-over; err != nil {
			t.Errorf("%v: %v", x.end, err)
		}
		if left := len(s.replica.State.Machine.Holder(x.end.Error()).Holders); left != x.left {
			t.Errorf("after a stream ended with %q, its client has %d holds; want %d", x.end, left, x.left)
		}
	}
}
