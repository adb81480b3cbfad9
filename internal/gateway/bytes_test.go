package gateway

import (
	"net/http"
	"net/netip"
	"strings"
	"testing"
)

// Incomplete bodies use no more memory than their budget, and those of one client no more than its share.
func TestBodiesHaveABudget(t *testing.T) {
	t.Parallel()
	b := bodies{of: map[string]int64{}}
	from := func(address string) *http.Request {
		return (&Gateway{}).identified(&http.Request{RemoteAddr: address, ContentLength: -1}, "")
	}
	n := 0
	var out func()
	for {
		o, p := b.enter(from("192.0.2.1:1"))
		if p != nil {
			if p.Status != 429 || p.Quota != "client-bodies" {
				t.Errorf("a refusal is %+v", p)
			}
			break
		}
		n, out = n+1, o
	}
	if n != maxBodiesOfOne/maxBody {
		t.Errorf("one client has %d bodies", n)
	}
	for _, address := range []string{"192.0.2.2:1", "[2001:db8::1]:1", "[2001:db8::2]:1"} {
		for range n {
			if _, p := b.enter(from(address)); p != nil && address != "[2001:db8::2]:1" {
				t.Fatalf("%s is refused: %v", address, p)
			} else if p == nil && address == "[2001:db8::2]:1" {
				t.Fatal("one network of IPv6 has two shares")
			}
		}
	}
	out()
	if _, p := b.enter(from("192.0.2.1:1")); p != nil {
		t.Errorf("there is no room again: %v", p)
	}
}

// Behind a trusted proxy, the client has the address that the proxy sends. The gateway ignores addresses that others
// send.
func TestTrustedProxies(t *testing.T) {
	t.Parallel()
	d, log := logging(t, Options{AccessLog: true, TrustedProxies: []netip.Prefix{
		netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("10.0.0.0/8"),
	}})
	for _, x := range []struct{ from, forwarded, client string }{
		{"127.0.0.1:9", "203.0.113.7", "203.0.113.7"}, {"127.0.0.1:9", "198.51.100.1, 203.0.113.7, 10.1.2.3", "203.0.113.7"},
		{"192.0.2.1:9", "203.0.113.7", "192.0.2.1"}, {"127.0.0.1:9", "", "127.0.0.1"}, {"127.0.0.1:9", "nobody", "127.0.0.1"},
		{"10.1.2.3:9", "2001:db8::1", "2001:db8::/64"},
	} {
		log.Reset()
		d.send(t.Context(), http.MethodGet, "/v1/locks", "", func(r *http.Request) {
			r.RemoteAddr = x.from
			if x.forwarded != "" {
				r.Header.Set("X-Forwarded-For", x.forwarded)
			}
		})
		if !strings.Contains(log.String(), `client="address `+x.client+`"`) {
			t.Errorf("from %s, forwarded for %q: %s", x.from, x.forwarded, log)
		}
	}
	d.granted(d.post(acquireX, acquireOf("a", "")))
	got := d.send(t.Context(), http.MethodPost, atX+"/force-release", `{"reason":"r"}`, func(r *http.Request) {
		r.Header.Set("X-Forwarded-For", "203.0.113.7")
	})
	d.refuses(got, 403, codeDenied)
}
