package replica

// The membership. Only the leader changes it, and every change is an entry of the log.
//
// A server is admitted without a vote. It gets a vote when it is approved (by an operator, or because it knows the key)
// and has caught up. Without approval a stranger could outvote the members, and a server that votes before it has
// caught up could block them.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/machine"
)

// memberTimeout is the maximum time for one change of the configuration.
const memberTimeout = 5 * time.Second

// RefusedError is the reason why an operator's change of the members, or of the leader, was refused: it is impossible
// now, or it would do harm.
type RefusedError struct{ why string }

func (e *RefusedError) Error() string { return e.why }

func refusal(format string, args ...any) error { return &RefusedError{fmt.Sprintf(format, args...)} }

// ErrNoMember is in the chain of errors about an unknown member.
var ErrNoMember = errors.New("there is no member")

func noMember(id raft.ServerID) error { return fmt.Errorf("%w %q", ErrNoMember, id) }

// Member is a member of the cluster.
type Member struct {
	ID, Address string
	Client      string // its address for clients; empty: none, or unknown
	Voter       bool
	Waits       bool // it waits for approval: it has neither a vote nor approval
	Alive       bool // it follows the leader; see Term.Members
}

// Members returns the members of the latest configuration, committed or not. Alive is not set.
func (r *Replica) Members() []Member {
	var all []Member
	for _, m := range r.servers() {
		all = append(all, Member{
			ID: string(m.ID), Address: string(m.Address), Client: r.State.Client(string(m.ID)),
			Voter: m.Suffrage == raft.Voter, Waits: r.waits(m.ID),
		})
	}
	return all
}

// Voters returns the number of members with a vote.
func (r *Replica) Voters() int { return voters(r.servers()) }

// CaughtUp reports whether a follower of this member has all committed entries. Only a leader knows that.
func (r *Replica) CaughtUp(id string) bool {
	return r.proof.caughtUp(raft.ServerID(id), r.raft.CommitIndex())
}

// Members returns the members of the cluster, and sets Alive. The error is ErrNotLeader if this term no longer serves
// clients.
func (t *Term) Members(ctx context.Context) ([]Member, error) {
	alive, err := t.alive(ctx)
	if err != nil {
		return nil, err
	}
	all := t.replica.Members()
	for i := range all {
		all[i].Alive = alive[raft.ServerID(all[i].ID)]
	}
	return all, nil
}

// Add adds the server that answers at an address, with the approval of an operator, and returns its id.
func (t *Term) Add(ctx context.Context, address string) (id string, err error) {
	other, err := t.replica.peers.ask(ctx, address, question{})
	if err != nil {
		return "", refusal("nobody who could join answers at %s, or it belongs to another cluster: %v", address, err)
	}
	switch err := t.admit(other.member, true); {
	case errors.Is(err, errNotFresh):
		return "", refusal("the server at %s: %v", address, err)
	case err != nil:
		return "", changeError(err)
	}
	return string(other.ID), nil
}

// Remove removes a member. If it is this member, Remove transfers the leadership instead and returns an error: the next
// leader can remove the member.
func (t *Term) Remove(ctx context.Context, id string) error {
	r := t.replica
	configuration := r.raft.GetConfiguration()
	if err := r.await(configuration); err != nil {
		return changeError(err)
	}
	servers := configuration.Configuration().Servers
	if !slices.ContainsFunc(servers, func(m raft.Server) bool { return string(m.ID) == id }) {
		return noMember(raft.ServerID(id))
	}
	alive, err := t.alive(ctx)
	if err != nil {
		return err
	}
	if err := checkQuorumWithout(servers, raft.ServerID(id), alive); err != nil {
		return err
	}
	if id == r.ID() {
		if err := r.await(r.raft.LeadershipTransfer()); err != nil {
			return fmt.Errorf("no other member takes over the leadership: %w", err)
		}
		return errors.New("this member has handed leadership over: ask the next leader")
	}
	// With the index, raft refuses the removal if the members have changed since they were counted.
	return changeError(r.await(r.raft.RemoveServer(raft.ServerID(id), configuration.Index(), memberTimeout)))
}

