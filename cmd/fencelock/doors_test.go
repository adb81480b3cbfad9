//go:build unix

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/testtier"
)

// doorCase is a backend, with what a gateway before it can do.
type doorCase struct {
	name     string
	start    func(t *testing.T) (url string)
	fences   bool
	outlives bool   // another replica renews the holds of a dead one
	lacks    string // calls that get status 501; and "replay": its watch polls
}

func doorCases() []doorCase {
	return []doorCase{
		{"redis", func(t *testing.T) string { return "redis://" + containers.Redis(t).Addr() }, false, true, "replay"},
		{"redlock", func(t *testing.T) string {
			var all []string
			for range 3 {
				all = append(all, containers.Redis(t).Addr())
			}
			return "redlock://" + strings.Join(all, ",") + "?trust-fresh=true"
		}, false, true, "shared permits acquireAll list replay force-release"},
		{"etcd", func(t *testing.T) string { return "etcd://" + containers.Etcd(t).Addr() }, true, false, ""},
		{"zookeeper", func(t *testing.T) string {
			return "zk://" + containers.ZooKeeper(t).Addr()
		}, true, false, "acquireAll replay"},
		{"postgres", func(t *testing.T) string {
			url := containers.Postgres(t, containers.Args("-c", "fsync=on")).URL()
			succeed(t, "postgres", "migrate", "--backend", url)
			return url
		}, true, false, ""},
		{"builtin", func(t *testing.T) string {
			_, url := serving(t, "--data-dir", filepath.Join(t.TempDir(), "data"))
			return url
		}, true, true, ""},
	}
}

// Every call before backends of each sort, through two replicas, and what a client sees when the replica dies that was
// granted its lock. Where one replica of a group serves, the two are of different groups.
func TestDoors(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	for _, c := range doorCases() {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			url, key := c.start(t), keyFile(t)
			replica := func(group string) (*program, string) {
				args := []string{"gateway", "--backend", url, "--http-listen", "127.0.0.1:0", "--http-key", key,
					"--replica-group", group}
				if c.fences {
					args = append(args, "--tier", "correctness")
				}
				p := start(t, args...)
				return p, p.await("fencelock: serving HTTP at ")
			}
			if !c.fences {
				start(t, "gateway", "--backend", url, "--http-listen", "127.0.0.1:0", "--tier", "correctness").
					expectExit(exitUsage, "correctness tier")
			}
			d := &doors{doorCalls: doorCalls{t}, c: c}
			d.replica, d.one = replica("one")
			_, d.two = replica("two")
			d.readiness()
			d.handsOver()
			d.knowsKinds()
			d.takesSeveral()
			d.looks()
			d.losesAReplica()
		})
	}
}

// doorCalls are calls about a name, to any door.
type doorCalls struct{ *testing.T }

// post sends a call about a name to a door and checks the status.
func (d doorCalls) post(door, name, call string, body fields, want int) fields {
	d.Helper()
	status, answer := d.send(door, name, call, body)
	if status != want {
		d.Errorf("%s of %s answers %d %v, want %d", call, name, status, answer, want)
	}
	return answer
}

func (d doorCalls) send(door, name, call string, body fields) (int, fields) {
	d.Helper()
	return postTo(d.T, door+"/v1/locks/"+name+"/"+call, body)
}

// doors are two replicas before one backend.
type doors struct {
	doorCalls
	c        doorCase
	replica  *program // at one
	one, two string
}

// doorTTL is as long as ZooKeeper takes it: a busy machine may be slow between two calls. shortTTL is waited for.
const doorTTL, shortTTL = 15_000, 5000 // ms

type fields = map[string]any

// lacks checks that a call that the backend cannot do says so.
func (d *doors) lacks(what string, status int, answer fields) bool {
	d.Helper()
	if !strings.Contains(" "+d.c.lacks+" ", " "+what+" ") {
		return false
	}
	if status != http.StatusNotImplemented || answer["error"] != "UNSUPPORTED" {
		d.Errorf("%s, which the backend cannot do, answers %d %v", what, status, answer)
	}
	return true
}

