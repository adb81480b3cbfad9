package server

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// network is what lies between the members. It can cut one off from the others.
type network struct {
	mu    sync.Mutex
	alone string                 // the peer address of the member that is cut off
	conns map[net.Conn][2]string // open ones, by who dialled whom
}

func (n *network) from(own string) func(context.Context, string) (net.Conn, error) {
	return func(ctx context.Context, to string) (net.Conn, error) {
		conn, err := dialTCP(ctx, to)
		n.mu.Lock()
		defer n.mu.Unlock()
		if err == nil && n.alone != "" && (n.alone == own) != (n.alone == to) {
			conn.Close()
			return nil, errors.New("the way is cut")
		}
		if err == nil {
			n.conns[conn] = [2]string{own, to}
		}
		return conn, err
	}
}

func (n *network) cutOff(address string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.alone = address
	for conn, ends := range n.conns {
		if (ends[0] == address) != (ends[1] == address) {
			conn.Close()
			delete(n.conns, conn)
		}
	}
}

func (n *network) heal() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.alone = ""
}

// A leader that is cut off believes for a while that it leads. It promises nothing meanwhile, and tells nothing old.
func TestLeaderThatIsCutOffPromisesNothing(t *testing.T) {
	t.Parallel()
	n := &network{conns: map[net.Conn][2]string{}}
	c := newCluster(t, 3, func(config *Config) { config.PeerDial = n.from(config.PeerListen) })
	for range 3 {
		leader := c.leader()
		x := attach(t, c.servers[leader])
		session := x.open(time.Minute)
		id, token := x.hold(session, "x")
		n.cutOff(c.servers[leader].PeerAddr())
		if !c.servers[leader].Leads() {
			t.Fatal("it knows already: nothing is shown")
		}
		all := []<-chan *lockpb.Reply{
			x.send(keepAliveOf(session)),
			x.send(attachOf(session, "", 0)),
			x.send(holderOf("x")),
			x.send(acquireOf(session, "y", backend.NewRequestID(), false)),
			x.send(releaseOf(session, "x", id, token)),
		}
		for i, box := range all {
			select {
			case r, ok := <-box:
				if ok && (r.Renewed || r.GetError() == nil) {
					t.Errorf("request %d is answered %v", i, r)
				}
			case <-time.After(patience):
				t.Errorf("request %d is not answered", i)
			}
		}
		successor := newCaller(t, func() *client {
			for i, s := range c.servers {
				if i != leader && s.Leads() {
					return attach(t, s)
				}
			}
			return nil
		})
		r := successor.must(holderOf("x"))
		for _, h := range r.GetName().GetHolders() {
			if h.Token != token {
				t.Errorf("x is held with token %d, not %d", h.Token, token)
			}
			successor.must(&lockpb.Request{Call: &lockpb.Request_ForceRelease{ForceRelease: &lockpb.ForceRelease{Name: "x"}}})
		}
		n.heal()
		eventually(t, "all agree on the leader", func() bool {
			for i, s := range c.servers {
				if _, id := s.node.raft.LeaderWithID(); id != c.servers[c.leader()].node.id || s.Leads() != (i == c.leader()) {
					return false
				}
			}
			return true
		})
	}
}