// changeError returns the error of a failed change of the members. It wraps ErrUnknown if the change may still happen.
func changeError(err error) error {
	if errors.Is(err, raft.ErrLeadershipLost) || errors.Is(err, raft.ErrRaftShutdown) {
		return fmt.Errorf("%w: %w", ErrUnknown, err)
	}
	return err
}

// checkQuorumWithout refuses a removal after which the cluster could not work: most of the remaining voters must be
// alive.
func checkQuorumWithout(servers []raft.Server, id raft.ServerID, alive map[raft.ServerID]bool) error {
	voters, there := 0, 0
	for _, m := range servers {
		if m.ID == id || m.Suffrage != raft.Voter {
			continue
		}
		voters++
		if alive[m.ID] {
			there++
		}
	}
	switch {
	case voters == 0:
		return refusal("%s is the last member with a vote", id)
	case there <= voters/2:
		return refusal("without %s there are %d members with a vote, of which %d answer: too few for a majority",
			id, voters, there)
	}
	return nil
}

// aliveEvery is the interval at which alive checks for answers. It waits for aliveTimes heartbeat timeouts.
const (
	aliveEvery = 10 * time.Millisecond
	aliveTimes = 2
)

// alive returns this member and its followers: members that acknowledge a request that was sent after the call of
// alive. Raft sends heartbeats often enough for that.
func (t *Term) alive(ctx context.Context) (map[raft.ServerID]bool, error) {
	r := t.replica
	ctx, cancel := context.WithTimeout(ctx, aliveTimes*r.config.Timing.WithDefaults().Heartbeat)
	defer cancel()
	mark := r.proof.mark()
	tick := time.NewTicker(aliveEvery)
	defer tick.Stop()
	for {
		alive := map[raft.ServerID]bool{r.id: true}
		servers := r.servers()
		for _, m := range servers {
			if r.proof.heardOf(m.ID, t.number, mark) {
				alive[m.ID] = true
			}
		}
		if r.serving.Load() != t {
			return nil, ErrNotLeader
		}
		if len(alive) >= len(servers) {
			return alive, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return alive, nil
		}
	}
}

// errNotFresh is the reason not to admit a server with data. The server has voted and acknowledged entries elsewhere.
// It may have been one of a majority that the cluster has continued without: its data does not match.
var errNotFresh = errors.New(
	"it has data of a former member or of another cluster: start it with an empty data directory")

// maxUnapproved bounds the members without approval: each of them receives all data of the cluster.
const maxUnapproved = 8

