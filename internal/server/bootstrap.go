package server

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/machine"
)

// retryJoin is the mean time between two attempts to find the cluster.
const retryJoin = 300 * time.Millisecond

// settle makes a member that belongs to no cluster part of one: by itself if it has no others to ask, else by asking
// them; and tells the others if it has moved. It returns once this member is in a cluster at its address, or with ctx.
func (s *Server) settle(ctx context.Context) error {
	if s.node.fresh() && len(s.config.Join) == 0 {
		own := raft.Server{ID: s.node.id, Address: raft.ServerAddress(s.peerAddress)}
		if err := s.node.bootstrap([]raft.Server{own}); err != nil {
			return err
		}
	}
	if s.alone() {
		s.node.stand(raft.ServerAddress(s.peerAddress))
	}
	for told := ""; s.node.fresh() || s.moved() || s.outside(); {
		if err := s.joinOrBootstrap(ctx); err != nil && err.Error() != told {
			told = err.Error()
			s.log.Info("not in the cluster yet", "reason", err)
		}
		select {
		case <-time.After(retryJoin/2 + rand.N(retryJoin)):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// moved reports whether the others know this member by another address than it has now.
func (s *Server) moved() bool {
	return slices.ContainsFunc(s.node.servers(), func(server raft.Server) bool {
		return server.ID == s.node.id && string(server.Address) != s.peerAddress
	}) && !s.alone()
}

// outside reports whether this member has data of a cluster without it, as one has that was removed, or that is being
// taken in.
func (s *Server) outside() bool {
	servers := s.node.servers()
	return len(servers) > 0 && !slices.ContainsFunc(servers, func(server raft.Server) bool { return server.ID == s.node.id })
}

// contacts are the addresses at which others may be.
func (s *Server) contacts() []string {
	all := slices.Clone(s.config.Join)
	for _, server := range s.node.servers() {
		if server.ID != s.node.id {
			all = append(all, string(server.Address))
		}
	}
	slices.Sort(all)
	return slices.DeleteFunc(slices.Compact(all), func(address string) bool { return address == s.peerAddress })
}

// alone reports whether nobody else has a vote.
func (s *Server) alone() bool {
	servers := s.node.servers()
	return voters(servers) == 1 && slices.ContainsFunc(servers, func(server raft.Server) bool {
		return server.ID == s.node.id && server.Suffrage == raft.Voter
	})
}

// joinOrBootstrap asks all the others. Joining comes first: while any of them belongs to a cluster, that is the one to
// be in, and a second cluster beside it would be a disaster. Only if all are there and none belongs to one, it is made.
// Since every member makes it of the same addresses, all that do so make the same.
func (s *Server) joinOrBootstrap(ctx context.Context) error {
	own := s.self()
	all := []raft.Server{{ID: own.ID, Address: raft.ServerAddress(own.Peer)}}
	fresh := s.node.fresh()
	var failed error
	for _, address := range s.contacts() {
		a, err := s.askToJoin(ctx, address)
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
	case s.config.BootstrapExpect == 0 || !fresh:
		return failed
	case len(all) < s.config.BootstrapExpect:
		return fmt.Errorf("%d of %d members are there: %w", len(all), s.config.BootstrapExpect, failed)
	}
	slices.SortFunc(all, func(a, b raft.Server) int { return strings.Compare(string(a.ID), string(b.ID)) })
	return s.node.bootstrap(all)
}

// askToJoin asks the member at address, and then the leader that it names.
func (s *Server) askToJoin(ctx context.Context, address string) (answer, error) {
	own := s.self()
	a, err := s.peers.ask(ctx, address, question{Join: &own})
	if err != nil || a.Joined || a.Leader == "" || a.Leader == address {
		return a, err
	}
	if b, err := s.peers.ask(ctx, a.Leader, question{Join: &own}); err == nil && b.Joined {
		return b, nil
	}
	return a, nil
}

func (s *Server) self() member {
	return member{ID: s.node.id, Peer: s.peerAddress, Client: s.advertise, Level: machine.MaxLevel}
}

// reply answers the questions of other members.
func (s *Server) reply(q question) answer {
	leader, _ := s.node.raft.LeaderWithID()
	a := answer{
		member: s.self(), Fresh: s.node.fresh(), Leader: string(leader), Members: s.memberAddresses(),
		Maintenance: s.inMaintenance(),
	}
	if len(s.config.JoinKey) > 0 && len(q.Prove) >= nonceBytes {
		a.Proof = proofOfKey(s.config.JoinKey, q.Prove, a.member)
	}
	r := s.leadership.Load()
	if q.Index && r != nil {
		ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
		defer cancel()
		var err error
		if a.Index, err = r.acknowledged(ctx); err != nil {
			a.Error = err.Error()
		}
	}
	if q.Join != nil && r != nil {
		if err := s.admit(r, *q.Join, false); err != nil {
			a.Error = err.Error()
		} else {
			a.Joined = true
		}
	}
	return a
}
