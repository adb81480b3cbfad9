package server

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/server/replica"
	"github.com/fencelock/fencelock/internal/testcert"
)

func withoutKey(c *Config) { c.JoinKey = nil }

// suffrage reports whether the leader counts s as a voter, and whether it counts s as a member at all.
func (c *cluster) suffrage(s *Server) (votes, in bool) {
	for _, m := range c.servers[c.leader()].replica.Members() {
		if m.ID == s.replica.ID() {
			return m.Voter, true
		}
	}
	return false, false
}

// approve has an operator add the server at an address.
func (c *cluster) approve(address string) {
	c.t.Helper()
	eventually(c.t, "the leader approves "+address, func() bool {
		a := admin{server: c.servers[c.leader()]}
		_, err := a.AddMember(c.t.Context(), &lockpb.AddMemberRequest{PeerAddress: address})
		return err == nil
	})
}

// Any server that reaches the cluster may ask to be a member, and stops nobody by that: three strangers that come and
// go take no majority with them.
func TestStrangersGetNoVote(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, withoutKey)
	var strangers []*Server
	for i := range 3 {
		config := Config{DataDir: t.TempDir(), PeerListen: freeport.Addresses(t, 1)[0], Join: c.configs[0].Join}
		if i == 2 {
			config.JoinKey = []byte("another key of many bytes")
		}
		s := start(t, config)
		strangers = append(strangers, s)
		eventually(t, "a stranger is in, and has caught up", func() bool {
			_, in := c.suffrage(s)
			leader := c.servers[c.leader()]
			return in && leader.replica.CaughtUp(s.replica.ID())
		})
	}
	for _, m := range c.servers[c.leader()].replica.Members() {
		if m.Voter == m.Waits {
			t.Errorf("member with a vote %v that waits %v", m.Voter, m.Waits)
		}
	}
	c.approve(strangers[0].PeerAddr())
	eventually(t, "the approved server votes", func() bool { votes, _ := c.suffrage(strangers[0]); return votes })
	for i, s := range strangers[1:] {
		if votes, _ := c.suffrage(s); votes {
			t.Errorf("stranger %d votes", i+1)
		}
	}
	for _, s := range strangers {
		if err := s.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
	x := newCaller(t, c.connect)
	x.unlock(x.lock("x"))
}

// The cluster bounds the strangers that wait, however many ask at once, each directly and through the test.
func TestCrowdOfStrangersIsBounded(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1, withoutKey)
	const most = 8
	answers := make([]answer, 2*most)
	var asking sync.WaitGroup
	for i := range answers {
		s := start(t, Config{
			PeerListen: "127.0.0.1:0", Join: c.configs[0].Join,
			Timing: replica.Timing{Heartbeat: 5 * time.Second}, MinTTL: time.Minute,
		})
		asking.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			for ctx.Err() == nil && !answers[i].Joined && answers[i].Error == "" {
				answers[i], _ = askedToAdmit(t, c.servers[0], s)
			}
		})
	}
	asking.Wait()
	joined, wait := 0, 0
	for i, a := range answers {
		switch {
		case a.Joined:
			joined++
		case !strings.Contains(a.Error, "wait for approval"):
			t.Errorf("stranger %d is answered %q", i, a.Error)
		}
	}
	for _, m := range c.servers[0].replica.Members() {
		if m.Waits {
			wait++
		}
	}
	if wait != most || joined != most {
		t.Errorf("%d wait, %d were let in", wait, joined)
	}
}

// A server that lost its data, or claims so, takes the place of its predecessor only by consent.
func TestPlaceOfAMemberIsTakenByConsent(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, withoutKey)
	wiped := (c.leader() + 1) % 3
	before := c.servers[wiped].replica.ID()
	c.stop(wiped)
	c.configs[wiped].DataDir = t.TempDir()
	c.start(wiped)
	var a answer
	eventually(t, "a leader answers", func() bool {
		var err error
		a, err = askedToAdmit(t, c.servers[c.leader()], c.servers[wiped])
		return err == nil && (a.Joined || a.Error != "")
	})
	if a.Joined || !strings.Contains(a.Error, "approval") || !strings.Contains(a.Error, before) {
		t.Errorf("it is answered %+v", a)
	}
	c.approve(c.configs[wiped].PeerListen)
	eventually(t, "it votes", func() bool {
		votes, _ := c.suffrage(c.servers[wiped])
		return votes && c.servers[c.leader()].replica.Voters() == 3
	})
}

func TestShortJoinKey(t *testing.T) {
	t.Parallel()
	_, err := Start(t.Context(),
		Config{PeerListen: "127.0.0.1:0", Join: []string{"127.0.0.1:1"}, JoinKey: []byte("short")})
	if err == nil || !strings.Contains(err.Error(), "JoinKey") || strings.Contains(err.Error(), "short") {
		t.Errorf("a short key: %v", err)
	}
}

