package redisconn

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
)

func TestCallErrorNamesTheClass(t *testing.T) {
	for _, c := range []struct {
		err   error
		class error
	}{
		{io.EOF, backend.ErrUnknown},
		{&net.OpError{Op: "read", Err: io.ErrUnexpectedEOF}, backend.ErrUnknown},
		{&net.OpError{Op: "dial", Err: errors.New("refused")}, backend.ErrUnavailable},
		{&net.DNSError{Err: "no such host"}, backend.ErrUnavailable},
		{goredis.ErrPoolTimeout, backend.ErrUnavailable},
		{ServerError("LOADING Redis is loading the dataset in memory"), backend.ErrUnavailable},
		{ServerError("ERR Error running script: @user_script: 1: -READONLY You can't write"), backend.ErrUnavailable},
		{ServerError("ERR max number of clients reached"), backend.ErrUnavailable},
		{ServerError("NOPERM this user has no permissions"), backend.ErrMisconfigured},
		{ServerError("WRONGTYPE Operation against a key"), backend.ErrMisconfigured},
		{&Failure{Cause: fmt.Errorf("behind: %w", io.EOF), Sent: true}, backend.ErrUnknown},
	} {
		got := CallError(context.Background(), "driver", "acquire", "name", FailureOf(fmt.Errorf("wrapped: %w", c.err)))
		for _, class := range []error{backend.ErrUnknown, backend.ErrUnavailable, backend.ErrMisconfigured} {
			if errors.Is(got, class) != errors.Is(c.class, class) {
				t.Errorf("%v is reported as %v, want %v", c.err, got, c.class)
			}
		}
		if inner := (*Failure)(nil); !errors.As(c.err, &inner) && !errors.Is(got, c.err) {
			t.Errorf("%v is not in the chain of %v", c.err, got)
		}
	}
	if f := FailureOf(ServerError("ERR unknown command")); !f.Fatal || f.Sent {
		t.Errorf("an answer of another kind is %+v, want fatal and nothing done", f)
	}
}

func TestCallErrorKeepsTheContextsError(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := CallError(ctx, "driver", "renew", "", io.EOF); !errors.Is(err, context.Canceled) ||
		!errors.Is(err, io.EOF) {
		t.Errorf("%v lacks context.Canceled or the cause", err)
	}
}
