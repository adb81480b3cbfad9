package server

// Connections within the process: an embedded server's own clients, and tests. A pipe replaces gRPC's stream and ends
// like one, so that conn sees no difference.

import (
	"context"
	"io"
	"sync"

	"github.com/fencelock/fencelock/builtin/lockpb"
)

// ClientStream is a client's end of a connection: the stream of Server.Attach, or of lockpb's Connect. Send and Recv
// may run concurrently, but neither with itself. A message belongs to the other side once it is sent.
type ClientStream interface {
	Send(*lockpb.ClientMessage) error
	Recv() (*lockpb.ServerMessage, error)
	CloseSend() error
}

// pipeDepth bounds the messages that wait in each direction of a pipe.
const pipeDepth = 16

// pipe connects a client in this process.
type pipe struct {
	ctx      context.Context // ends with the client's, or when the server has ended the connection
	toServer chan *lockpb.ClientMessage
	toClient chan *lockpb.ServerMessage
	closing  sync.Once
	closed   chan struct{} // the client sends no more
}

// Attach connects a client in this process: the counterpart of Connect without a network. The connection ends with
// ctx, with CloseSend, which also ends the sessions attached to it, or when the server ends it. A closed server, or a
// server that does not lead, answers as over the network.
func (s *Server) Attach(ctx context.Context) ClientStream { return s.attach(ctx) }

// AttachDoor is Attach for the HTTP server of this member. name is the client whose share of the limits counts. While
// the cluster has rules, the HTTP server has every right for the clients that it names, and no right for itself.
func (s *Server) AttachDoor(ctx context.Context, name string) ClientStream {
	return s.attach(context.WithValue(ctx, doorName{}, name))
}

func (s *Server) attach(ctx context.Context) ClientStream {
	ctx, cancel := context.WithCancel(ctx)
	p := &pipe{
		ctx: ctx, toServer: make(chan *lockpb.ClientMessage, pipeDepth),
		toClient: make(chan *lockpb.ServerMessage, pipeDepth), closed: make(chan struct{}),
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended { // Close may be waiting for connections that are attached already
		cancel()
		return clientEnd{p}
	}
	s.attaching.Go(func() {
		defer cancel()
		_ = s.serveStream(serverEnd{p}) // the client notices that the stream has ended
	})
	return clientEnd{p}
}

// doorName is the context key for the name of the HTTP server of this member.
type doorName struct{}

type clientEnd struct{ p *pipe }

// Send implements ClientStream. It blocks while pipeDepth messages wait, as a stream over the network does.
func (e clientEnd) Send(m *lockpb.ClientMessage) error {
	select {
	case <-e.p.closed:
		return io.ErrClosedPipe
	default:
	}
	select {
	case e.p.toServer <- m:
		return nil
	case <-e.p.ctx.Done():
		return io.EOF
	}
}

// Recv implements ClientStream. Messages that the server sent before the end are still received.
func (e clientEnd) Recv() (*lockpb.ServerMessage, error) {
	select {
	case m := <-e.p.toClient:
		return m, nil
	case <-e.p.ctx.Done():
	}
	select {
	case m := <-e.p.toClient:
		return m, nil
	default:
		return nil, io.EOF
	}
}

// CloseSend implements ClientStream.
func (e clientEnd) CloseSend() error {
	e.p.closing.Do(func() { close(e.p.closed) })
	return nil
}

type serverEnd struct{ p *pipe }

func (e serverEnd) Context() context.Context { return e.p.ctx }

func (e serverEnd) Send(m *lockpb.ServerMessage) error {
	select {
	case e.p.toClient <- m:
		return nil
	case <-e.p.ctx.Done():
		return e.p.ctx.Err()
	}
}

func (e serverEnd) Recv() (*lockpb.ClientMessage, error) {
	select {
	case m := <-e.p.toServer:
		return m, nil
	case <-e.p.ctx.Done():
		return nil, e.p.ctx.Err()
	case <-e.p.closed:
	}
	select {
	case m := <-e.p.toServer: // the client sent it before it closed
		return m, nil
	default:
		return nil, io.EOF
	}
}
