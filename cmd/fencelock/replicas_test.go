//go:build unix

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/testtier"
)

// balancer sends each request to the next replica, and to the one after that if it cannot be reached, as a load
// balancer does.
type balancer struct {
	doors []string
	next  atomic.Uint64
}

// try sends one request. A status of zero is no answer.
func (b *balancer) try(ctx context.Context, path string, body any) (int, map[string]any) {
	text, err := json.Marshal(body)
	if err != nil {
		return 0, nil
	}
	for range b.doors {
		door := b.doors[b.next.Add(1)%uint64(len(b.doors))]
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, door+path, bytes.NewReader(text))
		if err != nil {
			return 0, nil
		}
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			continue
		}
		var answer map[string]any
		said, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err == nil && json.Unmarshal(said, &answer) == nil {
			return resp.StatusCode, answer
		}
	}
	return 0, nil
}

// belief is the state that the last holder relies on.
type belief struct {
	mu      sync.Mutex
	owner   string
	until   time.Time
	over    bool
	token   float64
	grants  int
	trouble []string
}

// begin notes a grant. A grant that has expired already, because this process stood still, makes nobody a holder: the
// next holder may have begun before.
func (b *belief) begin(owner string, until time.Time, token float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	if !now.Before(until) {
		return
	}
	if !b.over && now.Before(b.until) {
		b.trouble = append(b.trouble,
			fmt.Sprintf("%s holds the lock, and %s does for another %v", owner, b.owner, b.until.Sub(now)))
	}
	if token != 0 && token <= b.token {
		b.trouble = append(b.trouble, fmt.Sprintf("token %v after %v", token, b.token))
	}
	b.owner, b.until, b.over, b.token, b.grants = owner, until, false, token, b.grants+1
}

func (b *belief) renewed(owner string, until time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.owner == owner && until.After(b.until) {
		b.until = until
	}
}

func (b *belief) end(owner string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.owner == owner {
		b.over = true
	}
}

// Two replicas run behind a balancer under contending clients, and the test kills one again and again: no two clients
// hold at once, tokens rise, every client continues, and in the end no hold remains.
func TestReplicasThatAreKilled(t *testing.T) {
	for _, c := range []struct {
		name    string
		ttl     time.Duration
		backend func(t *testing.T) string
	}{
		{"redis", time.Second, func(t *testing.T) string { return "redis://" + containers.Redis(t).Addr() }},
		{"builtin", 3 * time.Second, func(t *testing.T) string {
			_, url := serving(t, "--data-dir", filepath.Join(t.TempDir(), "data"))
			return url
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			between, rounds := 700*time.Millisecond, 4
			if testtier.Wanted() {
				between, rounds = 5*time.Second, 24
			}
			endReplicas(t, c.backend(t), c.ttl, between, rounds, func(p *program) error { return p.Kill() })
		})
	}
}

// Rolling restarts in front of services where only the replica that was granted a hold renews it: a repeated request that
// reaches another replica gets no second hold, any replica releases, and all clients go on.
func TestReplicasThatAreRestarted(t *testing.T) {
	testtier.Only(t)
	t.Parallel()
	for _, c := range doorCases() {
		if c.outlives || c.name == "postgres" { // its container answers too late on a busy machine: see TestDoors
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			endReplicas(t, c.start(t), shortTTL*time.Millisecond, 3*time.Second, 8, func(p *program) error {
				p.terminate()
				return nil
			})
		})
	}
}

// endReplicas has clients contend through two replicas, and ends and restarts one replica at a time.
func endReplicas(t *testing.T, backend string, ttl, between time.Duration, rounds int, endOne func(*program) error) {
	key := keyFile(t)
	addrs := freeport.Addresses(t, 2)
	replica := func(i int) *program {
		p := start(t, "gateway", "--backend", backend, "--http-listen", addrs[i], "--http-key", key,
			"--replica-group", addrs[i])
		p.await("fencelock: serving HTTP at ")
		return p
	}
	replicas := []*program{replica(0), replica(1)}
	b := &balancer{doors: []string{"http://" + addrs[0], "http://" + addrs[1]}}
	held := &belief{}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var clients sync.WaitGroup
	for i := range 4 {
		clients.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				b.cycle(t, ctx, fmt.Sprintf("client-%d", i), fmt.Sprintf("req-%d-%d", i, n), ttl, held)
			}
		})
	}
	for round := range rounds {
		if !sleep(ctx, between) {
			break
		}
		dying := round % 2
		if err := endOne(replicas[dying]); err != nil {
			t.Fatal(err)
		}
		replicas[dying] = replica(dying)
	}
	before := held.count()
	for end := time.Now().Add(patience); held.count() < before+5; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Error("nobody gets the lock any more")
			break
		}
	}
	stop()
	clients.Wait()
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		resp, err := http.Get(b.doors[0] + "/v1/locks/contended")
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusNotFound {
				break
			}
		}
		if time.Now().After(end) {
			t.Fatal("the lock is never free")
		}
	}
	for _, trouble := range held.trouble {
		t.Error(trouble)
	}
	t.Logf("%d grants, %d replicas ended", held.grants, rounds)
}

func (b *belief) count() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.grants
}

func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// cycle acquires, renews once and releases, and repeats what was not answered.
func (b *balancer) cycle(t *testing.T, ctx context.Context, owner, id string, ttl time.Duration, held *belief) {
	const lock = "/v1/locks/contended"
	ask := map[string]any{"ownerId": owner, "ttlMillis": ttl.Milliseconds(), "waitMillis": 2000, "keepPlace": true, "requestId": id}
	until := func(sent time.Time, answer map[string]any) time.Time {
		valid, _ := answer["validForMillis"].(float64)
		return sent.Add(time.Duration(valid) * time.Millisecond)
	}
	var token string
	for token == "" {
		sent := time.Now()
		status, answer := b.try(ctx, lock+"/acquire", ask)
		switch {
		case ctx.Err() != nil:
			return
		case status == http.StatusOK:
			token = answer["lockToken"].(string)
			fence, _ := answer["fencingToken"].(float64)
			held.begin(owner, until(sent, answer), fence)
		case status == http.StatusConflict && answer["error"] == "REQUEST_DONE":
			return
		case status != http.StatusAccepted:
			sleep(ctx, 10*time.Millisecond)
		}
	}
	sent := time.Now()
	if status, answer := b.try(ctx, lock+"/renew", map[string]any{"lockToken": token}); status == http.StatusOK {
		held.renewed(owner, until(sent, answer))
	}
	sleep(ctx, 3*time.Millisecond)
	held.end(owner)
	for patient := time.Now().Add(patience); time.Now().Before(patient); time.Sleep(10 * time.Millisecond) {
		status, answer := b.try(context.WithoutCancel(ctx), lock+"/release", map[string]any{"lockToken": token})
		if status == http.StatusOK || status == http.StatusConflict {
			return
		}
		if status == http.StatusForbidden {
			t.Errorf("release: %v", answer)
			return
		}
	}
	t.Error("a release is never answered")
}
