package containers_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/containers"
)

// etcdWays are the ways to run etcd.
var etcdWays = map[string]func() containers.Option{
	"container": containers.AsContainer,
	"process":   containers.AsProcess,
}

var gateway = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

// call posts a request to etcd's JSON gateway.
func call(ctx context.Context, addr, path string, request map[string]string, answer any) error {
	for key, value := range request {
		request[key] = base64.StdEncoding.EncodeToString([]byte(value))
	}
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := gateway.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(answer)
}

func put(ctx context.Context, addr, key, value string) error {
	return call(ctx, addr, "/v3/kv/put", map[string]string{"key": key, "value": value}, &struct{}{})
}

// get reads through the leader.
func get(ctx context.Context, addr, key string) (value, cluster string, err error) {
	var answer struct {
		Header struct {
			Cluster string `json:"cluster_id"`
		} `json:"header"`
		KVs []struct {
			Value []byte `json:"value"`
		} `json:"kvs"`
	}
	if err := call(ctx, addr, "/v3/kv/range", map[string]string{"key": key}, &answer); err != nil {
		return "", "", err
	}
	if len(answer.KVs) == 1 {
		value = string(answer.KVs[0].Value)
	}
	return value, answer.Header.Cluster, nil
}

// mustGet checks that the first read that the node at addr answers returns want. A restarted node refuses reads, with
// 503, until it has heard from the leader.
func mustGet(t *testing.T, addr, key, want string) (cluster string) {
	t.Helper()
	var got string
	soon(t, fmt.Sprintf("a read of %s at %s", key, addr), func(ctx context.Context) (err error) {
		got, cluster, err = get(ctx, addr, key)
		return err
	})
	if got != want {
		t.Fatalf("%s at %s is %q, want %q", key, addr, got, want)
	}
	return cluster
}

// mustPut writes through the node at addr, repeatedly if necessary: it may have no leader for a moment.
func mustPut(t *testing.T, addr, key, value string) {
	t.Helper()
	soon(t, fmt.Sprintf("a write of %s at %s", key, addr),
		func(ctx context.Context) error { return put(ctx, addr, key, value) })
}

// soon calls f until it succeeds.
func soon(t *testing.T, what string, f func(context.Context) error) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(t.Context(), patience/10)
		err := f(ctx)
		cancel()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: %v", what, err)
		}
	}
}

func TestEtcdKeepsData(t *testing.T) {
	t.Parallel()
	for name, way := range etcdWays {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, other := containers.Etcd(t, way()), containers.Etcd(t, way())
			addr, _ := s.NewLink(t)
			mustPut(t, addr, "k", "v")
			before := mustGet(t, s.Addr(), "k", "v")
			check(t, s.Restart(waiting(t)))
			if after := mustGet(t, addr, "k", "v"); after != before {
				t.Errorf("the cluster's id was %s, is %s after a restart", before, after)
			}
			if id := mustGet(t, other.Addr(), "k", ""); id == before {
				t.Errorf("two servers have the cluster id %s", id)
			}
		})
	}
}

func TestEtcdClusterSurvivesOne(t *testing.T) {
	t.Parallel()
	for name, way := range etcdWays {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := containers.EtcdCluster(t, way())
			leader, term, err := c.Leader(waiting(t), 0)
			check(t, err)
			addrs, links := c.NewLinks(t)
			mustPut(t, addrs[leader], "k", "1")

			check(t, c.Node(leader).Stop(waiting(t)))
			second, term, err := c.Leader(waiting(t), term)
			check(t, err)
			if second == leader {
				t.Fatalf("node %d leads although it was killed", leader)
			}
			mustPut(t, addrs[second], "k", "2")
			check(t, c.Node(leader).Start(waiting(t)))
			mustGet(t, addrs[leader], "k", "2")

			check(t, c.Node(second).Pause(waiting(t)))
			third, _, err := c.Leader(waiting(t), term)
			check(t, err)
			if third == second {
				t.Fatalf("node %d leads although it is frozen", second)
			}
			check(t, c.Node(second).Resume(waiting(t)))
			mustGet(t, addrs[second], "k", "2")

			check(t, c.Restart(waiting(t)))
			for _, addr := range c.Endpoints() {
				mustGet(t, addr, "k", "2")
			}
			links.Refuse()
			if err := put(waiting(t), addrs[0], "k", "3"); err == nil {
				t.Error("a write passed links that refuse")
			}
		})
	}
}

