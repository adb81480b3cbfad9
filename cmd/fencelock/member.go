package main

import (
	"context"

	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

const memberHelp = `Usage: fencelock member list [options]
       fencelock member add ADDRESS [options]
       fencelock member remove NODE [options]

Looks after the members of a cluster of bundled servers.

list tells who belongs to the cluster. VOTE is no for members that have yet to catch up, and waits for those that nobody
has approved; ALIVE, whether a member answers the leader now.

add approves the server that listens for other members at ADDRESS, HOST:PORT as in its --peer-advertise, and takes it in
if it has not asked for that itself. It must have no data yet, and be started with --join. It gets its vote when it has
caught up. If it is at the address of a member that has lost its data, it takes its place. A server with the --join-key
of the others needs no add.

remove takes the member with the id NODE out for good: stop it, and delete its data. To replace a member that is lost,
remove it and add another one. It is refused if too few of the remaining members answer for a majority.

Options:

{options}

Exit codes:

    0  done
    1  the cluster refuses it, or has no such member
   64  the command line makes no sense
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
