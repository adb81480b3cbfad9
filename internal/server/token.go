package server

// Tokens. A client may send a token with each call at the socket for clients. It takes precedence over the
// certificate.

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
	// tokenGrace is the time for which a connection outlasts its token, so that the client can connect with another
	// token.
	tokenGrace = 30 * time.Second
	// tokenEvery is the interval at which the token of a connection is verified.
	tokenEvery = time.Second
)

// bearer is a token that was verified when the call began.
type bearer struct {
	who   principal.Principal
	token string
}

// bearerKey finds the bearer in a call's context.
type bearerKey struct{}

// bearerOf returns the bearer of a call; false if the call has no token.
func bearerOf(ctx context.Context) (bearer, bool) {
	b, ok := ctx.Value(bearerKey{}).(bearer)
	return b, ok
}

// authenticated adds the bearer of a call to ctx. It refuses a token that is not valid.
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

// tokenEnded returns the reason why a connection must end: its token expired tokenGrace ago, was removed, or belongs
// to another principal. nil: it need not end.
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