// hosts is a network in which the members have names.
type hosts struct {
	authority *testcert.Authority
	routes    map[string]string // from a dialled address to its real one
}

func (h *hosts) dial(ctx context.Context, address string) (net.Conn, error) {
	if to := h.routes[address]; to != "" {
		address = to
	}
	return dialTCP(ctx, address)
}

// config is that of a server called host.
func (h *hosts) tls(t *testing.T, host string) *tls.Config {
	pair, err := tls.LoadX509KeyPair(h.authority.Sign(t, host))
	if err != nil {
		t.Fatal(err)
	}
	pool := trust(t, h.authority)
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, RootCAs: pool, ClientCAs: pool,
		ClientAuth: tls.RequireAndVerifyClientCert,
	}
}

// A certificate of the members' authority speaks for the member at its host, and for no other.
func TestCertificateIdentifiesOnlyItsMember(t *testing.T) {
	t.Parallel()
	h := hosts{testcert.New(t), map[string]string{}}
	names := []string{"a.test", "b.test", "c.test"}
	at := freeport.Addresses(t, 4)
	var join []string
	for i, name := range append(names, "d.test") {
		address := name + ":7482"
		h.routes[address] = at[i]
		if i < 3 {
			join = append(join, address)
		}
	}
	i := 0
	c := newCluster(t, 3, func(c *Config) {
		c.PeerListen, c.PeerAdvertise, c.Join = at[i], join[i], join
		c.PeerDial, c.PeerTLS, c.JoinKey = h.dial, h.tls(t, names[i]), nil
		i++
	})
	leader := c.leader()
	follower := (leader + 1) % 3
	eventually(t, "the follower knows its cluster", func() bool { return homeOf(c.servers[follower]) != "" })
	speaks := func(host string, within time.Duration) error {
		conn, err := tls.Dial("tcp", at[follower], func() *tls.Config {
			config := h.tls(t, host)
			config.ServerName = names[follower]
			return config
		}())
		if err != nil {
			return err
		}
		defer conn.Close()
		s := c.servers[follower]
		if _, err := conn.Write(preface('r', homeOf(s), s.replica.ID())); err != nil {
			return err
		}
		conn.SetReadDeadline(time.Now().Add(within))
		if _, err := io.ReadFull(conn, make([]byte, 1)); !os.IsTimeout(err) {
			return err
		}
		return nil // raft waits for what comes
	}
	if err := speaks("d.test", patience); err == nil {
		t.Error("a certificate of no member speaks raft")
	}
	if err := speaks(names[leader], time.Second); err != nil {
		t.Errorf("the certificate of a member: %v", err)
	}

	// A copy of a member, with its id, at the host of another certificate.
	id := c.servers[follower].replica.ID()
	c.stop(follower)
	stolen := t.TempDir()
	if err := os.CopyFS(stolen, withoutSockets{os.DirFS(c.configs[follower].DataDir)}); err != nil {
		t.Fatal(err)
	}
	thief := start(t, Config{
		DataDir: stolen, Moved: true, PeerListen: at[3], PeerAdvertise: "d.test:7482", Join: join,
		PeerDial: h.dial, PeerTLS: h.tls(t, "d.test"),
		Timing: replica.Timing{Heartbeat: 5 * time.Second}, MinTTL: time.Minute,
	})
	if thief.replica.ID() != id {
		t.Fatal("the copy is another member")
	}
	var a answer
	eventually(t, "a leader answers the copy", func() bool {
		var err error
		a, err = askedToAdmit(t, c.servers[c.leader()], thief)
		return err == nil && (a.Joined || a.Error != "")
	})
	if a.Joined || !strings.Contains(a.Error, "approval") {
		t.Errorf("it is answered %+v", a)
	}
}

// A refusal for want of consent also notifies the operator.
func TestAddMemberApproves(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1, withoutKey)
	o := operate(t, c.configs[0].adminListen())
	s := start(t, Config{PeerListen: "127.0.0.1:0", Join: c.configs[0].Join})
	eventually(t, "it waits", func() bool { _, in := c.suffrage(s); return in })
	m, err := o.add(s.PeerAddr())
	if err != nil || m.Waits {
		t.Errorf("added: %v, %v", m, err)
	}
	eventually(t, "it votes", func() bool { votes, _ := c.suffrage(s); return votes })
	eventually(t, "there is a leader", func() bool { // on a slow machine the new voter is late at first
		_, err = o.add("127.0.0.1:1")
		return status.Code(err) != codes.Unavailable
	})
	expectCode(t, err, codes.FailedPrecondition, "127.0.0.1:1")
}
