package builtin

// Admin: members, leadership and sessions of a cluster, for operators and for the command line. It is separate from
// Driver, because its calls are rare, and a failing driver must not block the operator who repairs the cluster.
//
// Every change can be repeated, because an answer may get lost while the leader changes. If the result of a method
// does not show whether an earlier try of the same call succeeded, its comment says so.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// Errors of Admin, to branch on with errors.Is.
var (
	// ErrNoMember: the cluster has no member with that id.
	ErrNoMember = errors.New("the cluster has no such member")
	// ErrNoSession: no session with that name is open.
	ErrNoSession = errors.New("the cluster has no such session")
	// ErrRefused: the change would leave the cluster without a working majority, the server cannot join, or the caller may
	// not change the cluster: see Admin.
	ErrRefused = errors.New("the cluster refuses the change")
)

// Admin manages the members of a cluster of bundled servers. NewAdmin and OpenAdmin make one. It keeps no connection
// and no state between two calls, so it need not be closed. All methods are safe for concurrent use. Status and the
// stale looks wait two seconds for an unresponsive member; all other methods except Backup look for a leader and wait
// for its answer for up to 15 seconds in total.
//
// Admin sends changes of the cluster, and backups, to the admin_address in the member's status. By default this is a
// socket in the member's data directory, which only its user and root can open. If the socket is on another machine,
// the error wraps ErrRefused or backend.ErrUnavailable.
//
//	admin := builtin.NewAdmin([]string{"a:7480", "b:7480", "c:7480"}, nil)
//	for _, m := range admin.Status(ctx) {
//		fmt.Println(m.Address, m.NodeId, m.Leader, m.Err)
//	}
type Admin struct {
	addresses []string
	options   []grpc.DialOption
	local     []grpc.DialOption // for Unix sockets, which get no token
}

// NewAdmin returns the administration of the cluster of which addrs are members: host:port where clients or operators
// connect, or "unix:" and the path of a socket of a member. It does no I/O.
//
// It uses only the options TLS, TokenFile and Dial.
func NewAdmin(addrs []string, o *Options) *Admin {
	tokenless := *cmp.Or(o, &Options{})
	tokenless.TokenFile = ""
	return &Admin{addresses: slices.Clone(addrs), options: dialOptions(o), local: dialOptions(&tokenless)}
}

// OpenAdmin is NewAdmin with the URL of Open, or with unix:PATH[,unix:PATH…]. A bad URL is an error that wraps
// backend.ErrInvalidOption.
func OpenAdmin(rawURL string) (*Admin, error) {
	if strings.HasPrefix(rawURL, unixPrefix) {
		return NewAdmin(strings.Split(rawURL, ","), nil), nil
	}
	u, err := syntax.ParseURL(rawURL)
	if err != nil {
		return nil, err
	}
	o := &Options{TLS: u.TLS, TokenFile: u.Options.Get(credentialOption)}
	if err := checkToken(o); err != nil {
		return nil, u.Invalid(err)
	}
	return NewAdmin(u.Addresses, o), nil
}

// unixPrefix marks an address as the path of a socket.
const unixPrefix = "unix:"

// statusTime bounds the wait for the answer of one member. changeTime bounds a whole call that needs the leader.
const (
	statusTime = 2 * time.Second
	changeTime = 15 * time.Second
)

// MemberStatus is one member's report about itself.
type MemberStatus struct {
	// Address is the address that was asked.
	Address string
	// Named: the address was passed to NewAdmin or OpenAdmin. Other addresses come from members.
	Named bool
	// Err is the reason for a missing answer, and wraps backend.ErrUnavailable. MemberStatus then has the node id at
	// most.
	Err error
	*lockpb.MemberStatus
}

