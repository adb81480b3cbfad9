package etcd

import (
	"errors"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/backend"
)

func TestParseURL(t *testing.T) {
	for raw, want := range map[string]struct {
		endpoints      []string
		user, password string
		prefix         string
	}{
		"etcd://a":                     {endpoints: []string{"a:2379"}},
		"etcd://a:1,b:2,[::1]:3/":      {endpoints: []string{"a:1", "b:2", "[::1]:3"}},
		"etcd://u:p%40ss@a:1?prefix=q": {endpoints: []string{"a:1"}, user: "u", password: "p@ss", prefix: "q"},
		"etcds://a,b":                  {endpoints: []string{"https://a:2379", "https://b:2379"}},
	} {
		config, o, err := parseURL(raw)
		if err != nil {
			t.Errorf("%s: %v", raw, err)
			continue
		}
		if !slices.Equal(config.Endpoints, want.endpoints) || config.Username != want.user ||
			config.Password != want.password || o.KeyPrefix != want.prefix {
			t.Errorf("%s: %v %s %s %+v", raw, config.Endpoints, config.Username, config.Password, o)
		}
		if strings.HasPrefix(raw, "etcds") != (config.TLS != nil) {
			t.Errorf("%s: TLS is %v", raw, config.TLS)
		}
	}
	for _, raw := range []string{
		"etcd://", "etcd://a,,b", "etcd://a:0", "etcd://a:99999", "etcd://a:x", "etcd://::1", "etcd://a/path",
		"etcd://a?nosuch=1", "etcd://a?prefix=1&prefix=2", "etcd://a?dial-timeout=-1s", "etcd://a?cert=x",
		"etcd://a?ca=/no/such/file", "etcd://u:secret%zz@a", "http://a", "etcd://a?x=%zz",
	} {
		_, _, err := parseURL(raw)
		if !errors.Is(err, backend.ErrInvalidOption) {
			t.Errorf("%s: %v, want ErrInvalidOption", raw, err)
		} else if strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the message tells the password: %v", raw, err)
		}
	}
}

func TestLeaseDefects(t *testing.T) {
	for version, fixed := range map[string]bool{
		"3.4.23": false, "3.4.38": true, "3.5.0": false, "3.5.22": false, "3.5.23": true, "3.6.4": false, "3.6.5": true,
		"3.6.10": true, "3.7.0": true, "3.7.3-rc.1": true, "4.0.0": true, "3.3.1": false, "": false,
	} {
		if _, ok := leaseDefects(version); ok != fixed {
			t.Errorf("leaseDefects(%q) says fixed: %v, want %v", version, ok, fixed)
		}
	}
}

func FuzzKeysAreInjective(f *testing.F) {
	f.Add("a", "a/b")
	f.Add("a%2Fb", "a/b")
	f.Add("", "..")
	f.Fuzz(func(t *testing.T, a, b string) {
		d := New(nil, nil)
		defer d.stop()
		if back, _, ok := d.nameOf(d.dir(a) + "request"); !ok || back != a {
			t.Errorf("%q comes back as %q", a, back)
		}
		if a != b && (strings.HasPrefix(d.dir(b), d.dir(a)) || d.dir(a) == d.dir(b)) {
			t.Errorf("the directory of %q lies in that of %q", b, a)
		}
		if strings.HasPrefix(b, a) && !strings.HasPrefix(d.dir(b), d.prefix+url.PathEscape(a)) {
			t.Errorf("List(%q) does not find %q", a, b)
		}
	})
}
