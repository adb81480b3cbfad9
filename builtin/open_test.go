package builtin

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
)

func TestParseURL(t *testing.T) {
	t.Parallel()
	for raw, want := range map[string]struct {
		addresses []string
		timeout   time.Duration
	}{
		"fencelock://a":                      {[]string{"a:7480"}, 5 * time.Second},
		"fencelock://a:1,b,[::1]:3/":         {[]string{"a:1", "b:7480", "[::1]:3"}, 5 * time.Second},
		"fencelocks://a?timeout=1m":          {[]string{"a:7480"}, time.Minute},
		"fencelocks://a,b?server-name=locks": {[]string{"a:7480", "b:7480"}, 5 * time.Second},
	} {
		u, err := syntax.ParseURL(raw)
		if err != nil {
			t.Errorf("%s: %v", raw, err)
			continue
		}
		if !slices.Equal(u.Addresses, want.addresses) || u.Timeout != want.timeout {
			t.Errorf("%s: %+v", raw, u)
		}
		if strings.HasPrefix(raw, "fencelocks") != (u.TLS != nil) {
			t.Errorf("%s: TLS is %v", raw, u.TLS)
		}
	}
	for _, raw := range []string{
		"fencelock://", "fencelock://a,,b", "fencelock://a:0", "fencelock://a:99999", "fencelock://a:x", "fencelock://::1",
		"fencelock://a/path", "fencelock://user:secret@a", "fencelock://a?nosuch=1", "fencelock://a?ca=x&ca=y",
		"fencelock://a?timeout=-1s", "fencelock://a?cert=x", "fencelock://a?ca=/no/such/file", "http://a",
		"fencelock://a?x=%zz",
	} {
		if _, err := syntax.ParseURL(raw); !errors.Is(err, backend.ErrInvalidOption) {
			t.Errorf("%s: %v, want ErrInvalidOption", raw, err)
		} else if strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the message contains the password: %v", raw, err)
		}
	}
}

func TestOpenWithoutServer(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	// Port 1 is reserved, and no server listens there.
	if _, err := Open(ctx, "fencelock://127.0.0.1:1"); !errors.Is(err, backend.ErrUnavailable) {
		t.Errorf("open: %v, want ErrUnavailable", err)
	}
}
