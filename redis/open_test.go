package redis

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/internal/testcert"
)

func TestURLs(t *testing.T) {
	t.Parallel()
	authority := testcert.New(t)
	cert, key := authority.Sign(t, "client")
	for _, c := range []struct {
		url, addr, user, password, prefix string
		db                                int
		tls                               bool
	}{
		{url: "redis://a", addr: "a:6379"},
		{url: "redis://a:1/2", addr: "a:1", db: 2},
		{url: "redis://a:1/", addr: "a:1"},
		{url: "redis://[::1]:1", addr: "[::1]:1"},
		{url: "redis://[::1]", addr: "[::1]:6379"},
		{url: "redis://u:p%40w@a:1", addr: "a:1", user: "u", password: "p@w"},
		{url: "redis://:p%2Fw@a:1", addr: "a:1", password: "p/w"},
		{url: "rediss://u:pw@a:1?prefix=x%3A", addr: "a:1", user: "u", password: "pw", prefix: "x:", tls: true},
		{url: "redis://a?ca=" + authority.File + "&cert=" + cert + "&key=" + key, addr: "a:6379", tls: true},
		{url: "redis://a?server-name=b", addr: "a:6379", tls: true},
		{url: "redis://a?timeout=700ms&pool-size=7&protocol=2", addr: "a:6379"},
		{
			url:  "redis+sentinel://u:pw@a:1,b/mymaster?db=3&sentinel-username=su&sentinel-password=sp",
			addr: "FailoverClient", user: "u", password: "pw", db: 3,
		},
		{url: "redis+cluster://u:pw@a:1,b", addr: "a:1,b:6379", user: "u", password: "pw"},
		{url: "rediss+cluster://a:1", addr: "a:1", tls: true},
		{url: "rediss+sentinel://a/m", addr: "FailoverClient", tls: true},
	} {
		u, client, err := dial(c.url)
		if err != nil {
			t.Errorf("%s: %v", c.url, err)
			continue
		}
		var addr, user, password string
		var db, retries int
		var honours bool
		switch client := client.(type) {
		case *goredis.Client:
			opt := client.Options()
			addr, user, password, db = opt.Addr, opt.Username, opt.Password, opt.DB
			retries, honours = opt.MaxRetries, opt.ContextTimeoutEnabled
			if strings.Contains(c.url, "timeout=") &&
				(opt.DialTimeout != 525*time.Millisecond || opt.PoolSize != 7 || opt.Protocol != 2) {
				t.Errorf("%s: options %+v", c.url, opt)
			}
		case *goredis.ClusterClient:
			opt := client.Options()
			addr, user, password = strings.Join(opt.Addrs, ","), opt.Username, opt.Password
			retries, honours = opt.MaxRetries, opt.ContextTimeoutEnabled
		}
		if addr != c.addr || user != c.user || password != c.password || db != c.db || retries > 0 || !honours {
			t.Errorf("%s: addr %q, user %q, password %q, db %d, retries %d, contexts %v",
				c.url, addr, user, password, db, retries, honours)
		}
		if (u.TLS != nil) != c.tls || u.Options.Get("prefix") != c.prefix {
			t.Errorf("%s: TLS %v, prefix %q", c.url, u.TLS != nil, u.Options.Get("prefix"))
		}
		client.Close()
	}
}