// A leader that is cut off must be replaced, and must neither write nor answer a linearizable read; after Heal it
// must follow.
func TestEtcdClusterPartition(t *testing.T) {
	t.Parallel()
	for name, way := range etcdWays {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := containers.EtcdCluster(t, way())
			leader, term, err := c.Leader(waiting(t), 0)
			check(t, err)
			peer := (leader + 1) % containers.Nodes
			c.Isolate(leader)
			said := c.Said(leader, peer)
			second, _, err := c.Leader(waiting(t), term)
			check(t, err)
			if second == leader {
				t.Fatalf("node %d leads although it is cut off", leader)
			}
			if c.Said(leader, peer) == said {
				t.Error("the isolated leader said nothing")
			}
			mustPut(t, c.Node(second).Addr(), "k", "v")
			ctx, cancel := context.WithTimeout(t.Context(), silence)
			defer cancel()
			if got, _, err := get(ctx, c.Node(leader).Addr(), "k"); err == nil {
				t.Errorf("the isolated node reads %q", got)
			}
			soon(t, "the isolated node sees no leader", func(ctx context.Context) error {
				s, err := c.Status(ctx, leader)
				if err == nil && s.Leader != 0 {
					err = fmt.Errorf("it takes %x for the leader", s.Leader)
				}
				return err
			})
			c.Heal()
			mustGet(t, c.Node(leader).Addr(), "k", "v")
		})
	}
}

// After Cut in one direction, a follower's messages do not reach the leader, but the leader's reach the follower.
func TestEtcdClusterOneWay(t *testing.T) {
	t.Parallel()
	for name, way := range etcdWays {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := containers.EtcdCluster(t, way())
			leader, _, err := c.Leader(waiting(t), 0)
			check(t, err)
			a, b := (leader+1)%containers.Nodes, (leader+2)%containers.Nodes
			addrA := c.Node(a).Addr()
			mustPut(t, addrA, "k", "1")
			c.Cut(a, leader)
			ctx, cancel := context.WithTimeout(t.Context(), 2*silence)
			defer cancel()
			if err := put(ctx, addrA, "k", "2"); err == nil {
				t.Error("a write passed from the follower to the leader")
			}
			// The leader's messages arrive: the follower applies writes of other nodes.
			mustPut(t, c.Node(b).Addr(), "other", "3")
			soon(t, "the follower hears the leader", func(ctx context.Context) error {
				var answer struct {
					KVs []struct {
						Value []byte `json:"value"`
					} `json:"kvs"`
				}
				if err := serializable(ctx, addrA, "other", &answer); err != nil {
					return err
				}
				if len(answer.KVs) != 1 || string(answer.KVs[0].Value) != "3" {
					return fmt.Errorf("it has %v", answer.KVs)
				}
				return nil
			})
			c.Heal()
			mustPut(t, addrA, "k", "4")
		})
	}
}

// serializable reads the node's own copy.
func serializable(ctx context.Context, addr, key string, answer any) error {
	body := fmt.Sprintf(`{"key":%q,"serializable":true}`, base64.StdEncoding.EncodeToString([]byte(key)))
	r, err := http.NewRequestWithContext(ctx, http.MethodPost,
		"http://"+addr+"/v3/kv/range", bytes.NewReader([]byte(body)))
	if err != nil {
		return err
	}
	resp, err := gateway.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(answer)
}
