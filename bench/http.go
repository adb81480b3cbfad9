package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
)

// httpSystem is a lock service with a gateway before it: what HTTP costs beside the SDK on the same server. The CPU of
// the gateway counts as the server's.
type httpSystem struct {
	system
	sdk     peer // on the same server
	gateway *process
	door    string
	clean   func() error // deletes the binary
}

func startHTTPRedis(ctx context.Context, running string) (system, error) {
	return startHTTP(ctx, "redis", running)
}
func startHTTPBuiltin(ctx context.Context, _ string) (system, error) {
	return startHTTP(ctx, "builtin", "")
}

// startHTTP puts a gateway before a service, which is redis or builtin: one durable server.
func startHTTP(ctx context.Context, service, running string) (_ system, err error) {
	s := &httpSystem{}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	binary, clean, err := fencelockBinary(ctx)
	if err != nil {
		return s, err
	}
	s.clean = clean
	backend := service + "://"
	if service == "redis" {
		s.system, err = startRedis(ctx, running)
	} else {
		one := &fencelockSystem{size: 1}
		s.system, backend = one, "fencelock://"
		err = one.start(ctx, binary)
	}
	if err != nil {
		return s, err
	}
	for _, p := range s.system.peers() {
		if p.role == roleOurs || service == "builtin" {
			s.sdk = peer{name: "SDK", role: roleFloor, open: p.open}
			break
		}
	}
	addrs, err := freeAddrs(1)
	if err != nil {
		return s, err
	}
	s.door = "http://" + addrs[0]
	s.gateway, err = startProcess(binary, func(string) []string {
		return []string{"gateway", "--backend", backend + s.addr(), "--http-listen", addrs[0]}
	})
	if err != nil {
		return s, err
	}
	return s, s.gateway.answers(ctx, func(ctx context.Context) error {
		return s.exchange(ctx, http.DefaultClient, http.MethodGet, "/readyz", nil, nil)
	})
}

func (s *httpSystem) name() string { return "http" }

func (s *httpSystem) peers() []peer {
	return []peer{s.sdk, {name: ours + " over HTTP", role: roleOurs, open: s.open}}
}

func (s *httpSystem) counters(ctx context.Context) (counters, error) {
	sum, err := s.system.counters(ctx)
	if err != nil {
		return sum, err
	}
	spent, err := s.gateway.cpu()
	sum.cpu += spent
	return sum, err
}

func (s *httpSystem) close() error {
	var errs []error
	if s.gateway != nil {
		errs = append(errs, closeAll([]*process{s.gateway}))
	}
	if s.system != nil {
		errs = append(errs, s.system.close())
	}
	if s.clean != nil {
		errs = append(errs, s.clean())
	}
	return errors.Join(errs...)
}

// exchange sends one request and reads its answer, which must be 200.
func (s *httpSystem) exchange(ctx context.Context, by *http.Client, method, path string, body, answer any) error {
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	r, err := http.NewRequestWithContext(ctx, method, s.door+path, bytes.NewReader(text))
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
		err = fmt.Errorf("%s: %s: %s", path, resp.Status, said)
	}
	if err != nil || answer == nil {
		return err
	}
	return json.Unmarshal(said, answer)
}

// open is a program in any language: it keeps its connections.
func (s *httpSystem) open(o clientOptions) (client, error) {
	own := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1024}}
	return library{end: own.CloseIdleConnections, take: func(ctx context.Context, name string) (hold, error) {
		path := "/v1/locks/" + url.PathEscape(name)
		ask := map[string]any{"ownerId": "bench", "ttlMillis": o.ttl.Milliseconds(), "wait": true}
		var held struct {
			LockToken string `json:"lockToken"`
		}
		err := s.exchange(ctx, own, http.MethodPost, path+"/acquire", ask, &held)
		return untold(func(ctx context.Context) error {
			return s.exchange(ctx, own, http.MethodPost, path+"/release", map[string]any{"lockToken": held.LockToken}, nil)
		}), err
	}}, nil
}
