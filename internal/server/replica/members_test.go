package replica

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"math"
	"net"
	"os"
	"testing"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/testcert"
)

func TestQuorumWithout(t *testing.T) {
	t.Parallel()
	servers := func(voters ...raft.ServerID) (all []raft.Server) {
		for _, id := range voters {
			all = append(all, raft.Server{ID: id})
		}
		return append(all, raft.Server{ID: "learner", Suffrage: raft.Nonvoter})
	}
	for name, c := range map[string]struct {
		servers []raft.Server
		alive   string
		remove  raft.ServerID
		refused bool
	}{
		"one of three":              {servers("a", "b", "c"), "abc", "c", false},
		"the dead one of three":     {servers("a", "b", "c"), "ab", "c", false},
		"another one of three":      {servers("a", "b", "c"), "ab", "b", true},
		"one of two":                {servers("a", "b"), "ab", "b", false},
		"the dead one of two":       {servers("a", "b"), "a", "b", false},
		"the last one":              {servers("a"), "a", "a", true},
		"one without a vote":        {servers("a", "b", "c"), "ab", "learner", false},
		"one of five with two dead": {servers("a", "b", "c", "d", "e"), "abc", "c", true},
		"a dead one of five":        {servers("a", "b", "c", "d", "e"), "abc", "e", false},
		"one of four with one dead": {servers("a", "b", "c", "d"), "abc", "c", false},
		"the living one of two":     {servers("a", "b"), "a", "a", true},
	} {
		alive := map[raft.ServerID]bool{}
		for _, id := range c.alive {
			alive[raft.ServerID(id)] = true
		}
		if err := checkQuorumWithout(c.servers, c.remove, alive); (err != nil) != c.refused {
			t.Errorf("%s: %v; refused should be %v", name, err, c.refused)
		}
	}
}

// A member that was down knows few of the others, and gets the newer members from them.
func TestNewerMembersAreAskedAbout(t *testing.T) {
	t.Parallel()
	authority := testcert.New(t)
	config := func(host string) *tls.Config {
		pair, err := tls.LoadX509KeyPair(authority.Sign(t, host))
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(authority.File)
		if err != nil {
			t.Fatal(err)
		}
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(text)
		return &tls.Config{
			MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, RootCAs: pool, ClientCAs: pool,
			ClientAuth: tls.RequireAndVerifyClientCert,
		}
	}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nowhere := func() string { return "" }
	known := newPeerNet(&Config{Listener: listener, Advertise: "a.test:7482", TLS: config("a.test"), Log: quiet(t)},
		nowhere)
	known.now.Store(&speaker{nil, func() []string { return nil }, func(question) answer {
		return answer{member: member{ID: "known"}, Members: []string{"a.test:7482", "c.test:7482"}}
	}})
	known.serve()
	away := newPeerNet(&Config{
		Advertise: "b.test:7482", TLS: config("b.test"), Dial: func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", listener.Addr().String())
		},
	}, nowhere)
	away.now.Store(&speaker{members: func() []string { return []string{"a.test:7482", "b.test:7482"} }})
	defer known.serving.Wait()
	defer known.Close()
	defer away.serving.Wait()
	leaf := func(host string) *x509.Certificate { return config(host).Certificates[0].Leaf }
	if err := away.checkCertificate(leaf("c.test")); err == nil {
		t.Error("a member that is not known yet speaks at once")
	}
	eventually(t, "it is asked about", func() bool { return away.checkCertificate(leaf("c.test")) == nil })
	if err := away.checkCertificate(leaf("d.test")); err == nil {
		t.Error("one of which nobody knows speaks")
	}
	if err := away.checkCertificate(nil); err == nil {
		t.Error("one without a certificate speaks")
	}
}

// A member that is removed while the leader examines it does not become a member again, although it had caught up.
func TestNoVoteForARemovedMember(t *testing.T) {
	t.Parallel()
	peers := group(t, 2, onlyOnDemand)
	leader := peers[0]
	term := &Term{replica: leader.Replica, number: leader.elect(t, peers[1])}
	seen := raft.Server{ID: "gone", Address: "nowhere", Suffrage: raft.Nonvoter}
	leader.State.mu.Lock()
	leader.State.facts.Approved = map[raft.ServerID]bool{seen.ID: true}
	leader.State.mu.Unlock()
	leader.proof.acknowledge(seen.ID, term.number, progress{index: math.MaxUint64})
	if err := term.keepMember(t.Context(), seen); !errors.Is(err, ErrNoMember) {
		t.Errorf("keepMember = %v, want ErrNoMember", err)
	}
	if n := len(leader.servers()); n != len(peers) {
		t.Errorf("%d members, want %d", n, len(peers))
	}
}
