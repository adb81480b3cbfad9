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

// maxUnapproved is how many members without approval are taken in: each gets all that the cluster keeps.
const maxUnapproved = 8

// admit takes a member in, as leader: one that has no data, or one of its own that has moved. It begins without a vote:
// keepMembers gives it one when it has caught up, so that it cannot stop the others, and is approved. Whoever reaches
// this member may ask, so without approval (of an operator, if consent is given, or by the key) nobody takes the place
// of a member or is believed to be one that has moved.
func (s *Server) admit(r *leadership, m member, consent bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), memberTimeout)
	defer cancel()
	servers := s.node.servers()
	known := slices.IndexFunc(servers, func(server raft.Server) bool { return server.ID == m.ID })
	if known >= 0 && string(servers[known].Address) == m.Peer {
		return s.approve(ctx, r, m.ID, consent)
	}
	// Nothing is changed before the one who answers there has said who it is.
	a, proven, err := s.askForKey(ctx, m.Peer)
	switch {
	case err != nil:
		return fmt.Errorf("cannot reach you at %s: %w", m.Peer, err)
	case a.ID != m.ID:
		return fmt.Errorf("at %s is %s, not %s", m.Peer, a.ID, m.ID)
	case known < 0 && !a.Fresh:
		return errNotFresh
	}
	if err := s.checkLevel(a.Level); err != nil {
		return err
	}
	consent = consent || proven
	before := slices.IndexFunc(servers, func(server raft.Server) bool { return server.ID != m.ID && string(server.Address) == m.Peer })
	switch {
	case consent:
	case before >= 0:
		return s.consentNeeded(m.Peer, fmt.Sprintf("it is to take the place of %s, which was at %[2]s", servers[before].ID, m.Peer))
	case known >= 0 && !certifiedFor(a.certificate, s.peers.hostOf(string(servers[known].Address))):
		return s.consentNeeded(m.Peer, fmt.Sprintf("it says to be %s, which was at %s", m.ID, servers[known].Address))
	case known < 0 && s.unapproved(servers) >= maxUnapproved:
		return fmt.Errorf("%d servers wait for approval already", maxUnapproved)
	}
	if err := s.approve(ctx, r, m.ID, consent); err != nil {
		return err
	}
	if before >= 0 {
		// Its place is taken: it lost its data, and will not come back under its name.
		if err := s.node.await(s.node.raft.RemoveServer(servers[before].ID, 0, memberTimeout)); err != nil {
			return err
		}
	}
	if known < 0 && !consent {
		s.log.Warn("a server asked to be a member: it gets no vote before it is approved",
			"id", m.ID, "address", m.Peer, "approve", "fencelock member add "+m.Peer, "refuse", "fencelock member remove "+string(m.ID))
	}
	// The vote of one that moved goes with it.
	return s.node.await(s.node.raft.AddNonvoter(m.ID, raft.ServerAddress(m.Peer), 0, memberTimeout))
}

// consentNeeded is why a server is not taken in by itself.
func (s *Server) consentNeeded(address, why string) error {
	return fmt.Errorf("%s: that needs approval, by \"fencelock member add %s\" or the join key of the others", why, address)
}

// approve notes that a member may have a vote, if there is consent to that.
func (s *Server) approve(ctx context.Context, r *leadership, id raft.ServerID, consent bool) error {
	if !consent || !s.waits(id) {
		return nil
	}
	if !r.tell(ctx, fact{Approved: id}) {
		return fmt.Errorf("the approval could not be noted: %w", context.Cause(ctx))
	}
	return nil
}

// waits reports whether a server has neither a vote nor the approval to get one.
func (s *Server) waits(id raft.ServerID) bool {
	return !s.node.fsm.approved(id) && !slices.ContainsFunc(s.node.servers(), func(server raft.Server) bool {
		return server.ID == id && server.Suffrage == raft.Voter
	})
}

func (s *Server) unapproved(servers []raft.Server) (n int) {
	for _, server := range servers {
		if s.waits(server.ID) {
			n++
		}
	}
	return n
}

// membersEvery is how often a leader looks after the members.
const membersEvery = time.Second

// keepMembers gives votes to those who have caught up, learns where clients find each member, raises the level, and
// hands the leadership over if this member is in maintenance.
func (r *leadership) keepMembers(ctx context.Context) {
	s := r.server
	tick := time.NewTicker(membersEvery)
	defer tick.Stop()
	for {
		for _, server := range s.node.servers() {
			if err := s.keepMember(ctx, r.term, server); err != nil && ctx.Err() == nil {
				s.log.Debug("member", "id", server.ID, "address", server.Address, "error", err)
			}
		}
		if err := r.raiseLevel(ctx); err != nil && ctx.Err() == nil {
			s.log.Debug("the feature level stays", "error", err)
		}
		if s.inMaintenance() {
			if err := s.handOver(ctx); err != nil && ctx.Err() == nil {
				s.log.Debug("in maintenance, and still leading", "error", err)
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
	if s.waits(server.ID) && len(s.config.JoinKey) > 0 {
		a, proven, err := s.askForKey(ctx, string(server.Address))
		if err == nil && proven && a.ID == server.ID {
			err = s.node.proposeFact(term, fact{Approved: server.ID})
		}
		if err != nil {
			return err
		}
	}
	approved := server.Suffrage == raft.Nonvoter && !s.waits(server.ID)
	if approved && s.node.proof.caughtUp(server.ID, s.node.raft.CommitIndex()) {
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
