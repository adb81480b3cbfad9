package gateway

import (
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/fencelock/fencelock/internal/listeners"
)

// maxBodies bounds the request bodies in memory, in bytes; maxBodiesOfOne bounds those of one principal.
const (
	maxBodies      = 64 << 20
	maxBodiesOfOne = 16 << 20 // enough for every stream of one HTTP/2 connection
)

// bodies counts the bytes of arriving bodies: the length that the request declares, or else maxBody.
type bodies struct {
	mu   sync.Mutex
	used int64
	of   map[string]int64 // by principal
}

// enter counts the body of r until the caller calls the returned function, or returns the exhausted quota.
func (b *bodies) enter(r *http.Request) (out func(), p *Problem) {
	size := int64(maxBody)
	if n := r.ContentLength; n >= 0 && n < size {
		size = n
	}
	who := principalOf(r)
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.of[who]+size > maxBodiesOfOne:
		return nil, quota("client-bodies", "at most "+strconv.Itoa(maxBodiesOfOne)+" bytes of bodies of one client are on "+
			"their way")
	case b.used+size > maxBodies:
		return nil, quota("bodies", "at most "+strconv.Itoa(maxBodies)+" bytes of bodies are in flight")
	}
	b.used += size
	b.of[who] += size
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.used -= size
		if b.of[who] -= size; b.of[who] == 0 {
			delete(b.of, who)
		}
	}, nil
}

// forwarded returns r as the client sent it if r comes through a trusted proxy: with the client's address, and without
// the proxy's certificate, which is not a credential of the client.
func (g *Gateway) forwarded(r *http.Request) *http.Request {
	host := listeners.HostOf(r.RemoteAddr)
	if !listeners.Trusted(host, g.o.TrustedProxies) {
		return r
	}
	hops := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
	for i := len(hops) - 1; i >= 0 && listeners.Trusted(host, g.o.TrustedProxies); i-- {
		hop := strings.TrimSpace(hops[i])
		if net.ParseIP(hop) == nil {
			break
		}
		host = hop
	}
	if host == listeners.HostOf(r.RemoteAddr) {
		return r
	}
	of := *r
	of.RemoteAddr, of.TLS = net.JoinHostPort(host, "0"), nil
	return &of
}
