package replica

// How a member gets into a cluster: it creates a cluster alone, joins a cluster, or creates one together with all
// members in Join. Term.admit in members.go is the leader's side of a join.

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/raft"
)

// retryJoin is the mean time between two attempts to join or create a cluster.
const retryJoin = 300 * time.Millisecond

// settle gets this member into a cluster. Without addresses in Join, the member creates a cluster alone; otherwise it
// asks the others. If the member has moved, settle reports the new address to the others. It returns nil once this
// member is in a cluster at its address, or the cause when ctx ends.
func (r *Replica) settle(ctx context.Context) error {
	if r.fresh() && len(r.config.Join) == 0 {
		own := raft.Server{ID: r.id, Address: raft.ServerAddress(r.address)}
		if err := r.bootstrap([]raft.Server{own}); err != nil {
			return err
		}
	}
	if r.alone() {
		r.stand()
	}
	for told := ""; r.fresh() || r.moved() || r.outside(); {
		if err := r.joinOrBootstrap(ctx); err != nil && err.Error() != told {
			told = err.Error()
			r.config.Log.Info("not in the cluster yet", "reason", err)
		}
		select {
		case <-time.After(retryJoin/2 + rand.N(retryJoin)):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// moved reports whether the configuration has another address of this member than its current address.
func (r *Replica) moved() bool {
	return slices.ContainsFunc(r.servers(), func(server raft.Server) bool {
		return server.ID == r.id && string(server.Address) != r.address
	}) && !r.alone()
}

// outside reports whether this member has data of a cluster that does not include it: it was removed, or it is being
// added.
func (r *Replica) outside() bool {
	servers := r.servers()
	return len(servers) > 0 && !slices.ContainsFunc(servers, func(server raft.Server) bool { return server.ID == r.id })
}

// contacts returns the addresses at which other members may be.
func (r *Replica) contacts() []string {
	all := slices.Clone(r.config.Join)
	for _, server := range r.servers() {
		if server.ID != r.id {
			all = append(all, string(server.Address))
		}
	}
	slices.Sort(all)
	return slices.DeleteFunc(slices.Compact(all), func(address string) bool { return address == r.address })
}

// alone reports whether this member is the only voter.
func (r *Replica) alone() bool {
	servers := r.servers()
	return voters(servers) == 1 && slices.ContainsFunc(servers, func(server raft.Server) bool {
		return server.ID == r.id && server.Suffrage == raft.Voter
	})
}

// joinOrBootstrap asks all others to let this member join. If any of them belongs to a cluster, this member must join
// that cluster and must never create a second one. It creates a cluster only if enough members answer and none belongs
// to a cluster. All members that create the cluster do so with the same servers, so they create the same cluster.
func (r *Replica) joinOrBootstrap(ctx context.Context) error {
	own := r.self()
	all := []raft.Server{{ID: own.ID, Address: raft.ServerAddress(own.Peer)}}
	fresh := r.fresh()
	var failed error
	for _, address := range r.contacts() {
		a, err := r.askToJoin(ctx, address)
		switch {
		case err != nil:
			failed = err
			continue
		case a.Joined:
			return nil
		case a.Error != "":
			failed = fmt.Errorf("member %s: %s", address, a.Error)
		}
		fresh = fresh && a.Fresh
		all = append(all, raft.Server{ID: a.ID, Address: raft.ServerAddress(address)})
	}
	switch {
	case r.config.BootstrapExpect == 0 || !fresh:
		return failed
	case len(all) < r.config.BootstrapExpect:
		return fmt.Errorf("%d of %d members are there: %w", len(all), r.config.BootstrapExpect, failed)
	}
	slices.SortFunc(all, func(a, b raft.Server) int { return strings.Compare(string(a.ID), string(b.ID)) })
	return r.bootstrap(all)
}

// askToJoin asks the member at address to let this member join, and then the leader that the member names.
func (r *Replica) askToJoin(ctx context.Context, address string) (answer, error) {
	own := r.self()
	a, err := r.peers.ask(ctx, address, question{Join: &own})
	if err != nil || a.Joined || a.Leader == "" || a.Leader == address {
		return a, err
	}
	if b, err := r.peers.ask(ctx, a.Leader, question{Join: &own}); err == nil && b.Joined {
		return b, nil
	}
	return a, nil
}

func (r *Replica) self() member {
	return member{
		ID: r.id, Peer: r.address, Client: r.config.Client, Level: r.level(), MaxTTL: r.MaxTTL(), Start: r.start,
	}
}

// reply answers a question of another member.
func (r *Replica) reply(q question) answer {
	leader, _ := r.raft.LeaderWithID()
	a := answer{
		member: r.self(), Fresh: r.fresh(), Leader: string(leader), Members: r.memberAddresses(),
		Maintenance: r.InMaintenance(),
	}
	r.prove(&a, q)
	if q.Starting != nil {
		r.noteKnown()
		r.object(&a, q.Starting, r.stores.known, r.servers())
	}
	t := r.serving.Load()
	if q.Index && t != nil {
		ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
		defer cancel()
		var err error
		if a.Index, err = t.acknowledged(ctx); err != nil {
			a.Error = err.Error()
		}
	}
	if q.Join != nil && t != nil {
		if err := t.admit(*q.Join, false); err != nil {
			a.Error = err.Error()
		} else {
			a.Joined = true
		}
	}
	return a
}

// memberAddresses returns the addresses of the members in the latest configuration.
func (r *Replica) memberAddresses() (all []string) {
	for _, server := range r.servers() {
		all = append(all, string(server.Address))
	}
	return all
}

// fresh reports whether this member belongs to no cluster yet.
func (r *Replica) fresh() bool { return len(r.servers()) == 0 }

// servers returns the latest configuration, committed or not.
func (r *Replica) servers() []raft.Server { return r.raft.GetConfiguration().Configuration().Servers }

func voters(servers []raft.Server) (n int) {
	for _, server := range servers {
		if server.Suffrage == raft.Voter {
			n++
		}
	}
	return n
}

// bootstrap creates a cluster of servers. All members that create it must pass the same servers.
func (r *Replica) bootstrap(servers []raft.Server) error {
	err := r.await(r.raft.BootstrapCluster(raft.Configuration{Servers: servers}))
	if errors.Is(err, raft.ErrCantBootstrap) && !r.fresh() {
		return nil // another member was faster, and has sent us the configuration
	}
	return err
}

// stand makes this member stand for election immediately: a single member does not have to wait for others.
func (r *Replica) stand() {
	if r.raft.State() != raft.Follower {
		return
	}
	own := raft.ServerAddress(r.address)
	header := raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax, ID: []byte(r.id), Addr: []byte(own)}
	// If it fails, the election comes later anyway.
	_ = r.proof.TimeoutNow(r.id, own, &raft.TimeoutNowRequest{RPCHeader: header}, &raft.TimeoutNowResponse{})
}
