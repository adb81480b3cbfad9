package main

import (
	"context"

	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

const memberHelp = `Usage: fencelock member list [options]
       fencelock member add ADDRESS [options]
       fencelock member remove NODE [options]

Lists, adds and removes members of a cluster of bundled servers.

list shows the members of the cluster. VOTE is "no" for members that have not caught up yet, and "waits" for members
that wait for approval. ALIVE says whether the member currently answers the leader.

add approves the server at ADDRESS, the HOST:PORT of its --peer-advertise, and adds it to the cluster if it has not
asked to join. The server must have no data yet, and must be started with --join. It gets a vote once it has caught up.
If it is at the address of a member that has lost its data, it takes the place of that member. A server with the
--join-key of the others needs no add.

remove permanently removes the member with the id NODE; then stop it, and delete its data. To replace a lost member,
remove it and add another one. The removal is refused if the remaining members that answer are not a majority.

Options:

{options}

Exit codes:

    0  done
    1  the cluster refuses the change, or has no such member
   64  the command line is invalid
   69  no leader reachable, or no answer in time; the change may have been applied
`

// peer is the printed form of a member of the list.
type peer struct {
	NodeID        string `json:"nodeId"`
	PeerAddress   string `json:"peerAddress"`
	ClientAddress string `json:"clientAddress,omitempty"`
	Voter         bool   `json:"voter"`
	Waits         bool   `json:"waits,omitempty"` // for approval
	Alive         *bool  `json:"alive,omitempty"` // nil: unknown
}

func defineMember(o *options) func([]string) error {
	s := o.administer("member")
	return func(args []string) error {
		return s.runAction(args, "list, add or remove", map[string]action{
			"list":   {nil, s.listMembers},
			"add":    {[]string{"ADDRESS"}, s.addMember},
			"remove": {[]string{"NODE"}, s.removeMember},
		})
	}
}

func (s *lookSettings) listMembers(ctx context.Context, admin *builtin.Admin) error {
	members, err := admin.Members(ctx)
	if err != nil {
		return err
	}
	out := s.newPrinter("NODE", "PEER ADDRESS", "CLIENT ADDRESS", "VOTE", "ALIVE")
	for _, m := range members {
		p := peerOf(m)
		p.Alive = &m.Alive
		err := out.print(p, []string{p.NodeID, p.PeerAddress, p.ClientAddress, p.vote(), yesNo(m.Alive)})
		if err != nil {
			return err
		}
	}
	return out.flush()
}

func (s *lookSettings) addMember(ctx context.Context, admin *builtin.Admin) error {
	m, err := admin.AddMember(ctx, s.args[0])
	if err != nil {
		return err
	}
	p := peerOf(m)
	return s.printOne([]string{"NODE", "PEER ADDRESS", "VOTE"}, p, []string{p.NodeID, p.PeerAddress, p.vote()})
}

func (s *lookSettings) removeMember(ctx context.Context, admin *builtin.Admin) error {
	return admin.RemoveMember(ctx, s.args[0])
}

func peerOf(m *lockpb.Member) *peer {
	return &peer{
		NodeID: m.NodeId, PeerAddress: m.PeerAddress, ClientAddress: m.ClientAddress, Voter: m.Voter, Waits: m.Waits,
	}
}

func (p *peer) vote() string {
	if p.Waits {
		return "waits"
	}
	return yesNo(p.Voter)
}
