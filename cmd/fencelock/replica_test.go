//go:build unix

package main

import (
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/gateway"
	"github.com/fencelock/fencelock/internal/testtier"
)

// In front of a backend whose holds no other replica renews, one replica serves: a second one refuses to start and names
// the first, or waits for its end. A replica that has lost its lock grants nothing and keeps the holds that it has.
// Elsewhere any number of replicas serves.
func TestOneReplica(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	for _, c := range doorCases() {
		if c.name == "redlock" || c.name == "builtin" { // as redis
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			url, key := c.start(t), keyFile(t)
			begin := func(more ...string) (*program, string) {
				listen := freeport.Addresses(t, 1)[0]
				return start(t, append([]string{
					"gateway", "--backend", url, "--http-listen", listen, "--http-key", key,
				}, more...)...), "http://" + listen
			}
			serves := func(p *program) { p.await("fencelock: serving HTTP at ") }
			first, one := begin()
			serves(first)
			d := doorCalls{t}
			kept := d.post(one, "kept", "acquire", ask("a", nil), http.StatusOK)
			if c.outlives {
				second, two := begin()
				serves(second)
				d.post(two, "kept", "renew", tokenOf(kept), http.StatusOK)
				return
			}
			other := "/" + strconv.Itoa(first.Pid()) + ", serving at " + strings.TrimPrefix(one, "http://")
			refused, _ := begin("--replica-wait", "0s")
			refused.expectExit(exitHeld, "another replica serves: gateway ", other, "The "+c.name+" backend ties a hold to",
				"Redis or the bundled server")
			for _, call := range []string{"acquire", "force-release"} {
				body := fields{"ownerId": "a", "ttlMillis": doorTTL}
				if call == "force-release" {
					body = fields{"reason": "test"}
				}
				if got := d.post(one, "fencelock%20gateway", call, body, http.StatusBadRequest); got["error"] != "INVALID_NAME" {
					t.Errorf("%s of the lock of replicas: %v", call, got)
				}
			}

			second, two := begin()
			eventually(t, "the second replica waits", func() bool {
				return strings.Contains(second.Stderr(), "this one waits for its end")
			})
			status, ready := call(t, http.MethodGet, two+"/readyz", "")
			detail, _ := ready["detail"].(string)
			if status != http.StatusServiceUnavailable || !strings.Contains(detail, other) {
				t.Errorf("a replica that waits for another one: readyz %d %v", status, ready)
			}
			first.terminate()
			serves(second)
			d.post(two, "kept", "release", tokenOf(kept), http.StatusOK)

			kept = d.post(two, "kept", "acquire", ask("b", nil), http.StatusOK)
			third, three := begin()
			eventually(t, "the third replica waits", func() bool {
				return strings.Contains(third.Stderr(), "this one waits for its end")
			})
			succeed(t, "force-release", gateway.ReplicaLock, "--backend", url, "--reason", "test")
			serves(third)
			eventually(t, "the second replica is not ready", func() bool {
				status, _ := call(t, http.MethodGet, two+"/readyz", "")
				return status == http.StatusServiceUnavailable
			})
			if got := d.post(two, "more", "acquire", ask("b", nil), 503); got["error"] != "UNAVAILABLE" {
				t.Errorf("an acquire at a replica without its lock: %v", got)
			}
			d.post(two, "kept", "renew", tokenOf(kept), http.StatusOK)
			d.post(three, "more", "acquire", ask("b", nil), http.StatusOK)
			third.terminate()
			eventually(t, "the second replica is ready again", func() bool {
				status, _ := call(t, http.MethodGet, two+"/readyz", "")
				return status == http.StatusOK
			})
			d.post(two, "kept", "release", tokenOf(kept), http.StatusOK)
		})
	}
}