func ask(owner string, more fields) fields {
	all := fields{"ownerId": owner, "ttlMillis": doorTTL}
	maps.Copy(all, more)
	return all
}

func tokenOf(lock fields) fields { return fields{"lockToken": lock["lockToken"]} }

// readiness checks what /readyz says about the backend.
func (d *doors) readiness() {
	status, ready := call(d.T, http.MethodGet, d.one+"/readyz", "")
	if status != 200 || ready["fencing"] != d.c.fences || ready["holdsOutliveReplica"] != d.c.outlives {
		d.Errorf("readyz: %d %v", status, ready)
	}
}

// handsOver: acquire, conflict, renew, wait and release, each through whichever replica.
func (d *doors) handsOver() {
	first := d.post(d.one, "x", "acquire", ask("a", fields{"requestId": "req-12345"}), 200)
	if _, fenced := first["fencingToken"]; fenced != d.c.fences {
		d.Errorf("granted: %v", first)
	}
	again := d.post(d.one, "x", "acquire", ask("a", fields{"requestId": "req-12345"}), 200)
	if again["lockToken"] != first["lockToken"] {
		d.Errorf("the same request got %v, and before %v", again, first)
	}
	held := d.post(d.two, "x", "acquire", ask("b", nil), 409)
	if held["error"] != "LOCK_ALREADY_HELD" || held["currentOwner"] != "a" {
		d.Errorf("held: %v", held)
	}
	d.post(d.one, "x", "renew", tokenOf(first), 200)
	waiting := make(chan fields, 1)
	go func() {
		defer close(waiting)
		_, answer := d.send(d.two, "x", "acquire", ask("b", fields{"wait": true}))
		waiting <- answer
	}()
	eventually(d.T, "b waits", func() bool {
		_, state := call(d.T, http.MethodGet, d.one+"/v1/locks/x", "")
		return state["waiters"] == 1.0 || d.c.name == "redlock" // which does not report waiters
	})
	d.post(d.two, "x", "release", tokenOf(first), 200)
	second := <-waiting
	if second["ownerId"] != "b" {
		d.Fatalf("the waiter got %v", second)
	}
	if d.c.fences && second["fencingToken"].(float64) <= first["fencingToken"].(float64) {
		d.Errorf("token %v after %v", second["fencingToken"], first["fencingToken"])
	}
	d.post(d.one, "x", "renew", tokenOf(first), 409)
	status, answer := d.send(d.one, "x", "force-release", fields{"reason": "test"})
	if d.lacks("force-release", status, answer) {
		d.post(d.two, "x", "release", tokenOf(second), 200)
		return
	}
	if status != 200 || answer["status"] != "FORCE_RELEASED" {
		d.Errorf("force-release: %d %v", status, answer)
	}
	d.post(d.two, "x", "renew", tokenOf(second), 409)
	status, _ = call(d.T, http.MethodGet, d.one+"/v1/locks/x", "")
	if status != 404 {
		d.Errorf("a lock that was taken away: %d", status)
	}
}

func (d *doors) knowsKinds() {
	for kind, c := range map[string]struct{ mine, other fields }{
		"shared": {fields{"kind": "shared"}, nil},
		"permits": {
			fields{"kind": "permits", "permits": 1, "limit": 2}, fields{"kind": "permits", "permits": 2, "limit": 2},
		},
	} {
		status, one := d.send(d.one, kind, "acquire", ask("a", c.mine))
		if d.lacks(kind, status, one) {
			continue
		}
		two := d.post(d.two, kind, "acquire", ask("b", c.mine), 200)
		d.post(d.two, kind, "acquire", ask("c", c.other), 409)
		d.post(d.two, kind, "release", tokenOf(one), 200)
		d.post(d.one, kind, "release", tokenOf(two), 200)
		all := d.post(d.one, kind, "acquire", ask("c", c.other), 200)
		d.post(d.two, kind, "release", tokenOf(all), 200)
	}
}