// Status asks the members at the addresses of the Admin, and then the other members that these report, each for at
// most two seconds. There is one entry for each member and for each address that does not answer. It needs no leader.
//
// Entries come in the order of the addresses, then in the order in which members named others. Status takes four
// seconds at most.
func (a *Admin) Status(ctx context.Context) []MemberStatus {
	first := make([]MemberStatus, len(a.addresses))
	for i, address := range a.addresses {
		first[i] = MemberStatus{Address: address, Named: true, MemberStatus: &lockpb.MemberStatus{}}
	}
	a.askAll(ctx, first)
	known := map[string]bool{}
	var all, more []MemberStatus
	for _, m := range first {
		if m.Err == nil && known[m.NodeId] {
			continue // two addresses of one member
		}
		known[m.NodeId] = true
		all = append(all, m)
	}
	for _, m := range first {
		for _, other := range m.Members {
			if !known[other.NodeId] && other.ClientAddress != "" {
				known[other.NodeId] = true
				more = append(more, MemberStatus{
					Address: other.ClientAddress, MemberStatus: &lockpb.MemberStatus{NodeId: other.NodeId},
				})
			}
		}
	}
	a.askAll(ctx, more)
	return append(all, more...)
}

// askAll asks all members for their status concurrently: an unresponsive member does not delay the others. It fills in
// their answers, and returns when all have answered or failed.
func (a *Admin) askAll(ctx context.Context, members []MemberStatus) {
	var all sync.WaitGroup
	for i := range members {
		all.Go(func() {
			m := &members[i]
			q := &lockpb.StatusRequest{}
			answer, err := askAt(ctx, a, m.Address, statusTime, lockpb.AdminServiceClient.Status, q)
			if err != nil {
				m.Err = fmt.Errorf("%w: %s", backend.ErrUnavailable, status.Convert(err).Message())
				return
			}
			m.MemberStatus = answer
		})
	}
	all.Wait()
}

// Members lists the members of the cluster. Each entry shows whether the member has a vote, and whether it has
// answered the leader just now. Without a leader the error wraps backend.ErrUnavailable.
func (a *Admin) Members(ctx context.Context) ([]*lockpb.Member, error) {
	list, err := askLeader(ctx, a, lockpb.AdminServiceClient.ListMembers, &lockpb.ListMembersRequest{})
	return list.GetMembers(), adminError("list members", "", looked(err))
}

// AddMember adds the server that listens for other members at peerAddress, host:port, and that belongs to no cluster
// yet. It has no vote before it has caught up, as Members shows. A server that is a member already stays as it is.
// Errors wrap ErrRefused, backend.ErrInvalidOption, backend.ErrUnavailable, or backend.ErrUnknown: it may have been
// added. The member is the server as the leader knows it, with its node id.
func (a *Admin) AddMember(ctx context.Context, peerAddress string) (*lockpb.Member, error) {
	q := &lockpb.AddMemberRequest{PeerAddress: peerAddress}
	member, err := changeLeader(ctx, a, lockpb.AdminServiceClient.AddMember, q)
	return member, adminError("add member", peerAddress, err)
}

// RemoveMember permanently removes the member with the node id. A leader first transfers the leadership. Errors wrap
// ErrNoMember; ErrRefused, if most of the other members with a vote do not answer the leader; backend.ErrUnavailable;
// or backend.ErrUnknown: it may have been removed.
//
// It looks for the id first, because "not found" alone could mean that an earlier try of this call has removed it.
func (a *Admin) RemoveMember(ctx context.Context, id string) error {
	const call = "remove member"
	members, err := a.Members(ctx)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(members, func(m *lockpb.Member) bool { return m.NodeId == id }) {
		return adminError(call, id, status.Error(codes.NotFound, "the leader does not know it"))
	}
	_, err = changeLeader(ctx, a, lockpb.AdminServiceClient.RemoveMember, &lockpb.RemoveMemberRequest{NodeId: id})
	if status.Code(err) == codes.NotFound {
		return nil // an earlier try did it, and its answer was lost
	}
	return adminError(call, id, err)
}

// TransferLeadership makes the member with the node id the leader, or, if id is empty, any other member than the
// present leader. It returns the id of the new leader. Clients follow it; locks and sessions stay as they are. Errors
// wrap ErrNoMember; ErrRefused, if the member has no vote or does not answer the leader; backend.ErrUnavailable; or
// backend.ErrUnknown: the leader may have changed.
//
// It returns once the new leader leads. If id is empty, this is a member other than the leader that the call found
// first, however often the call retries.
func (a *Admin) TransferLeadership(ctx context.Context, id string) (leader string, err error) {
	first := ""
	err = patiently(ctx, func(ctx context.Context) error {
		members := a.Status(ctx)
		now := leads(members)
		if first == "" {
			first = now
		}
		if now != "" && (now == id || id == "" && now != first) {
			leader = now
			return nil
		}
		m, err := leaderOf(members)
		if err != nil {
			return err
		}
		q := &lockpb.TransferLeadershipRequest{NodeId: id}
		if _, err := change(ctx, a, m, lockpb.AdminServiceClient.TransferLeadership, q); err != nil {
			return err
		}
		return status.Error(codes.Unavailable, "the next leader is not elected yet") // look for it
	})
	return leader, adminError("transfer leadership", id, err)
}

