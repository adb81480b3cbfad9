package redlock

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
)

func TestOpen(t *testing.T) {
	t.Parallel()
	s := start(t, 3)
	var addrs []string
	for _, server := range s {
		addrs = append(addrs, server.Addr())
	}
	hosts := strings.Join(addrs, ",")
	d, err := backend.Open(within(t, 10*time.Second), "redlock://"+hosts+
		"/2?key_prefix=own:&node_timeout=300ms&max_ttl=20s&trust_fresh=true&pool_size=3")
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close(context.Background())
	o := d.(*Driver).o
	if o.KeyPrefix != "own:" || o.NodeTimeout != 300*time.Millisecond || o.MaxTTL != 20*time.Second || !o.TrustFresh {
		t.Errorf("options = %+v", o)
	}
	if db := d.(*Driver).nodes[2].client.Options().DB; db != 2 {
		t.Errorf("database of the third server = %d, want 2", db)
	}
	r := request("name")
	r.TTL = time.Second
	if _, err := d.Acquire(within(t, 5*time.Second), r); err != nil {
		t.Error(err)
	}
	r.TTL = time.Minute
	if _, err := d.Acquire(within(t, 5*time.Second), r); !errors.Is(err, backend.ErrInvalidTTL) {
		t.Errorf("a TTL above max_ttl = %v, want ErrInvalidTTL", err)
	}

	for url, want := range map[string]error{
		"redlock://u:secret@a:1,b:1":                      backend.ErrInvalidOption,
		"redlock://u:secret@a:1,,b:1":                     backend.ErrInvalidOption,
		"redlock://u:secret@a:1,b:1,c:1?max_ttl=long":     backend.ErrInvalidOption,
		"redlock://u:secret@a:1,b:1,c:1?node_timeout=-1s": backend.ErrInvalidOption,
		"redlock://u:secret@a:1,b:1,c:1?trust_fresh=si":   backend.ErrInvalidOption,
		"redlock://u:secret@a:1,b:1,c:1?nothing=1":        backend.ErrInvalidOption,
		"redlock://u:secret@a:1,b:1,c:1/x":                backend.ErrInvalidOption,
		"redlock://u:secret@" + hosts:                     backend.ErrMisconfigured, // there are no users
		"redlock://" + hosts:                              backend.ErrUnavailable,   // fresh servers
		"redlock://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3":   backend.ErrUnavailable,
	} {
		d, err := Open(within(t, 10*time.Second), url)
		if !errors.Is(err, want) || d != nil {
			t.Errorf("%s = %v, want %v", url, err, want)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("the error shows the password: %v", err)
		}
	}
}