// admit adds a member on the leader: a server without data, or a moved member of this cluster. A new member has no
// vote: KeepMembers gives it a vote when it is approved and has caught up. Any server that reaches this member may ask
// to join. So a server needs approval (by an operator, if consent is set, or by the key) to take the place of another
// member. A moved member needs approval, or a certificate that names its old host.
func (t *Term) admit(m member, consent bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), memberTimeout)
	defer cancel()
	r := t.replica
	if r.isMember(m) {
		return t.approve(ctx, m.ID, consent)
	}
	// Do not change the configuration before the server at that address has given its id.
	a, proven, err := r.askForKey(ctx, m.Peer)
	if err != nil {
		return fmt.Errorf("cannot reach you at %s: %w", m.Peer, err)
	}
	if a.ID != m.ID {
		return fmt.Errorf("at %s is %s, not %s", m.Peer, a.ID, m.ID)
	}
	if err := r.checkLevel(a.Level); err != nil {
		return err
	}
	// Admit one server at a time, and check the current members again: another request may have admitted this server, or
	// the last possible unapproved server, in the meantime.
	r.admitting.Lock()
	defer r.admitting.Unlock()
	if r.isMember(m) {
		return t.approve(ctx, m.ID, consent || proven)
	}
	servers := r.servers()
	known := slices.IndexFunc(servers, func(server raft.Server) bool { return server.ID == m.ID })
	if known < 0 && !a.Fresh {
		return errNotFresh
	}
	if known >= 0 && a.Start != "" && r.runs(string(servers[known].Address), m.ID, a.Start) {
		return &RunningError{string(m.ID), string(servers[known].Address)}
	}
	consent = consent || proven
	before := slices.IndexFunc(servers, func(server raft.Server) bool {
		return server.ID != m.ID && string(server.Address) == m.Peer
	})
	switch {
	case consent:
	case before >= 0:
		why := fmt.Sprintf("it is to take the place of %s, which was at %s", servers[before].ID, m.Peer)
		return consentNeeded(m.Peer, why)
	case known >= 0 && !certifiedFor(a.certificate, r.peers.hostOf(string(servers[known].Address))):
		return consentNeeded(m.Peer, fmt.Sprintf("it says to be %s, which was at %s", m.ID, servers[known].Address))
	case known < 0 && r.unapproved(servers) >= maxUnapproved:
		return fmt.Errorf("%d servers wait for approval already", maxUnapproved)
	}
	if before >= 0 {
		if found := r.peers.whereabouts(servers[before].ID); found != "" && found != m.Peer {
			return fmt.Errorf("%s, which was at %s, is at %s and has not said so yet", servers[before].ID, m.Peer, found)
		}
	}
	if err := t.approve(ctx, m.ID, consent); err != nil {
		return err
	}
	if before >= 0 {
		// The new member replaces the member at its address, which lost its data and will not return under its old id.
		if err := r.await(r.raft.RemoveServer(servers[before].ID, 0, memberTimeout)); err != nil {
			return err
		}
	}
	if known < 0 && !consent {
		r.config.Log.Warn("a server asked to join: it gets no vote until it is approved",
			"id", m.ID, "address", m.Peer,
			"approve", "fencelock member add "+m.Peer, "refuse", "fencelock member remove "+string(m.ID))
	}
	// AddNonvoter leaves the vote of a moved member unchanged.
	err = r.await(r.raft.AddNonvoter(m.ID, raft.ServerAddress(m.Peer), 0, memberTimeout))
	if err == nil && known >= 0 && r.State.Client(string(m.ID)) != a.Client {
		err = t.tryTell(fact{Member: m.ID, Client: a.Client})
	}
	if err == nil && r.config.Admitted != nil {
		replaced := ""
		if before >= 0 {
			replaced = string(servers[before].ID)
		}
		r.config.Admitted(string(m.ID), m.Peer, consent || known >= 0, replaced)
	}
	return err
}

// isMember reports whether a server is a member with its id and its address.
func (r *Replica) isMember(m member) bool {
	return slices.ContainsFunc(r.servers(), func(server raft.Server) bool {
		return server.ID == m.ID && string(server.Address) == m.Peer
	})
}

// consentNeeded returns the reason not to admit a server without approval.
func consentNeeded(address, why string) error {
	return fmt.Errorf("%s: this needs approval, by \"fencelock member add %s\" or the join key of the others",
		why, address)
}

// approve records that a member may have a vote, if consent is set and the member waits for approval.
func (t *Term) approve(ctx context.Context, id raft.ServerID, consent bool) error {
	if !consent || !t.replica.waits(id) {
		return nil
	}
	if !t.tell(ctx, fact{Approved: id}) {
		return fmt.Errorf("the approval could not be stored: %w", context.Cause(ctx))
	}
	return nil
}

// waits reports whether a server has neither a vote nor approval.
func (r *Replica) waits(id raft.ServerID) bool {
	return !r.State.approved(id) && !slices.ContainsFunc(r.servers(), func(server raft.Server) bool {
		return server.ID == id && server.Suffrage == raft.Voter
	})
}

