package redlock

import (
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
	d, err := backend.Open(within(t, 30*time.Second), "redlock://"+hosts+
		"/2?prefix=own:&node-timeout=300ms&max-ttl=20s&trust-fresh=true&pool-size=3")
	if err != nil {
		t.Fatal(err)
	}
	o := d.(*Driver).service.o
	if o.KeyPrefix != "own:" || o.NodeTimeout != 300*time.Millisecond || o.MaxTTL != 20*time.Second || !o.TrustFresh {
		t.Errorf("options = %+v", o)
	}
	if db := d.(*Driver).service.nodes[2].client.Options().DB; db != 2 {
		t.Errorf("database of the third server = %d, want 2", db)
	}
	r := request("name")
	r.TTL = time.Second
	if _, err := d.Acquire(within(t, 30*time.Second), r); err != nil {
		t.Error(err)
	}
	r.TTL = time.Minute
	if _, err := d.Acquire(within(t, 30*time.Second), r); !errors.Is(err, backend.ErrInvalidTTL) {
		t.Errorf("a TTL above max-ttl = %v, want ErrInvalidTTL", err)
	}

	if err := d.Close(within(t, 5*time.Second)); err != nil {
		t.Error(err)
	}
}

// The error of an invalid URL, or of a URL to the wrong place, describes the mistake.
func TestWrongURLs(t *testing.T) {
	t.Parallel()
	s := start(t, 3)
	hosts := s[0].Addr() + "," + s[1].Addr() + "," + s[2].Addr()
	for url, want := range map[string]struct {
		err  error
		text string
	}{
		"redlock://": {
			backend.ErrInvalidOption, "no host: write redlock://localhost:6379",
		},
		"redlock://u:secret@a:1,b:1":                      {backend.ErrInvalidOption, "number of servers"},
		"redlock://u:secret@a:1":                          {backend.ErrInvalidOption, "number of servers"},
		"redlock://u:secret@a:1,,b:1":                     {backend.ErrInvalidOption, "no host"},
		"redlock://u:secret@a:1,b:1,c:1?max-ttl=long":     {backend.ErrInvalidOption, "max-ttl"},
		"redlock://u:secret@a:1,b:1,c:1?node-timeout=-1s": {backend.ErrInvalidOption, "node-timeout"},
		"redlock://u:secret@a:1,b:1,c:1?trust-fresh=si":   {backend.ErrInvalidOption, "trust-fresh"},
		"redlock://u:secret@a:1,b:1,c:1?max_ttl=30s":      {backend.ErrInvalidOption, "unknown option"},
		"redlock://u:secret@a:1,b:1,c:1?prefix={x}":       {backend.ErrInvalidOption, "braces"},
		"redlock://u:secret@a:1,b:1,c:1/x":                {backend.ErrInvalidOption, "database"},
		// The servers have no users.
		"redlock://u:secret@" + hosts + "?trust-fresh=true": {backend.ErrMisconfigured, "credentials"},
		"redlock://" + hosts + "/99?trust-fresh=true":       {backend.ErrMisconfigured, "database"},
		// The servers are fresh.
		"redlock://" + hosts:                            {backend.ErrUnavailable, "no vote before"},
		"redlocks://" + hosts + "?timeout=500ms":        {backend.ErrUnavailable, "TLS"},
		"redlock://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3": {backend.ErrUnavailable, "connection refused"},
	} {
		d, err := backend.Open(within(t, 30*time.Second), url)
		if !errors.Is(err, want.err) || d != nil {
			t.Errorf("%s: %v, %v, want %v", url, d, err, want.err)
			continue
		}
		if text := err.Error(); !strings.Contains(text, want.text) || strings.Contains(text, "secret") ||
			strings.Contains(text, "%!") {
			t.Errorf("%s: %v, does not say %q, or too much", url, err, want.text)
		}
	}
}
