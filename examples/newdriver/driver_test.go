package newdriver

import (
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/testtier"
)

// The service stands behind a proxy, which stops and pauses it, and each client of a broken network has its own proxy.
func TestConformance(t *testing.T) {
	service := &Service{}
	server := httptest.NewServer(service)
	t.Cleanup(server.Close)
	front := proxy(t, strings.TrimPrefix(server.URL, "http://"))
	stop, pass := func(testing.TB) { front.Refuse() }, func(testing.TB) { front.Pass() }
	conformance.Run(t, conformance.Harness{
		New: func(testing.TB) backend.Driver { return New("http://" + front.Addr()) },
		Linked: func(t testing.TB) (backend.Driver, fault.Link) {
			link := proxy(t, front.Addr())
			return New("http://" + link.Addr()), link
		},
		Server: conformance.Server{
			Stop: stop, Start: pass, Restart: func(t testing.TB) { stop(t); pass(t) },
			Pause: func(testing.TB) { front.Hold(fault.Both) }, Resume: pass,
			Evict:       func(_ testing.TB, name string) { service.change(func() { delete(service.entries, name) }) },
			EvictWaiter: func(testing.TB, string) int { return 0 }, // a waiter polls and has no place in the service
			Wipe:        func(testing.TB) { service.change(func() { service.entries, service.counter = nil, 0 }) },
		},
		Leftovers: func() (names []string, err error) {
			service.change(func() {
				for name, e := range service.entries {
					if e.Ends.After(time.Now()) {
						names = append(names, name)
					}
				}
			})
			return names, nil
		},
		Intrude: func(testing.TB, string) {}, // nothing else is in the service
	}, testtier.Some(t, "exclusion", "ownership", "waiting", "ambiguity")...)
}

func (s *Service) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func proxy(t testing.TB, upstream string) *fault.Proxy {
	p, err := fault.NewProxy(upstream)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}