// An invalid URL is refused before any dial, with a suggestion.
func TestBadURLs(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]string{
		"redis://":                           "no host: write redis://localhost:6379",
		"redis:///0":                         "no host: write redis://localhost:6379",
		"redis://?prefix=a":                  "no host",
		"redis://u:secret@":                  "no host",
		"redis://u:secret@/1":                "no host",
		"redis://:6379":                      "no host before the port",
		"redis://a:1,":                       "no host",
		"rediss+cluster://":                  "no host: write rediss+cluster://localhost:6379",
		"redis+sentinel:///m":                "no host: write redis+sentinel://localhost:26379",
		"redis://a:1,b:2":                    "redis+sentinel or redis+cluster",
		"redis://a:0":                        "port",
		"redis://a:65536":                    "port",
		"redis://a:port":                     "port",
		"redis://a b":                        "host",
		"redis://a:1:2":                      "host",
		"redis://%zz":                        "host",
		"redis://:secret%@a":                 "write %25",
		"redis://:sec/ret@a:1":               "write %2F",
		"redis://:sec?ret@a:1":               "%3F",
		"redis://:sec#ret@a:1":               "write %23",
		"redis://:secret@a:1/x":              "database",
		"redis://a/-1":                       "database",
		"redis://a/1/2":                      "database",
		"redis://:secret@a?what=7":           "unknown option \"what\"; the options are prefix, pool-size",
		"redis://a?key_prefix=x":             "unknown option",
		"redis://a?sentinel-password=secret": "unknown option",
		"redis://a?prefix=a&prefix=b":        "2 times",
		"redis://a?timeout=0s":               "timeout",
		"redis://a?timeout=5":                "5s",
		"redis://a?pool-size=0":              "pool-size",
		"redis://a?protocol=4":               "protocol",
		"redis://a?ca=/nowhere":              "ca",
		"redis://a?cert=/nowhere":            "cert and key",
		"redis://a?prefix=%zz":               "option=value",
		"redis+sentinel://a":                 "mymaster",
		"redis+sentinel://a/m?sentinel-password=secret&db=x":                      "database",
		"redis+sentinel://a/m?sentinel-password-file=/nowhere":                    "sentinel-password-file",
		"redis+sentinel://a/m?sentinel-password=secret&sentinel-password-file=/x": "give one of them",
		"redis+cluster://a/1": "database",
		"redis+other://a":     "redis+other",
	} {
		d, err := backend.Open(context.Background(), url)
		switch {
		case !errors.Is(err, backend.ErrInvalidOption) || d != nil:
			t.Errorf("%s: %v, %v", url, d, err)
		case !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "%!"):
			t.Errorf("%s: %v, does not say %q", url, err, want)
		case strings.Contains(err.Error(), "secret"), strings.Contains(err.Error(), "ret@"):
			t.Errorf("%s: the password shows: %v", url, err)
		}
	}
}

// The error of a URL that leads nowhere, or to the wrong place, describes the mistake.
func TestWrongURLs(t *testing.T) {
	t.Parallel()
	authority := testcert.New(t)
	cert, key := authority.Sign(t, "localhost")
	tlsPort := freeport.Addresses(t, 1)[0]
	_, tlsNumber, _ := net.SplitHostPort(tlsPort)
	plain := startServer(t, "--tls-port", tlsNumber, "--tls-cert-file", cert, "--tls-key-file", key,
		"--tls-ca-cert-file", authority.File, "--tls-auth-clients", "no")
	locked := startServer(t, "--requirepass", "secret")
	closed := freeport.Addresses(t, 1)[0]
	silent, err := net.Listen("tcp", "127.0.0.1:0") // no program accepts its connections
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	web := httptest.NewServer(http.NotFoundHandler())
	defer web.Close()
	stranger := testcert.New(t)
	const soon = "?timeout=500ms"
	for url, want := range map[string]struct {
		err  error
		text string
	}{
		"redis://" + closed:                              {backend.ErrUnavailable, "connection refused"},
		"rediss://" + closed:                             {backend.ErrUnavailable, "connection refused"},
		"redis+cluster://" + closed:                      {backend.ErrUnavailable, "connection refused"},
		"redis+sentinel://" + closed + "/m":              {backend.ErrUnavailable, "connection refused"},
		"redis://" + silent.Addr().String() + soon:       {backend.ErrUnavailable, "i/o timeout"},
		"redis://" + web.Listener.Addr().String():        {backend.ErrUnavailable, "HTTP/1.1 400"},
		"rediss://" + plain.addr + soon:                  {backend.ErrUnavailable, "TLS"},
		"rediss+cluster://" + plain.addr + soon:          {backend.ErrUnavailable, "TLS"},
		"redis://" + tlsPort:                             {backend.ErrUnavailable, "write rediss://"},
		"rediss://" + tlsPort + "?server-name=localhost": {backend.ErrMisconfigured, "certificate"},
		"rediss://" + tlsPort + "?ca=" + authority.File:  {backend.ErrMisconfigured, "certificate"},
		"redis://" + tlsPort + "?ca=" + stranger.File:    {backend.ErrMisconfigured, "certificate"},
		"redis://" + plain.addr + "/99":                  {backend.ErrMisconfigured, "database"},
		"redis+cluster://" + plain.addr:                  {backend.ErrMisconfigured, "redis://"},
		"redis+sentinel://" + plain.addr + "/m":          {backend.ErrMisconfigured, "Sentinel"},
		"redis://u:secret2@" + locked.addr:               {backend.ErrMisconfigured, "credentials"},
		"redis://" + locked.addr:                         {backend.ErrMisconfigured, "credentials"},

		// Correct URLs.
		"redis://:secret@" + locked.addr:                                       {nil, ""},
		"rediss://" + tlsPort + "?server-name=localhost&ca=" + authority.File:  {nil, ""},
		"rediss://localhost:" + tlsNumber + "?protocol=2&ca=" + authority.File: {nil, ""},
	} {
		d, err := Open(within(t, 30*time.Second), url)
		if want.err == nil {
			if err != nil {
				t.Errorf("%s: %v", url, err)
				continue
			}
			mustRelease(t, d, mustAcquire(t, d, request("n", time.Minute, true)))
			if err := d.Close(within(t, 5*time.Second)); err != nil {
				t.Error(err)
			}
			continue
		}
		switch {
		case !errors.Is(err, want.err) || d != nil:
			t.Errorf("%s: %v, want %v", url, err, want.err)
		case !strings.Contains(err.Error(), want.text) || strings.Contains(err.Error(), "%!"):
			t.Errorf("%s: %v, does not say %q", url, err, want.text)
		case strings.Contains(err.Error(), "secret"):
			t.Errorf("%s: the password shows: %v", url, err)
		}
	}
}

