package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hashicorp/raft"
)

// memberTimeout bounds one change of the configuration.
const memberTimeout = 5 * time.Second

// errNotFresh is why a server with data is not taken in. It has voted and acknowledged in another company, and may have
// been one of the majority that the cluster has gone on without: what it brings does not fit.
var errNotFresh = errors.New("it has data of a former member or of another cluster: start it with an empty data directory")

// admit takes a member in, as leader: one that has no data, or one of its own that has moved. It begins without a vote,
// so that a member that has yet to catch up cannot stop the others; keepMembers gives it one.
func (s *Server) admit(m member) error {
	ctx, cancel := context.WithTimeout(context.Background(), memberTimeout)
	defer cancel()
	servers := s.node.servers()
	known := slices.IndexFunc(servers, func(server raft.Server) bool { return server.ID == m.ID })
	if known >= 0 && string(servers[known].Address) == m.Peer {
		return nil
	}
	// Nothing is changed before the one who answers there has said who it is.
	a, err := s.peers.ask(ctx, m.Peer, question{})
	switch {
	case err != nil:
		return fmt.Errorf("cannot reach you at %s: %w", m.Peer, err)
	case a.ID != m.ID:
		return fmt.Errorf("at %s is %s, not %s", m.Peer, a.ID, m.ID)
	case known < 0 && !a.Fresh:
		return errNotFresh
	}
	for _, server := range servers {
		if server.ID != m.ID && string(server.Address) == m.Peer {
			// Its place is taken: it lost its data, and will not come back under its name.
			if err := s.node.await(s.node.raft.RemoveServer(server.ID, 0, memberTimeout)); err != nil {
				return err
			}
		}
	}
	// The vote of one that moved goes with it.
	return s.node.await(s.node.raft.AddNonvoter(m.ID, raft.ServerAddress(m.Peer), 0, memberTimeout))
}

// membersEvery is how often a leader looks after the members.
const membersEvery = time.Second

// keepMembers gives votes to those who have caught up, and learns where clients find each member.
func (s *Server) keepMembers(ctx context.Context, term uint64) {
	tick := time.NewTicker(membersEvery)
	defer tick.Stop()
	for {
		for _, server := range s.node.servers() {
			if err := s.keepMember(ctx, term, server); err != nil && ctx.Err() == nil {
				s.log.Debug("member", "id", server.ID, "address", server.Address, "error", err)
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (s *Server) keepMember(ctx context.Context, term uint64, server raft.Server) error {
	if server.ID == s.node.id {
		if string(server.Address) == s.peerAddress {
			return nil
		}
		// We moved.
		return s.node.await(s.node.raft.AddVoter(server.ID, raft.ServerAddress(s.peerAddress), 0, memberTimeout))
	}
	if server.Suffrage == raft.Nonvoter && s.node.proof.caughtUp(server.ID, s.node.raft.CommitIndex()) {
		err := s.node.await(s.node.raft.AddVoter(server.ID, server.Address, 0, memberTimeout))
		if err != nil {
			return err
		}
	}
	if _, known := s.node.fsm.client(server.ID); known {
		return nil
	}
	a, err := s.peers.ask(ctx, string(server.Address), question{})
	if err != nil {
		return err
	}
	if a.ID != server.ID {
		return errors.New("another member answers at its address")
	}
	return s.node.proposeFact(term, fact{Member: a.ID, Client: a.Client})
}
