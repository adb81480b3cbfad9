package replica

// How a member joins a cluster: it makes one alone, is added to one, or makes one together with all of Join. The
// other side, a leader's answer to such a request, is Term.admit in members.go.

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

// retryJoin is the mean time between two attempts to find the cluster.
const retryJoin = 300 * time.Millisecond

// settle makes a member that belongs to no cluster part of one: alone if it has no others to ask, else by asking
// them; and tells the others if it has moved. It returns once this member is in a cluster at its address, or with
// ctx.
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

// moved reports whether the others know this member by another address than its present one.
func (r *Replica) moved() bool {
	return slices.ContainsFunc(r.servers(), func(server raft.Server) bool {
		return server.ID == r.id && string(server.Address) != r.address
	}) && !r.alone()
}

// outside reports whether this member has data of a cluster without it, such as a removed member, or a member that is
// being added.
func (r *Replica) outside() bool {
	servers := r.servers()
	return len(servers) > 0 && !slices.ContainsFunc(servers, func(server raft.Server) bool { return server.ID == r.id })
}

// contacts are the addresses at which others may be.
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

// alone reports whether no other member has a vote.
func (r *Replica) alone() bool {
	servers := r.servers()
	return voters(servers) == 1 && slices.ContainsFunc(servers, func(server raft.Server) bool {
		return server.ID == r.id && server.Suffrage == raft.Voter
	})
}

// joinOrBootstrap asks all the others. Joining comes first: if any of them belongs to a cluster, this member must
// join it, and a second cluster beside it would be a disaster. Only if all are there and no member belongs to a
// cluster, it is made. Since every member makes it of the same addresses, all that do so make the same.
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

// askToJoin asks the member at address, and then the leader that it names.
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

// reply answers the questions of other members.
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

// memberAddresses returns the addresses by which members know each other.
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

// bootstrap makes the servers a cluster. All members that do so do it with the same servers.
func (r *Replica) bootstrap(servers []raft.Server) error {
	err := r.await(r.raft.BootstrapCluster(raft.Configuration{Servers: servers}))
	if errors.Is(err, raft.ErrCantBootstrap) && !r.fresh() {
		return nil // another member was faster, and has told us
	}
	return err
}

// stand makes this member stand for election immediately: a single member need not wait for others.
func (r *Replica) stand() {
	if r.raft.State() != raft.Follower {
		return
	}
	own := raft.ServerAddress(r.address)
	header := raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax, ID: []byte(r.id), Addr: []byte(own)}
	// If it fails, the election comes later anyway.
	_ = r.proof.TimeoutNow(r.id, own, &raft.TimeoutNowRequest{RPCHeader: header}, &raft.TimeoutNowResponse{})
}
