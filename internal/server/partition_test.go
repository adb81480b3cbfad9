package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// network is the network between the members. It can cut one off from the others.
type network struct {
	mu    sync.Mutex
	alone string                 // the peer address of the cut-off member
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

// island is a network of which a part, or single ways, can be cut off.
type island struct {
	mu    sync.Mutex
	parts func(ends [2]string) bool // by peer addresses: who dials whom; nil while it is whole
	conns []*ferry
}

type ferry struct {
	net.Conn
	ends [2]string
}

func (i *island) from(own string) func(context.Context, string) (net.Conn, error) {
	return func(ctx context.Context, to string) (net.Conn, error) {
		conn, err := dialTCP(ctx, to)
		if err != nil {
			return nil, err
		}
		f := &ferry{conn, [2]string{own, to}}
		i.mu.Lock()
		defer i.mu.Unlock()
		if i.parts != nil && i.parts(f.ends) {
			conn.Close()
			return nil, errors.New("the way is cut")
		}
		i.conns = append(i.conns, f)
		return conn, nil
	}
}

// cutOff cuts the ways between the members and all others.
func (i *island) cutOff(members ...string) {
	i.cut(func(ends [2]string) bool {
		return slices.Contains(members, ends[0]) != slices.Contains(members, ends[1])
	})
}

func (i *island) cut(parts func(ends [2]string) bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.parts = parts
	for _, f := range i.conns {
		if parts(f.ends) {
			f.Close()
		}
	}
}

func (i *island) heal() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.parts = nil
}

// cutOffHolding cuts the leader off, where a client has a session and holds a name, before it knows.
func (n *network) cutOffHolding(c *cluster, name string) (
	leader int, x *client, session []byte, id string, token uint64,
) {
	for end := time.Now().Add(patience); time.Now().Before(end); n.heal() {
		leader = c.leader()
		x, session, id = attach(c.t, c.servers[leader]), sessionID(), backend.NewRequestID()
		// On a busy machine another one may lead by now.
		r, err := x.within(impatience, openOf(session, callerTTL))
		if err != nil || !r.Renewed {
			continue
		}
		if r, err = x.within(impatience, acquireOf(session, name, id, false)); err != nil {
			continue
		}
		grants := r.GetAcquired().GetGrants()
		if len(grants) == 0 {
			// An earlier attempt may hold it.
			x.try(&lockpb.Request{Call: &lockpb.Request_ForceRelease{ForceRelease: &lockpb.ForceRelease{Name: name}}})
			continue
		}
		n.cutOff(c.servers[leader].PeerAddr())
		if c.servers[leader].Leads() {
			return leader, x, session, id, grants[0].Token
		}
	}
	c.t.Fatal("no leader is cut off that does not know yet")
	return 0, nil, nil, "", 0
}

// A leader that is cut off believes for a while that it leads. Meanwhile it promises nothing, and returns nothing
// stale.
func TestLeaderThatIsCutOffPromisesNothing(t *testing.T) {
	t.Parallel()
	n := &network{conns: map[net.Conn][2]string{}}
	c := newCluster(t, 3, func(config *Config) { config.PeerDial = n.from(config.PeerListen) })
	for round := range 3 {
		name := fmt.Sprint("x/", round)
		leader, x, session, id, token := n.cutOffHolding(c, name)
		all := []<-chan *lockpb.Reply{
			x.send(keepAliveOf(session)),
			x.send(attachOf(session, "", 0)),
			x.send(holderOf(name)),
			x.send(acquireOf(session, "y", backend.NewRequestID(), false)),
			x.send(releaseOf(session, name, id, token)),
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
		r := successor.must(holderOf(name))
		for _, h := range r.GetName().GetHolders() {
			if h.Token != token {
				t.Errorf("%s is held with token %d, not %d", name, h.Token, token)
			}
			successor.must(&lockpb.Request{
				Call: &lockpb.Request_ForceRelease{ForceRelease: &lockpb.ForceRelease{Name: name}},
			})
		}
		n.heal()
		eventually(t, "all agree on the leader", func() bool {
			for i, s := range c.servers {
				if id, _ := s.replica.Leader(); id != c.servers[c.leader()].replica.ID() ||
					s.Leads() != (i == c.leader()) {
					return false
				}
			}
			return true
		})
	}
}
