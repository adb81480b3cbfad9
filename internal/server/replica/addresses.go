package replica

// The addresses of members that have moved. Only a leader records a new address in the log, and if most members have
// moved there can be no leader before they find each other. So while nobody leads, each member asks at the addresses
// that it knows who is there, and dials members that have the key at the addresses where it found them. A wrong
// address does no harm: connections name their member.

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

const (
	// lookEvery is the interval at which a member without a leader looks for the others, and lookTimeout the maximum
	// time for that.
	lookEvery   = time.Second
	lookTimeout = time.Second
)

// moved notes that a member answers at an address.
func (p *peerNet) moved(id raft.ServerID, address string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.book == nil {
		p.book = map[raft.ServerID]string{}
	}
	p.book[id] = address
}

// whereabouts returns where a member was found; empty if it was not looked for.
func (p *peerNet) whereabouts(id raft.ServerID) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.book[id]
}

// lookAround looks for the members, whenever nobody leads, until ctx ends.
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

// look asks at all known addresses who is there. If a member answers elsewhere than the log says, it is dialled there
// if it has the key; otherwise this server logs that, once for each.
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
