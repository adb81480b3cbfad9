package containers

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"
)

// EtcdServer is one etcd. Its data survives Restart.
type EtcdServer struct{ *Server }

// Etcd starts an etcd for the test t, and stops it at the end. Every call starts a new server, with its own cluster
// id. The server does not wait for the disk at a commit, since a kill of the server loses no written data. Args are
// those of etcd:
//
//	containers.Etcd(t, containers.Args("--election-timeout", "500", "--heartbeat-interval", "50"))
//
// The image is FENCELOCK_IMAGE_ETCD, by default the official one; it must have /usr/local/bin/etcd. The program is
// etcd.
func Etcd(t testing.TB, opts ...Option) *EtcdServer {
	t.Helper()
	sp := etcdSpec()
	sp.command = append(sp.command, "--listen-client-urls", "http://0.0.0.0:2379")
	sp.process = func(addr, dir string) []string {
		return []string{
			"--data-dir", dir + "/data",
			"--listen-client-urls", "http://" + addr,
			"--listen-peer-urls", "http://127.0.0.1:0", // no node dials it
		}
	}
	// etcd requires an advertised address if its listen address is set. Drivers use their configured addresses.
	sp.args = append(sp.args, "--advertise-client-urls", "http://etcd.invalid:2379")
	return &EtcdServer{run(t, sp, opts, newContainer, newProcess)}
}

// etcdSpec returns the common spec of a single server and a cluster's node. The token determines the cluster's id.
func etcdSpec() spec {
	return spec{
		name:    "etcd",
		image:   "gcr.io/etcd-development/etcd:v3.6.6",
		env:     "FENCELOCK_IMAGE_ETCD",
		port:    "2379/tcp",
		command: []string{"/usr/local/bin/etcd", "--data-dir", "/var/lib/etcd/data"},
		binary:  "etcd",
		args:    []string{"--initial-cluster-token", rand.Text(), "--log-level", "warn", "--unsafe-no-fsync"},
		ready:   etcdReady,
		install: "a Docker engine that can pull gcr.io/etcd-development/etcd, " +
			"or etcd on PATH (https://etcd.io/docs/latest/install)",
	}
}

// etcdClient has no keep-alives: servers come and go, and a kept connection would lead to a former server.
var etcdClient = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

// etcdReady reports whether the server at addr serves linearizable reads: it then has a leader and a majority.
func etcdReady(ctx context.Context, addr string) bool {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/health?exclude=NOSPACE", nil)
	if err != nil {
		return false
	}
	resp, err := etcdClient.Do(r)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return err == nil && resp.StatusCode == http.StatusOK && strings.Contains(string(text), `"health":"true"`)
}

// EtcdStatus is the status that a node reports, even without a majority.
type EtcdStatus struct {
	Member uint64 // its id
	Leader uint64 // the id of the leader that the node knows; 0 without a leader
	Term   uint64 // of raft
}

// etcdStatus reads the variables that a server publishes, so that this package needs no etcd client. They need no
// user, whom a node without a majority could not authenticate.
func etcdStatus(ctx context.Context, addr string) (EtcdStatus, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/debug/vars", nil)
	if err != nil {
		return EtcdStatus{}, err
	}
	resp, err := etcdClient.Do(r)
	if err != nil {
		return EtcdStatus{}, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return EtcdStatus{}, fmt.Errorf("status of etcd at %s: %s", addr, resp.Status)
	}
	var vars struct {
		Raft struct {
			Member string `json:"id"`   // in base 16
			Leader string `json:"lead"` // in base 16
			Term   uint64 `json:"term"`
		} `json:"raft.status"`
	}
	err = json.NewDecoder(resp.Body).Decode(&vars)
	member, err2 := strconv.ParseUint(vars.Raft.Member, 16, 64)
	leader, err3 := strconv.ParseUint(vars.Raft.Leader, 16, 64)
	if err := errors.Join(err, err2, err3); err != nil {
		return EtcdStatus{}, fmt.Errorf("status of etcd at %s: %w", addr, err)
	}
	return EtcdStatus{Member: member, Leader: leader, Term: vars.Raft.Term}, nil
}
