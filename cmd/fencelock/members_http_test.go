//go:build unix

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/testtier"
)

// Every member answers over HTTP, whoever leads; when the leader is killed holds stay, and waits are served.
func TestMembersAnswer(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	peers, key := freeport.Addresses(t, 3), keyFile(t)
	var members []*program
	var clients, doors []string
	for _, peer := range peers {
		members = append(members, start(t, "serve", "--data-dir", filepath.Join(t.TempDir(), "data"),
			"--listen", "127.0.0.1:0", "--peer-listen", peer, "--join", strings.Join(peers, ","),
			"--bootstrap-expect", "3", "--http-listen", "127.0.0.1:0", "--http-key", key))
	}
	for _, m := range members {
		clients = append(clients, m.await("fencelock: serving clients at "))
		doors = append(doors, m.await("fencelock: serving HTTP at "))
	}
	d := doorCalls{t}
	leader := -1
	eventually(t, "a leader that all follow", func() bool {
		p := start(t, "status", "--backend", "fencelock://"+strings.Join(clients, ","), "--json")
		leader = -1
		for _, m := range objects[member](t, p.output()) {
			for i, address := range clients {
				if m.Role == roleLeader && m.Address == address {
					leader = i
				}
			}
		}
		return leader >= 0
	})
	for _, door := range doors {
		eventually(t, "the member is ready", func() bool {
			status, _ := call(t, http.MethodGet, door+"/readyz", "")
			return status == 200
		})
	}
	follower, other := doors[(leader+1)%3], doors[(leader+2)%3]

	lock := d.post(follower, "x", "acquire", ask("a", fields{"requestId": "req-1"}), 200)
	d.post(doors[leader], "x", "renew", tokenOf(lock), 200)
	again := d.post(other, "x", "acquire", ask("a", fields{"requestId": "req-1"}), 200)
	if again["lockToken"] != lock["lockToken"] {
		t.Errorf("the same request at another member got %v, want %v", again, lock)
	}
	d.post(follower, "x", "release", tokenOf(lock), 200)

	lock = d.post(follower, "y", "acquire", ask("a", fields{"ttlMillis": 600_000}), 200)
	wait := ask("b", fields{"waitMillis": 1000, "keepPlace": true, "requestId": "req-b"})
	if status, _ := d.send(other, "y", "acquire", wait); status != 202 {
		t.Errorf("a wait: %d", status)
	}
	for _, door := range doors {
		pageCounts(t, door, func() { d.send(other, "y", "acquire", wait) })
	}
	if err := members[leader].Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the hold is renewed under the next leader", func() bool {
		status, _ := d.send(follower, "y", "renew", tokenOf(lock))
		return status == 200
	})
	eventually(t, "it is released", func() bool {
		status, _ := d.send(other, "y", "release", tokenOf(lock))
		return status == 200
	})
	var next fields
	eventually(t, "the waiter gets it", func() bool {
		status := 0
		status, next = d.send(other, "y", "acquire", wait)
		return status == 200
	})
	if next["fencingToken"].(float64) <= lock["fencingToken"].(float64) {
		t.Errorf("token %v after %v", next["fencingToken"], lock["fencingToken"])
	}
	d.post(follower, "y", "release", tokenOf(next), 200)
}

// However often a cluster is restored, over HTTP its tokens rise and stay numbers that every language reads exactly.
func TestRestoredTokensOverHTTP(t *testing.T) {
	t.Parallel()
	const most = 1<<53 - 1
	file, dir := filepath.Join(t.TempDir(), "locks.backup"), filepath.Join(t.TempDir(), "data")
	last := uint64(0)
	for round := range 4 {
		p, url := serving(t, "--data-dir", dir, "--http-listen", "127.0.0.1:0")
		door := p.await("fencelock: serving HTTP at ")
		r, err := http.Post(door+"/v1/locks/x/acquire", "application/json",
			strings.NewReader(fmt.Sprintf(`{"ownerId":"a","ttlMillis":%d,"wait":true}`, doorTTL)))
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r.Body)
		_ = r.Body.Close()
		if err != nil || r.StatusCode != http.StatusOK {
			t.Fatalf("round %d: %d %s (%v)", round, r.StatusCode, text, err)
		}
		var exact struct {
			Token json.Number `json:"fencingToken"`
		}
		var read struct {
			Token float64 `json:"fencingToken"` // as JavaScript and many others do
			Lock  string  `json:"lockToken"`
		}
		if err := errors.Join(json.Unmarshal(text, &exact), json.Unmarshal(text, &read)); err != nil {
			t.Fatal(err)
		}
		token, err := strconv.ParseUint(exact.Token.String(), 10, 64)
		if err != nil || token > most || uint64(read.Token) != token ||
			r.Header.Get("Fencing-Token") != exact.Token.String() {
			t.Errorf("round %d: token %v, in a header %q, read as %v: want a number up to %d", round, exact.Token,
				r.Header.Get("Fencing-Token"), read.Token, uint64(most))
		}
		if token <= last || round > 0 && token <= 1<<32 {
			t.Errorf("round %d: token %d after %d", round, token, last)
		}
		last = token
		doorCalls{t}.post(door, "x", "release", fields{"lockToken": read.Lock}, 200)
		succeed(t, "backup", file, "--backend", url)
		p.terminate()
		dir = filepath.Join(t.TempDir(), "restored")
		succeed(t, "restore", file, "--data-dir", dir, "--closed-for", "100ms")
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
}