func (d *doors) takesSeveral() {
	names := []fields{{"lockKey": "m1"}, {"lockKey": "m2"}}
	status, all := postTo(d.T, d.one+"/v1/locks:acquireAll", ask("a", fields{"requests": names}))
	if d.lacks("acquireAll", status, all) {
		return
	}
	locks, _ := all["locks"].([]any)
	if status != 200 || len(locks) != 2 {
		d.Fatalf("acquireAll: %d %v", status, all)
	}
	d.post(d.two, "m2", "acquire", ask("b", nil), 409)
	for _, l := range locks {
		lock := l.(fields)
		d.post(d.two, lock["lockKey"].(string), "release", tokenOf(lock), 200)
	}
}

// looks: the list, and a watch.
func (d *doors) looks() {
	ctx, cancel := context.WithTimeout(d.Context(), patience)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, d.two+"/v1/locks/seen/watch", nil)
	if err != nil {
		d.Fatal(err)
	}
	watch, err := http.DefaultClient.Do(r)
	if err != nil {
		d.Fatal(err)
	}
	defer watch.Body.Close()
	lock := d.post(d.one, "seen", "acquire", ask("a", nil), 200)
	replay := ""
	if strings.Contains(" "+d.c.lacks+" ", " replay ") {
		replay = "none"
	}
	if got := watch.Header.Get("Fencelock-Replay"); watch.StatusCode != http.StatusOK || got != replay {
		d.Errorf("watch answers %d with Fencelock-Replay %q, want 200 with %q", watch.StatusCode, got, replay)
	}
	lines := bufio.NewScanner(watch.Body)
	for lines.Scan() && lines.Text() != "event: acquired" {
	}
	if lines.Text() != "event: acquired" {
		d.Errorf("the watch shows no acquire: %v", lines.Err())
	}
	status, page := call(d.T, http.MethodGet, d.two+"/v1/locks?prefix=see", "")
	if !d.lacks("list", status, page) {
		locks, _ := page["locks"].([]any)
		if len(locks) != 1 || locks[0].(fields)["lockKey"] != "seen" || locks[0].(fields)["ownerId"] != "a" {
			d.Errorf("the list: %d %v", status, page)
		}
	}
	d.post(d.two, "seen", "release", tokenOf(lock), 200)
}

// losesAReplica: where holds outlive it, the other one renews; elsewhere it says so, releases, and what nobody releases
// ends.
func (d *doors) losesAReplica() {
	kept := d.post(d.one, "kept", "acquire", ask("a", nil), 200)
	given := d.post(d.one, "given", "acquire", ask("a", nil), 200)
	left := d.post(d.one, "left", "acquire", ask("a", fields{"ttlMillis": shortTTL}), 200)
	if err := d.replica.Kill(); err != nil {
		d.Fatal(err)
	}
	if d.c.outlives {
		d.post(d.two, "kept", "renew", tokenOf(kept), 200)
	} else if got := d.post(d.two, "kept", "renew", tokenOf(kept), 503); got["error"] != "HELD_ELSEWHERE" {
		d.Errorf("renew: %v", got)
	}
	d.post(d.two, "given", "release", tokenOf(given), 200)
	d.post(d.two, "given", "acquire", ask("b", nil), 200)
	next := d.post(d.two, "left", "acquire", ask("b", fields{"wait": true}), 200)
	if next["ownerId"] != "b" {
		d.Errorf("after the replica's end: %v", next)
	}
	d.post(d.two, "left", "renew", tokenOf(next), 200)
	d.post(d.two, "left", "renew", tokenOf(left), map[bool]int{true: 409, false: 503}[d.c.outlives])
}

// postTo posts fields.
func postTo(t *testing.T, url string, body fields) (int, fields) {
	t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	return call(t, http.MethodPost, url, string(text))
}
