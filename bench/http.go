package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
)

func startHTTPRedis(life *scope) *system {
	return gateway(life, startRedis(life), buildFencelock(life), "redis://", ourRedis().open)
}

func startHTTPBuiltin(life *scope) *system {
	binary := buildFencelock(life)
	s := fencelockMembers(life, binary, 1, false)
	return gateway(life, s, binary, "fencelock://", fencelockPeer(ours, s).open)
}

// gateway puts a gateway before a service: what HTTP costs beside the SDK on the same server. The CPU of the gateway
// counts as the server's.
func gateway(life *scope, s *system, binary, scheme string, sdk func(*client, clientOptions) lock) *system {
	addr := life.addrs(1)[0]
	server := life.process(binary, func(string) []string {
		return []string{"gateway", "--backend", scheme + s.addr(), "--http-listen", addr}
	})
	life.must(server.answers(life.ctx, func(ctx context.Context) error {
		return exchange(ctx, http.DefaultClient, http.MethodGet, "http://"+addr+"/readyz", nil, nil)
	}))
	s.name, s.servers = "http", append(s.servers, server)
	s.peers = []peer{
		{name: "SDK", role: roleFloor, open: sdk},
		{name: ours + " over HTTP", role: roleOurs, open: func(c *client, o clientOptions) lock {
			return openHTTP(c, o, "http://"+addr+"/v1/locks/")
		}},
	}
	return s
}

// openHTTP is a program in any language: it keeps its connections.
func openHTTP(c *client, o clientOptions, locks string) lock {
	own := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1024}}
	c.later(own.CloseIdleConnections)
	return func(ctx context.Context, name string) (hold, error) {
		path := locks + url.PathEscape(name)
		ask := map[string]any{"ownerId": "bench", "ttlMillis": o.ttl.Milliseconds(), "wait": true}
		var held struct {
			LockToken string `json:"lockToken"`
		}
		err := exchange(ctx, own, http.MethodPost, path+"/acquire", ask, &held)
		return theirs{free: func(ctx context.Context) error {
			return exchange(ctx, own, http.MethodPost, path+"/release", held, nil)
		}}, err
	}
}

// exchange sends one request and reads its answer, which must be 200.
func exchange(ctx context.Context, by *http.Client, method, url string, body, answer any) error {
	text, _ := json.Marshal(body) // ours, which can be
	r, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(text))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := by.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	said, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", url, resp.Status, said)
	}
	if err != nil || answer == nil {
		return err
	}
	return json.Unmarshal(said, answer)
}
