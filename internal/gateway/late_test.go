package gateway

import (
	"context"
	"encoding/json"
	"net/http"
	"testing"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/redis"
)

// ofRedis is a driver on a server.
func ofRedis(t *testing.T, addr string) *redis.Driver {
	t.Helper()
	client := goredis.NewClient(&goredis.Options{
		Addr: addr, MaxRetries: -1, ContextTimeoutEnabled: true, DialerRetries: 1,
	})
	d := redis.New(client, nil)
	t.Cleanup(func() {
		_ = d.Close(context.WithoutCancel(t.Context()))
		_ = client.Close()
	})
	return d
}

// A request that reaches the lock service late, through a replica that its client no longer uses, neither takes over
// nor ends the hold that the same request got through another replica.
func TestALateRequestChangesNothing(t *testing.T) {
	t.Parallel()
	for what, more := range map[string]string{
		"try": "", "wait": `,"wait":true`, "kept": `,"waitMillis":50000,"keepPlace":true`, "shared": `,"kind":"shared"`,
		"permits": `,"kind":"permits","permits":1,"limit":1`,
		"several": `,"requests":[{"lockKey":"x"},{"lockKey":"y"}]`,
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			server := containers.Redis(t)
			addr, link := server.NewLink(t)
			one, two := lively(t, ofRedis(t, addr)), lively(t, ofRedis(t, server.Addr()))
			rival := ""
			if what == "permits" {
				rival = more
			}
			ask, path := longOf("a", `,"requestId":"req-12345"`+more), acquireX
			if what == "several" {
				path = "/v1/locks:acquireAll"
			}
			// The first replica knows its server, and has a connection.
			one.wants(one.near("/v1/locks/z/acquire", longOf("a", "")), http.StatusOK, "lockToken")

			link.Hold(fault.Requests)
			seen := link.Seen(fault.Requests)
			ctx, hangUp := context.WithCancel(t.Context())
			gone := make(chan reply, 1)
			go func() { gone <- one.call(ctx, http.MethodPost, one.addr, path, ask) }()
			one.await("the request is on its way", func() bool { return link.Seen(fault.Requests) > seen })
			hangUp()
			<-gone
			one.await("the replica has noticed", func() bool {
				one.g.mu.Lock()
				defer one.g.mu.Unlock()
				for _, a := range one.g.attempts {
					if a.polls > 0 {
						return false
					}
				}
				return true
			})

			lock := two.lockIn(two.near(path, ask))
			link.Pass()
			// All calls of the first replica end with its driver.
			one.g.End()
			bounded, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			one.g.Close(bounded)
			d, _ := backend.As[*redis.Driver](one.g.driver)
			if err := d.Close(bounded); err != nil {
				t.Error(err)
			}
			two.wants(two.near(acquireX, longOf("b", rival)), http.StatusConflict, codeHeld)
			two.wants(two.near("/v1/locks/x/renew", released(lock)), http.StatusOK, "validForMillis")
			two.wants(two.near(releaseX, released(lock)), http.StatusOK, "RELEASED")
			two.wants(two.near(acquireX, longOf("b", "")), http.StatusOK, "lockToken")
		})
	}
}

// lockIn returns the first lock in an answer to acquire or acquireAll.
func (l *live) lockIn(got reply) Lock {
	l.Helper()
	var all Locks
	if json.Unmarshal([]byte(got.text), &all) == nil && len(all.Locks) > 0 {
		return all.Locks[0]
	}
	return l.lock(got)
}