func TestOpen(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, err := backend.Open(within(t, 30*time.Second), "redis://"+s.addr+"/3?prefix=mine:")
	if err != nil {
		t.Fatal(err)
	}
	g, err := d.Acquire(within(t, 30*time.Second), request("n", time.Minute, true))
	if err != nil {
		t.Fatal(err)
	}
	admin := goredis.NewClient(&goredis.Options{Addr: s.addr, DB: 3})
	defer admin.Close()
	if found := keys(t, admin); len(found) != 1 || found[0] != "mine:{n}" {
		t.Errorf("keys: %v", found)
	}
	if err := d.Release(within(t, 30*time.Second), g); err != nil {
		t.Error(err)
	}
	if err := d.Close(within(t, 5*time.Second)); err != nil {
		t.Error(err)
	}
}

// A change of the server's password cuts the connections. A client keeps its hold, and gets further holds, if the file
// has the new password by then.
func TestPasswordFileIsReplaced(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	file := filepath.Join(t.TempDir(), "password")
	admin := s.admin(t)
	change := func(password string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(password+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		for _, command := range [][]any{
			{"ACL", "SETUSER", "ann", "reset", "on", ">" + password, "~*", "&*", "+@all"},
			{"CLIENT", "KILL", "USER", "ann", "SKIPME", "yes"},
		} {
			if err := admin.Do(t.Context(), command...).Err(); err != nil {
				t.Fatal(err)
			}
		}
	}
	change("old")
	d, err := Open(within(t, 30*time.Second), "redis://ann@"+s.addr+"?password-file="+file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close(context.Background()) })
	g := mustAcquire(t, d, request("held", time.Minute, false))
	change("new one")
	eventually(t, "the client is connected with the new password", func() bool {
		return d.Renew(within(t, 5*time.Second), []backend.Grant{g})[0].Err == nil
	})
	mustRelease(t, d, mustAcquire(t, d, request("another", time.Minute, true)))
	mustRelease(t, d, g)
}

// The timeout of a URL bounds the whole first examination, which takes several round trips.
func TestTimeoutOfASlowServer(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	link, err := fault.NewProxy(s.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { link.Close() })
	excused, err := stallmeter.Fairly(time.Second, func() error { // a read has 3 s
		link.Delay(fault.Replies, 800*time.Millisecond)
		d, err := Open(within(t, time.Minute), "redis://"+link.Addr()+"?timeout=30s")
		link.Delay(fault.Replies, 0)
		if err != nil {
			return err
		}
		defer d.Close(within(t, slack))
		mustRelease(t, d, mustAcquire(t, d, request("n", time.Minute, false)))
		return nil
	})
	stallmeter.Report(t, "a first look at a slow server", excused, err)
}