// SetMaintenance turns the maintenance mode of the member with the node id on or off; if id is empty, of the member
// at the only address of the Admin. While the mode is on (a restart turns it off), the member leads only if no other
// does. SetMaintenance returns once another member leads. Locks and sessions stay as they are. Errors wrap
// ErrNoMember; ErrRefused, if the member leads and no other can; backend.ErrInvalidOption; or backend.ErrUnavailable:
// the member, or another leader, was not found, and the mode may be on or off.
func (a *Admin) SetMaintenance(ctx context.Context, id string, on bool) error {
	ctx, cancel := context.WithTimeout(ctx, changeTime)
	defer cancel()
	err := a.setMaintenance(ctx, id, on)
	if status.Code(err) == codes.DeadlineExceeded {
		err = looked(err) // repeating it is harmless
	}
	return adminError("maintenance", id, err)
}

// setMaintenance asks the member itself, not the leader: it has to work in a cluster without a leader. Then it waits
// until another member leads. Repeating it is harmless.
func (a *Admin) setMaintenance(ctx context.Context, id string, on bool) error {
	if id == "" && len(a.addresses) != 1 {
		return status.Error(codes.InvalidArgument, "there are several members: name one")
	}
	m, err := a.member(ctx, id)
	if err != nil {
		return err
	}
	_, err = change(ctx, a, &m, lockpb.AdminServiceClient.SetMaintenance, &lockpb.SetMaintenanceRequest{On: on})
	for on && err == nil {
		m, err = a.member(ctx, m.NodeId)
		if err != nil || m.LeaderId != "" && m.LeaderId != m.NodeId {
			break
		}
		if kit.Sleep(ctx, spread(busyPause)) != nil {
			err = status.Error(codes.Unavailable, "no other member has become leader yet")
		}
	}
	return err
}

// member returns the member with the id, or, if id is empty, the member at the only address. It is NotFound only if
// all candidates answered, and Unavailable if one of them did not answer.
func (a *Admin) member(ctx context.Context, id string) (MemberStatus, error) {
	var silent error
	for _, m := range a.Status(ctx) {
		switch {
		case m.Err == nil && (m.NodeId == id || id == "" && m.Named):
			return m, nil
		case m.Err != nil && (m.NodeId == id || m.NodeId == ""):
			silent = errors.Join(silent, fmt.Errorf("%s: %w", m.Address, m.Err))
		}
	}
	if silent != nil {
		return MemberStatus{}, status.Error(codes.Unavailable, silent.Error())
	}
	return MemberStatus{}, status.Error(codes.NotFound, "no member that answers knows it")
}

// Open opens a cluster that was restored, from a backup or one disk, before every earlier lock has expired: a client
// that had a lock when the cluster was lost may rely on it for its TTL. If the cluster serves already, Open has no
// effect. Errors wrap backend.ErrUnavailable, or backend.ErrUnknown: it may be open.
func (a *Admin) Open(ctx context.Context) error {
	err := patiently(ctx, func(ctx context.Context) error {
		members := a.Status(ctx)
		for _, m := range members {
			if m.Err == nil && m.ClosedNanos > 0 {
				_, err := change(ctx, a, &m, lockpb.AdminServiceClient.Open, &lockpb.OpenRequest{})
				return err
			}
		}
		_, err := leaderOf(members)
		return err
	})
	return adminError("open", "", err)
}

