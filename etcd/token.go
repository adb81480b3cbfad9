package etcd

import (
	"context"
	"errors"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Passwords. etcd gives a client a token for its password, and all members know it. The client library asks for a
// token for every stream it opens, and a server checks a password with a slow hash, a tenth of a second of a
// processor. Authenticating each stream would overload the servers, whose late answers make clients reconnect and
// authenticate again. So this client asks only if it has no token, or a server did not know the last one. One request
// at a time serves all callers, and it continues when the context of a waiting caller ends.

// token is the servers' token for a client's password. Its interceptors replace the library's own requests, in the
// client that Open makes.
type token struct {
	conns *connections

	mu sync.Mutex // protects the following fields
	// The token; empty without a token, or if a server did not know it. number counts the tokens.
	text   string
	number int
	// The request in progress, or nil.
	asking *asking
}

// asking is one request for a token, for all concurrent callers.
type asking struct {
	done chan struct{} // closed when the answer is there
	// Valid when done is closed.
	answer *pb.AuthenticateResponse
	err    error
}

// askingTime bounds a request for a token, whose caller's context does not. An unresponsive server is left before: see
// connections.
const askingTime = 30 * time.Second

// authenticate replaces a request for a token: it answers with the known token, or waits for the request in progress,
// which it begins if necessary. ctx ends the wait only.
func (t *token) authenticate(
	ctx context.Context, reply *pb.AuthenticateResponse, send func(context.Context, any) error,
) error {
	t.mu.Lock()
	if t.text != "" {
		reply.Token = t.text
		t.mu.Unlock()
		return nil
	}
	a := t.asking
	if a == nil {
		a = &asking{done: make(chan struct{}), answer: &pb.AuthenticateResponse{}}
		t.asking = a
		go t.ask(context.WithoutCancel(ctx), a, send)
	}
	t.mu.Unlock()
	select {
	case <-a.done:
		reply.Header, reply.Token = a.answer.Header, a.answer.Token
		return a.err
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

// ask is that request, in a separate goroutine that ends within askingTime. It is not counted at the gate: it belongs
// to the client, and closing the client ends it.
func (t *token) ask(ctx context.Context, a *asking, send func(context.Context, any) error) {
	ctx, cancel := context.WithTimeout(ctx, askingTime)
	defer cancel()
	a.err = send(ctx, a.answer)
	t.mu.Lock()
	t.asking = nil
	if a.err == nil {
		t.text = a.answer.Token
		t.number++
	}
	t.mu.Unlock()
	t.conns.bearWith(a.err)
	close(a.done)
}

// inUse returns the number of the token that a request sent now bears. Numbers distinguish an old refusal from a new
// one.
func (t *token) inUse() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.number
}

// forget drops a token that a server does not know, unless it has been replaced since: many requests with the same
// token are refused together, and must ask for only one new token.
func (t *token) forget(number int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.number == number {
		t.text = ""
	}
}

// unary is the interceptor of single requests. A request that is refused for its token drops the token; the client
// library then asks for another, and repeats the request.
func (t *token) unary(
	ctx context.Context, method string, request, reply any, conn *grpc.ClientConn,
	call grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	if answer, ok := reply.(*pb.AuthenticateResponse); ok {
		return t.authenticate(ctx, answer, func(ctx context.Context, answer any) error {
			return call(ctx, method, request, answer, conn, opts...)
		})
	}
	// Read before the request is sent: the token that it bears is this one or a later one. If it is a later one, the
	// refusal drops no token, and the next refusal does.
	number := t.inUse()
	err := call(ctx, method, request, reply, conn, opts...)
	if ofToken(err) {
		t.forget(number)
	}
	return err
}

// stream is the interceptor of streams. It returns when the stream stands; end frees its context when the stream ends.
func (t *token) stream(
	ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string,
	open grpc.Streamer, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	ctx, end := context.WithCancel(ctx)
	number := t.inUse()
	s, err := open(ctx, desc, conn, method, opts...)
	if err != nil {
		end()
		return nil, err
	}
	return &tokenStream{ClientStream: s, token: t, number: number, end: end}, nil
}

// ofToken reports whether a request was refused for its token, which does not mean that the password is wrong.
func ofToken(err error) bool {
	return isOneOf(err, rpctypes.ErrInvalidAuthToken, rpctypes.ErrAuthOldRevision, rpctypes.ErrUserEmpty)
}

// tokenStream is a stream that was opened with a token. It ends when the token is refused.
type tokenStream struct {
	grpc.ClientStream
	token  *token
	number int
	end    context.CancelFunc
}

// RecvMsg receives a message. It ends the stream even if only a watch on it is refused for its token: otherwise the
// client library would open more watches on the same stream, which are refused too. Now the library opens another
// stream for all of them.
func (s *tokenStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	// A refused watch comes as a message that it was cancelled, with the reason as text.
	if watch, ok := m.(*pb.WatchResponse); ok && err == nil && watch.Canceled {
		if why := errors.New(watch.CancelReason); ofToken(why) {
			s.token.forget(s.number)
			err = status.Error(codes.Unavailable, "the stream has an old token")
		}
	}
	if ofToken(err) {
		s.token.forget(s.number)
	}
	if err != nil {
		s.end()
	}
	return err
}
