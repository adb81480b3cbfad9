package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
)

// etcdSystem is an etcd server or a cluster of them, started here, or one server that was running already. Clients use
// the member that leads, which is what is fastest. Its trips are the messages that it received: a unary call is one,
// and so is each message of a stream (watches, keepalives). Its commands are raft entries.
type etcdSystem struct {
	members
	args  []string // of the servers, beside those that every one has
	admin *clientv3.Client
	info  string
}

// startEtcd starts one etcd from PATH, fsync and all, or connects to a running server.
func startEtcd(ctx context.Context, running string) (system, error) {
	s := &etcdSystem{}
	var err error
	if running == "" {
		err = s.startMembers(ctx, 1)
	} else {
		s.addresses = []string{running}
		err = s.connect(ctx)
		if err == nil {
			err = s.checkEmpty(ctx)
		}
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// checkEmpty: every scenario begins with an empty store, and that must not be somebody's data.
func (s *etcdSystem) checkEmpty(ctx context.Context) error {
	resp, err := s.admin.Get(ctx, "\x00", clientv3.WithFromKey(), clientv3.WithCountOnly())
	if err == nil && resp.Count > 0 {
		err = fmt.Errorf("etcd at %s has %d keys, which the benchmark would delete", s.endpoints(), resp.Count)
	}
	return err
}

// startMembers starts a cluster of so many members, with etcd's own settings. Whoever calls it owes close, also after
// an error.
func (s *etcdSystem) startMembers(ctx context.Context, members int) error {
	addrs, err := freeAddrs(2 * members)
	if err != nil {
		return err
	}
	s.addresses = addrs[:members]
	var cluster []string
	for i, peer := range addrs[members:] {
		cluster = append(cluster, fmt.Sprintf("bench%d=http://%s", i, peer))
	}
	for i, peer := range addrs[members:] {
		client, peer := "http://"+s.addresses[i], "http://"+peer
		server, err := startProcess("etcd", func(dir string) []string {
			return append([]string{"--data-dir", dir + "/data", "--log-level", "error", "--name", fmt.Sprint("bench", i),
				"--listen-client-urls", client, "--advertise-client-urls", client,
				"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
				"--initial-cluster", strings.Join(cluster, ",")}, s.args...)
		})
		if err != nil {
			return err
		}
		s.servers = append(s.servers, server)
	}
	return s.connect(ctx)
}

// connect returns once every member follows a leader.
func (s *etcdSystem) connect(ctx context.Context) (err error) {
	if s.admin, err = dialEtcd(clientOptions{addr: s.endpoints()}); err != nil {
		return err
	}
	for i := range s.addresses {
		if err := s.serving(ctx, i); err != nil {
			return err
		}
	}
	return nil
}

// serving returns once a member follows a leader, and answers what only the leader knows.
func (s *etcdSystem) serving(ctx context.Context, member int) error {
	var server *process
	if len(s.servers) > 0 {
		server = s.servers[member]
	}
	err := server.answers(ctx, func(ctx context.Context) error {
		status, err := s.admin.Status(ctx, s.addresses[member])
		if err == nil && status.Leader == 0 {
			err = errors.New("it has no leader")
		}
		if err == nil {
			_, err = s.admin.Get(ctx, "any")
		}
		if err == nil {
			s.info = "etcd " + status.Version
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("etcd at %s: %w", s.addresses[member], err)
	}
	return nil
}

// dialEtcd returns a client with the library's defaults.
func dialEtcd(o clientOptions) (*clientv3.Client, error) {
	config := clientv3.Config{
		Endpoints: strings.Split(o.addr, ","), DialTimeout: 5 * time.Second, Logger: zap.NewNop(),
		Username: o.user, Password: o.user,
	}
	if o.dial != nil {
		config.DialOptions = append(config.DialOptions, grpc.WithContextDialer(
			func(ctx context.Context, addr string) (net.Conn, error) { return o.dial(ctx, "tcp", addr) }))
	}
	return clientv3.New(config)
}

func (s *etcdSystem) name() string    { return "etcd" }
func (s *etcdSystem) version() string { return s.info }
func (s *etcdSystem) addr() string    { return s.leading(s) }

func (s *etcdSystem) leader(ctx context.Context) (int, error) {
	return awaitLeader(ctx, len(s.addresses), func(ctx context.Context, member int) (bool, error) {
		status, err := s.admin.Status(ctx, s.addresses[member])
		return err == nil && status.Leader == status.Header.MemberId, err
	})
}

// counters implements system, from the metrics of all members.
func (s *etcdSystem) counters(ctx context.Context) (counters, error) {
	var sum counters
	for _, address := range s.addresses {
		c, err := etcdCounters(ctx, address)
		if err != nil {
			return counters{}, err
		}
		sum.trips += c.trips
		sum.cpu += c.cpu
		sum.commands = max(sum.commands, c.commands) // every member counts every entry
	}
	return sum, nil
}

func etcdCounters(ctx context.Context, address string) (c counters, err error) {
	err = etcdMetrics(ctx, address, func(name string, v float64) {
		switch {
		case strings.HasPrefix(name, etcdReceived) && !strings.Contains(name, "Maintenance"):
			c.trips += v
		case name == "process_cpu_seconds_total":
			c.cpu = time.Duration(v * float64(time.Second))
		case name == "etcd_server_proposals_committed_total":
			c.commands = v
		}
	})
	return c, err
}

// etcdReceived begins the metric of messages received, by the method.
const etcdReceived = "grpc_server_msg_received_total"

// etcdMetrics reads what a member counts, with the labels in the names.
func etcdMetrics(ctx context.Context, address string, each func(name string, value float64)) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		name, value, _ := strings.Cut(lines.Text(), " ")
		if v, err := strconv.ParseFloat(value, 64); err == nil {
			each(name, v)
		}
	}
	return nil
}

func (s *etcdSystem) reset(ctx context.Context) error {
	_, err := s.admin.Delete(ctx, "\x00", clientv3.WithFromKey())
	return err
}

// erase implements system. A key is the prefix that a library keeps a name's keys under.
func (s *etcdSystem) erase(ctx context.Context, key string) error {
	resp, err := s.admin.Delete(ctx, key, clientv3.WithPrefix())
	if err == nil && resp.Deleted == 0 {
		return fmt.Errorf("there is no key below %q", key)
	}
	return err
}

func (s *etcdSystem) missing(ctx context.Context, keys []string) (int, error) {
	gone := 0
	for _, key := range keys {
		resp, err := s.admin.Get(ctx, key, clientv3.WithPrefix(), clientv3.WithCountOnly())
		if err != nil {
			return 0, err
		}
		if resp.Count == 0 {
			gone++
		}
	}
	return gone, nil
}

func (s *etcdSystem) close() error {
	if s.admin != nil {
		s.admin.Close()
	}
	return closeAll(s.servers)
}