// Sessions lists the open sessions: the holds and waits of clients belong to them. client, if not empty, selects the
// sessions of one client, as SessionInfo names it. Errors wrap backend.ErrUnavailable.
//
// A session is shown with its name, which EndSession takes, and never with its id: a client that knows the id could
// act for the session. If the leader changes during the list, Sessions restarts it from the beginning.
func (a *Admin) Sessions(ctx context.Context, client string) ([]*lockpb.SessionInfo, error) {
	var all []*lockpb.SessionInfo
	err := a.atLeader(ctx, func(ctx context.Context, c lockpb.AdminServiceClient) error {
		all = nil
		stream, err := c.ListSessions(ctx, &lockpb.ListSessionsRequest{Client: client})
		for err == nil {
			var piece *lockpb.SessionList
			if piece, err = stream.Recv(); err == nil {
				all = append(all, piece.Sessions...)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		return err
	})
	if err != nil {
		return nil, adminError("list sessions", "", looked(err))
	}
	return all, nil
}

// EndSession ends the session with that name (of SessionInfo), with all its holds and waits, and notifies its client.
// Errors wrap ErrNoSession, backend.ErrUnavailable, or backend.ErrUnknown: it may have ended. The names are free
// immediately, except during minimum holds. A live client makes a new session with its next acquire.
func (a *Admin) EndSession(ctx context.Context, name string) error {
	asked := false
	err := a.withLeader(ctx, func(ctx context.Context, m *MemberStatus) error {
		_, err := change(ctx, a, m, lockpb.AdminServiceClient.EndSession, &lockpb.EndSessionRequest{Name: name})
		if status.Code(err) == codes.NotFound && asked {
			return nil // an earlier try did it, and its answer was lost
		}
		asked = true
		return err
	})
	return adminError(endSession, name, err)
}

// endSession is the only call that returns NotFound for something other than a member.
const endSession = "end session"

// Explain returns the holders and waiters of a name, which comes first in the answer, and of the names for which its
// holders wait. Errors wrap backend.ErrUnavailable. The answer is for people: it may be out of date when it arrives.
func (a *Admin) Explain(ctx context.Context, name string) (*lockpb.ExplainReply, error) {
	var reply *lockpb.ExplainReply
	err := a.atLeader(ctx, func(ctx context.Context, c lockpb.AdminServiceClient) (err error) {
		reply, err = c.Explain(ctx, &lockpb.ExplainRequest{Name: name})
		return err
	})
	if err != nil {
		return nil, adminError("explain", name, looked(err))
	}
	return reply, nil
}

// Rules returns the rules of the cluster: see docs/SECURITY.md. It needs the same rights as a change. Errors wrap
// ErrRefused or backend.ErrUnavailable.
func (a *Admin) Rules(ctx context.Context) (*lockpb.Rules, error) {
	all, err := changeLeader(ctx, a, lockpb.AdminServiceClient.GetRules, &lockpb.GetRulesRequest{})
	return all, adminError("get rules", "", err)
}

// setRules and setPolicies are the calls for which InvalidArgument does not refer to a member.
const (
	setRules    = "set rules"
	setPolicies = "set policies"
)

// SetRules replaces the rules of the cluster by the text of a file, at most 1 MiB, and returns the rules then in
// force. The empty text removes the rules: then every client may do everything. New rules apply to later calls;
// earlier holds and waits stay. Errors wrap backend.ErrInvalidOption, which names the line; ErrRefused: a member runs
// a version without rules, or the caller may not change the cluster; backend.ErrUnavailable; or backend.ErrUnknown:
// they may be in force.
func (a *Admin) SetRules(ctx context.Context, text string) (*lockpb.Rules, error) {
	all, err := changeLeader(ctx, a, lockpb.AdminServiceClient.SetRules, &lockpb.SetRulesRequest{Text: text})
	return all, adminError(setRules, "", err)
}

// Policies returns the policies of the cluster: see docs/SERVER.md. It needs the same rights as a change. Errors are
// those of Rules.
func (a *Admin) Policies(ctx context.Context) (*lockpb.Policies, error) {
	all, err := changeLeader(ctx, a, lockpb.AdminServiceClient.GetPolicies, &lockpb.GetPoliciesRequest{})
	return all, adminError("get policies", "", err)
}

// SetPolicies replaces the policies of the cluster by the text of a file, at most 1 MiB, and returns the policies then
// in force. The empty text removes them. Holds keep the maximum hold time with which they were granted, and queues
// their waiters; permits in use have the new limit immediately. Errors are those of SetRules.
func (a *Admin) SetPolicies(ctx context.Context, text string) (*lockpb.Policies, error) {
	all, err := changeLeader(ctx, a, lockpb.AdminServiceClient.SetPolicies, &lockpb.SetPoliciesRequest{Text: text})
	return all, adminError(setPolicies, "", err)
}
