package redis

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
)

func TestURLs(t *testing.T) {
	for _, c := range []struct{ url, addr, user, password string }{
		{"redis://a:1/2", "a:1", "", ""},
		{"redis://u:p%40w@a:1", "a:1", "u", "p@w"},
		{"rediss://u:pw@a:1?key_prefix=x:&max_retries=7", "a:1", "u", "pw"},
		{"redis+sentinel://u:pw@a:1,b:2/mymaster?db=3&sentinel_username=su&sentinel_password=sp", "FailoverClient", "u", "pw"},
		{"redis+cluster://u:pw@a:1,b:2", "a:1,b:2", "u", "pw"},
		{"rediss+cluster://a:1", "a:1", "", ""},
	} {
		client, o, err := dial(c.url)
		if err != nil {
			t.Errorf("%s: %v", c.url, err)
			continue
		}
		var addr, user, password string
		var retries int
		var honours, tls bool
		switch client := client.(type) {
		case *goredis.Client:
			opt := client.Options()
			addr, user, password = opt.Addr, opt.Username, opt.Password
			retries, honours, tls = opt.MaxRetries, opt.ContextTimeoutEnabled, opt.TLSConfig != nil
		case *goredis.ClusterClient:
			opt := client.Options()
			addr, user, password = strings.Join(opt.Addrs, ","), opt.Username, opt.Password
			retries, honours, tls = opt.MaxRetries, opt.ContextTimeoutEnabled, opt.TLSConfig != nil
		}
		if addr != c.addr || user != c.user || password != c.password || retries > 0 || !honours {
			t.Errorf("%s: addr %q, user %q, password %q, retries %d, contexts %v", c.url, addr, user, password, retries, honours)
		}
		if want := strings.HasPrefix(c.url, "rediss"); tls != want {
			t.Errorf("%s: TLS %v", c.url, tls)
		}
		if want := strings.Contains(c.url, "key_prefix"); (o.KeyPrefix == "x:") != want {
			t.Errorf("%s: prefix %q", c.url, o.KeyPrefix)
		}
		client.Close()
	}
	for _, url := range []string{
		"redis://a:1,b:2", "redis+sentinel://a:1", "redis+other://a:1", "redis://:secret@a:1/x", "redis://:secret@a:1?what=7",
		"redis+cluster://:sec ret@%zz",
	} {
		_, err := backend.Open(context.Background(), url)
		if !errors.Is(err, backend.ErrInvalidOption) {
			t.Errorf("%s: %v", url, err)
		} else if strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the password is in the error: %v", url, err)
		}
	}
}

func TestOpen(t *testing.T) {
	s := startServer(t)
	d, err := backend.Open(within(t, 5*time.Second), "redis://"+s.addr+"/3?key_prefix=mine:")
	if err != nil {
		t.Fatal(err)
	}
	g, err := d.Acquire(within(t, 5*time.Second), request("n", time.Second, true))
	if err != nil {
		t.Fatal(err)
	}
	admin := goredis.NewClient(&goredis.Options{Addr: s.addr, DB: 3})
	defer admin.Close()
	if found := keys(t, admin); len(found) != 1 || found[0] != "mine:{n}" {
		t.Errorf("keys: %v", found)
	}
	if err := d.Release(within(t, 5*time.Second), g); err != nil {
		t.Error(err)
	}
	if err := d.Close(within(t, 5*time.Second)); err != nil {
		t.Error(err)
	}
}
