package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"
)

func startHTTPRedis(life *scope) *system {
	return gateway(life, startRedis(life), buildFencelock(life), "redis://", ourRedis().open)
}

func startHTTPBuiltin(life *scope) *system {
	binary := buildFencelock(life)
	s := fencelockMembers(life, binary, 1, false)
	return gateway(life, s, binary, "fencelock://", fencelockPeer(ours, s).open)
}

// startHTTPEtcd has etcd's own JSON gateway as a peer: locks over HTTP without another program.
func startHTTPEtcd(life *scope) *system {
	s := gateway(life, startEtcd(life), buildFencelock(life), "etcd://", etcdPeers(nil)[2].open)
	s.reset = func(*scope) {} // the gateway would notice that the service has lost its history
	s.peers = append(s.peers, peer{name: "etcd's JSON gateway", role: rolePeer, open: openEtcdJSON})
	return s
}

// gateway puts a gateway before a service, to compare HTTP with the SDK on the same server. The CPU of the gateway
// counts as the server's.
func gateway(life *scope, s *system, binary, scheme string, sdk func(*client, clientOptions) lock) *system {
	addr := life.addrs(1)[0]
	server := life.process(binary, func(string) []string {
		return []string{"gateway", "--backend", scheme + s.addr(), "--http-listen", addr}
	})
	life.must(server.answers(life.ctx, func(ctx context.Context) error {
		return exchange(ctx, http.DefaultClient, http.MethodGet, "http://"+addr+"/readyz", nil, nil)
	}))
	s.name, s.servers, s.door = "http", append(s.servers, server), "http://"+addr
	s.peers = []peer{
		{name: "SDK", role: roleFloor, open: sdk},
		{name: ours + " over HTTP", role: roleOurs, open: func(c *client, o clientOptions) lock {
			return openHTTP(c, o, s.door+"/v1/locks/")
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
	text, _ := json.Marshal(body) // body is ours and cannot fail
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

// openEtcdJSON acquires and releases by v3/lock over HTTP, on one lease for all locks.
func openEtcdJSON(c *client, o clientOptions) lock {
	own := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1024}}
	c.later(own.CloseIdleConnections)
	call := func(ctx context.Context, path string, ask map[string]any, answer any) error {
		return exchange(ctx, own, http.MethodPost, "http://"+o.addr+"/v3/"+path, ask, answer)
	}
	var lease struct {
		ID string `json:"ID"`
	}
	c.must(call(c.ctx, "lease/grant", map[string]any{"TTL": int(o.ttl.Seconds())}, &lease))
	c.later(func() {
		bounded(func(ctx context.Context) error {
			return call(ctx, "lease/revoke", map[string]any{"ID": lease.ID}, nil)
		})
	})
	return func(ctx context.Context, name string) (hold, error) {
		var held struct {
			Key string `json:"key"`
		}
		err := call(ctx, "lock/lock", map[string]any{"name": []byte(name), "lease": lease.ID}, &held)
		return theirs{free: func(ctx context.Context) error {
			return call(ctx, "lock/unlock", map[string]any{"key": held.Key}, nil)
		}}, err
	}
}

// beside measures a caller that acquires and releases one name, first without watchers, then beside a process that
// watches the name over as many connections as the scenario has.
func beside(r *round) {
	c, name := r.client(longTTL), r.name("beside")
	rate := func() float64 {
		m := &meter{}
		m.repeat(func() error { return c.cycle(r.ctx, name) })
		r.measure(m, 3*time.Second)
		return r.s["ops"]
	}
	alone := rate()
	watchers := r.child(part{Door: r.at.door, Name: name, Waiters: r.size})
	watched := rate()
	said, err := watchers.Await(r.ctx, "heard ")
	r.must(err)
	var heard float64
	if _, err := fmt.Sscan(said, &heard); err != nil || heard == 0 {
		r.must(fmt.Errorf("the watchers said %q: %w", said, err))
	}
	r.s["alone"], r.s["watched-x"], r.s["heard"] = alone, watched/alone, heard
}

// watch is the process of the watchers of a name. Each second it prints the kilobytes of events that they got.
func watch(life *scope, door, name string, watchers int) {
	var heard atomic.Int64
	failed := make(chan error, watchers)
	for i := range watchers {
		go func() {
			host := byte(2 + i/500) // one address has a share of connections
			own := &http.Client{Transport: &http.Transport{
				DialContext: (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, host)}}).DialContext,
			}}
			resp, err := own.Get(door + "/v1/locks/" + url.PathEscape(name) + "/watch")
			if err == nil && resp.StatusCode != http.StatusOK {
				err = fmt.Errorf("a watch is answered %s", resp.Status)
			}
			if failed <- err; err != nil {
				return
			}
			text := make([]byte, 4096)
			for err == nil {
				var n int
				n, err = resp.Body.Read(text)
				heard.Add(int64(n))
			}
		}()
	}
	for range watchers {
		life.must(<-failed)
	}
	go func() {
		for range time.Tick(time.Second) {
			fmt.Println("heard", heard.Swap(0)/1000)
		}
	}()
}

const (
	// floodRate is the number of requests per second that a flooding client tries to send: twice the share of one client.
	floodRate = 10_000
	// floodConnections is the number of its connections.
	floodConnections = 32
)

// flood measures callers that acquire and release, first alone, then beside a process at another address that sends
// requests over HTTP.
func flood(r *round) {
	c := r.client(longTTL)
	p99 := func() float64 {
		m := &meter{}
		for range r.size {
			name := r.name("flood")
			m.repeat(func() error { return c.cycle(r.ctx, name) })
		}
		r.measure(m, 3*time.Second)
		return r.s["p99"]
	}
	quiet := p99()
	stranger := r.child(part{Door: r.at.door})
	beside := p99()
	said, err := stranger.Await(r.ctx, "sent ")
	r.must(err)
	var sent, refused float64
	if _, err := fmt.Sscan(said, &sent, &refused); err != nil {
		r.must(fmt.Errorf("the stranger said %q: %w", said, err))
	}
	r.s["quiet-p99"], r.s["p99-x"] = quiet, beside/quiet
	r.s["sent"], r.s["refused"] = sent, 100*refused/max(sent, 1)
}

// strange is the process of the flooding client, which has another address than all other clients and asks for a held
// lock. Each second it prints the number of answers, and the number of those with status 429.
func strange(door string) {
	var sent, refused atomic.Int64
	own := &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: floodConnections,
		DialContext:         (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}).DialContext,
	}}
	ask := func() {
		resp, err := own.Post(door+"/v1/locks/flooded/acquire", "application/json",
			strings.NewReader(`{"ownerId":"stranger","ttlMillis":60000}`))
		if err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		sent.Add(1)
		if resp.StatusCode == http.StatusTooManyRequests {
			refused.Add(1)
		}
	}
	ask() // and holds it from now on
	const pause = time.Second * floodConnections / floodRate
	for range floodConnections {
		go func() {
			for next := time.Now(); ; next = next.Add(pause) {
				time.Sleep(time.Until(next))
				ask()
			}
		}()
	}
	go func() {
		for range time.Tick(time.Second) {
			fmt.Println("sent", sent.Swap(0), refused.Swap(0))
		}
	}()
}
