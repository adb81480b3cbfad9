package redisconn

import (
	"errors"
	"fmt"
	"io"
	"net"
	"testing"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
)

func TestFailureOf(t *testing.T) {
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
		got := FailureOf(fmt.Errorf("wrapped: %w", c.err))
		if got.Sent != errors.Is(c.class, backend.ErrUnknown) || got.Fatal != errors.Is(c.class, backend.ErrMisconfigured) {
			t.Errorf("%v is classified as %+v, want %v", c.err, got, c.class)
		}
		if inner := (*Failure)(nil); !errors.As(c.err, &inner) && !errors.Is(got, c.err) {
			t.Errorf("%v is not in the chain of %v", c.err, got)
		}
	}
	if f := FailureOf(ServerError("ERR unknown command")); !f.Fatal || f.Sent {
		t.Errorf("an answer of another kind is %+v, want fatal and nothing done", f)
	}
}