func (r *Replica) unapproved(servers []raft.Server) (n int) {
	for _, server := range servers {
		if r.waits(server.ID) {
			n++
		}
	}
	return n
}

// addVoter gives a member a vote. It fails if the member has been removed in the meantime: AddVoter would make it a
// member again.
func (r *Replica) addVoter(id raft.ServerID, address raft.ServerAddress) error {
	configuration := r.raft.GetConfiguration()
	servers := configuration.Configuration().Servers
	if !slices.ContainsFunc(servers, func(server raft.Server) bool { return server.ID == id }) {
		return noMember(id)
	}
	return r.await(r.raft.AddVoter(id, address, configuration.Index(), memberTimeout))
}

// KeepMembers gives votes to approved members that have caught up, and records the address of each member for clients.
func (t *Term) KeepMembers(ctx context.Context) {
	for _, server := range t.replica.servers() {
		if err := t.keepMember(ctx, server); err != nil && ctx.Err() == nil {
			t.replica.config.Log.Debug("member", "id", server.ID, "address", server.Address, "error", err)
		}
	}
}

// keepMember takes the next step for one member: it records a new address of this member, approves a member that has
// the key, gives a member a vote, or records its address for clients. The next call of KeepMembers retries failures.
func (t *Term) keepMember(ctx context.Context, server raft.Server) error {
	r := t.replica
	if server.ID == r.id {
		if string(server.Address) == r.address {
			return nil
		}
		// This member has moved.
		return r.addVoter(server.ID, raft.ServerAddress(r.address))
	}
	if r.waits(server.ID) && len(r.config.JoinKey) > 0 {
		a, proven, err := r.askForKey(ctx, string(server.Address))
		if err == nil && proven && a.ID == server.ID {
			err = t.tryTell(fact{Approved: server.ID})
		}
		if err != nil {
			return err
		}
	}
	approved := server.Suffrage == raft.Nonvoter && !r.waits(server.ID)
	if approved && r.proof.caughtUp(server.ID, r.raft.CommitIndex()) {
		if err := r.addVoter(server.ID, server.Address); err != nil {
			return err
		}
	}
	if r.State.knows(server.ID) {
		return nil
	}
	a, err := r.peers.ask(ctx, string(server.Address), question{})
	if err != nil {
		return err
	}
	if a.ID != server.ID {
		return errors.New("another member answers at its address")
	}
	return t.tryTell(fact{Member: a.ID, Client: a.Client})
}

// levelOf returns the feature level of a member from its report. Versions that do not report a level support level 1.
func levelOf(told uint32) uint32 { return max(told, 1) }

// level returns the highest feature level that this member supports.
func (r *Replica) level() uint32 { return cmp.Or(r.config.Rig.Level, machine.MaxLevel) }

// CommonLevel returns the highest feature level that all approved members support.
func (t *Term) CommonLevel(ctx context.Context) (uint32, error) {
	r := t.replica
	common := r.level()
	for _, member := range r.servers() {
		if member.ID == r.id || r.waits(member.ID) { // an unapproved member does not count
			continue
		}
		a, err := r.peers.ask(ctx, string(member.Address), question{})
		switch {
		case err != nil:
			return 0, fmt.Errorf("the level of %s: %w", member.ID, err)
		case a.ID != member.ID:
			return 0, fmt.Errorf("the level of %s: %s answers in its place", member.ID, a.ID)
		}
		common = min(common, levelOf(a.Level))
	}
	return common, nil
}

// checkLevel returns an error for a member whose version does not support the cluster's level.
func (r *Replica) checkLevel(told uint32) error {
	if level := r.State.Machine.Level(); levelOf(told) < level {
		return fmt.Errorf("your version supports feature level %d, but the cluster uses %d: install a newer version",
			levelOf(told), level)
	}
	return nil
}
