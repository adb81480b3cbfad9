package replica

// The addresses of members that have moved. Only a leader records a new address in the log, and if most members have
// moved, they must find each other before one can be elected. So without a leader, each member asks for the identity of
// the servers at all addresses that it knows. It then dials a member that has the key at the address where it found the
// member. A wrong address is harmless, since connections name their member.

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

const (
	// lookEvery is the interval at which a member without a leader looks for the others, and lookTimeout is the maximum
	// time for one search.
	lookEvery   = time.Second
	lookTimeout = time.Second
)

// moved records that a member answers at an address.
func (p *peerNet) moved(id raft.ServerID, address string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.book == nil {
		p.book = map[raft.ServerID]string{}
	}
	p.book[id] = address
}

// whereabouts returns the address at which look found a member; empty if it found none.
func (p *peerNet) whereabouts(id raft.ServerID) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.book[id]
}

// lookAround looks for the members whenever there is no leader, until ctx ends.
func (r *Replica) lookAround(ctx context.Context) {
	if r.peers == nil {
		return
	}
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	told := map[raft.ServerID]string{}
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if leader, _ := r.Leader(); leader == "" && !r.fresh() {
			r.look(ctx, told)
		}
	}
}

// look asks for the identity of the servers at all known addresses. If a member that has the key answers at another
// address than in the log, this server will dial it there. Without the key, this server only logs the address. It logs
// each new address of a member once.
func (r *Replica) look(ctx context.Context, told map[raft.ServerID]string) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	servers := r.servers()
	var (
		mu  sync.Mutex
		all sync.WaitGroup
	)
	for _, address := range r.contacts() {
		all.Go(func() {
			a, proven, err := r.askForKey(ctx, address)
			i := slices.IndexFunc(servers, func(m raft.Server) bool { return m.ID == a.ID && a.ID != r.id })
			if err != nil || i < 0 {
				return
			}
			expected := string(servers[i].Address)
			if proven {
				r.peers.moved(a.ID, address)
			}
			mu.Lock()
			defer mu.Unlock()
			if expected == address || told[a.ID] == address {
				return
			}
			told[a.ID] = address
			if proven {
				r.config.Log.Info("a member is found at another address", "id", a.ID, "expected", expected, "at", address)
				return
			}
			r.config.Log.Warn("there is no leader, and a member is not at the expected address: without the join key "+
				"of all members, it must return to its old address", "id", a.ID, "expected", expected, "answers "+
				"at", address)
		})
	}
	all.Wait()
}
