package builtin_test

import (
	"context"
	"errors"
	"net/url"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/internal/server"
	"github.com/fencelock/fencelock/internal/testcert"
)

// The server accepts a client with a certificate. A client without a certificate, without trust in the server, or
// without TLS fails.
func TestTLS(t *testing.T) {
	t.Parallel()
	authority := testcert.New(t)
	s, err := server.Start(t.Context(), server.Config{Listen: "127.0.0.1:0", TLS: authority.Server(t, "locks.test"), Log: quiet(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close(context.Background())
	certificate, key := authority.Sign(t, "client")
	open := func(scheme string, options url.Values, timeout string) error {
		options.Set("timeout", timeout)
		d, err := builtin.Open(t.Context(), scheme+"://"+s.Addr().String()+"?"+options.Encode())
		if err != nil {
			return err
		}
		defer d.Close(context.Background())
		_, err = d.Acquire(t.Context(), request("x", time.Minute))
		return err
	}
	err = open("fencelocks", url.Values{
		"ca": {authority.File}, "cert": {certificate}, "key": {key}, "server-name": {"locks.test"},
	}, "1m")
	if err != nil {
		t.Errorf("with all that is needed: %v", err)
	}
	for name, c := range map[string]struct {
		scheme  string
		options url.Values
	}{
		"no certificate of the client": {"fencelocks", url.Values{"ca": {authority.File}, "server-name": {"locks.test"}}},
		"an authority of no concern": {"fencelocks", url.Values{
			"ca": {testcert.New(t).File}, "cert": {certificate}, "key": {key}, "server-name": {"locks.test"},
		}},
		"another name": {"fencelocks", url.Values{"ca": {authority.File}, "cert": {certificate}, "key": {key}}},
		"in the clear": {"fencelock", url.Values{}},
	} {
		if err := open(c.scheme, c.options, "2s"); !errors.Is(err, backend.ErrUnavailable) {
			t.Errorf("%s: %v, want ErrUnavailable", name, err)
		}
	}
}
