package server

// Tokens. A client may send one with each call at the socket for clients. It counts before the certificate.

import (
	"context"
	"errors"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/internal/principal"
)

const (
	// tokenGrace is how long a connection outlasts its token. The client has that time to connect with another one.
	tokenGrace = 30 * time.Second
	// tokenEvery is how often the token of a connection is verified.
	tokenEvery = time.Second
)

// bearer is a token that was verified when the call began.
type bearer struct {
	who   principal.Principal
	token string
}

// bearerKey finds the bearer in a call's context.
type bearerKey struct{}

// bearerOf returns whose token a call has; false if it has no token.
func bearerOf(ctx context.Context) (bearer, bool) {
	b, ok := ctx.Value(bearerKey{}).(bearer)
	return b, ok
}

// authenticated adds to ctx whose token a call has. It refuses a token that is not valid.
func (s *Server) authenticated(ctx context.Context) (context.Context, error) {
	given := metadata.ValueFromIncomingContext(ctx, "authorization")
	if len(given) == 0 {
		return ctx, nil
	}
	scheme, token, _ := strings.Cut(given[0], " ")
	switch {
	case s.config.Proofs == nil:
		return ctx, status.Error(codes.Unauthenticated, "this server accepts no tokens: see --principals")
	case len(given) > 1 || !strings.EqualFold(scheme, "Bearer"):
		return ctx, status.Error(codes.Unauthenticated, "want one authorization: Bearer TOKEN")
	}
	token = strings.TrimSpace(token)
	who, err := s.config.Proofs().Token(token, time.Now())
	if err != nil {
		return ctx, status.Error(codes.Unauthenticated, err.Error())
	}
	return context.WithValue(ctx, bearerKey{}, bearer{who, token}), nil
}

// tokenEnded is why a connection must end that a token has begun: the token has expired some time ago, was removed, or
// is another principal's. nil: it need not.
func (s *Server) tokenEnded(b bearer) error {
	who, err := s.config.Proofs().Token(b.token, time.Now().Add(-tokenGrace))
	if err == nil && who != b.who {
		err = errors.New("the token now belongs to another principal")
	}
	return err
}

func (s *Server) withToken(ctx context.Context, in any, call *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	known, err := s.authenticated(ctx)
	if err != nil {
		s.auditCall(ctx, call.FullMethod, in, err)
		return nil, err
	}
	return next(known, in)
}

func (s *Server) streamWithToken(
	server any, stream grpc.ServerStream, call *grpc.StreamServerInfo, next grpc.StreamHandler,
) error {
	ctx, err := s.authenticated(stream.Context())
	if err != nil {
		s.auditCall(stream.Context(), call.FullMethod, nil, err)
		return err
	}
	return next(server, &knownStream{stream, ctx})
}

// knownStream is a stream whose context has the bearer.
type knownStream struct {
	grpc.ServerStream
	ctx context.Context
}

// Context implements grpc.ServerStream.
func (s *knownStream) Context() context.Context { return s.ctx }
