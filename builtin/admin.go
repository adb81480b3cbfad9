package builtin

// Admin: members, leadership and sessions of a cluster, for operators and for the command line. It shares nothing with
// Driver but the addresses: its calls are rare, and a driver that is in trouble must not stop the one who mends it.
//
// Every change can be asked for twice, because an answer may get lost while the leader changes. Those that cannot be
// told from an earlier try of the same call by their result say so where they are called.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
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
	// ErrRefused: the change would leave the cluster without a working majority, or the server cannot join.
	ErrRefused = errors.New("the cluster refuses the change")
)

// Admin looks after the members of a cluster of bundled servers. NewAdmin and OpenAdmin make one. It keeps no
// connection and nothing between two calls, so there is nothing to close. All methods are safe for concurrent use.
// Status and the stale looks give a silent member two seconds; the others, but Backup, look for a leader and wait for
// its answer for up to 15 seconds together.
//
//	admin := builtin.NewAdmin([]string{"a:7480", "b:7480", "c:7480"}, nil)
//	for _, m := range admin.Status(ctx) {
//		fmt.Println(m.Address, m.NodeId, m.Leader, m.Err)
//	}
type Admin struct {
	addresses []string
	options   []grpc.DialOption
}

// NewAdmin returns the administration of the cluster of which addrs, as host:port, are members. It does no I/O.
//
// Of the options, TLS and Dial count.
func NewAdmin(addrs []string, o *Options) *Admin {
	return &Admin{addresses: slices.Clone(addrs), options: dialOptions(o)}
}

// OpenAdmin is NewAdmin with the URL of Open. A bad URL is an error that wraps backend.ErrInvalidOption.
func OpenAdmin(rawURL string) (*Admin, error) {
	u, err := syntax.ParseURL(rawURL)
	if err != nil {
		return nil, err
	}
	return NewAdmin(u.Addresses, &Options{TLS: u.TLS}), nil
}

// How long one member is given to answer, and how long changes and Members look for a leader that answers.
const (
	statusTime = 2 * time.Second
	changeTime = 15 * time.Second
)

// MemberStatus is what one member tells of itself.
type MemberStatus struct {
	// Address at which it was asked.
	Address string
	// Named: the address is one of those that the Admin was made with. The others are what members told.
	Named bool
	// Err says why there is no answer, and wraps backend.ErrUnavailable. Of MemberStatus, the node id alone may then be
	// known.
	Err error
	*lockpb.MemberStatus
}

// Status asks the members at the addresses of the Admin, and then the other members that these know of, each for at
// most two seconds. There is one entry for each member and for each address that does not answer. A leader is not
// needed.
//
// It never fails as a whole: what is wrong with a member stands in its entry. Entries come in the order of the
// addresses, then in the order in which members told of others. It takes four seconds at most.
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

// askAll has all members tell their status, at the same time: one that is silent delays none of the others. It fills in
// what they answer, and returns when all have answered or failed.
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

// Members lists the members of the cluster, and which of them follow the leader now. Without a leader the error wraps
// backend.ErrUnavailable. Of each it tells whether it has a vote, and whether it has answered the leader just now.
func (a *Admin) Members(ctx context.Context) ([]*lockpb.Member, error) {
	list, err := askLeader(ctx, a, lockpb.AdminServiceClient.ListMembers, &lockpb.ListMembersRequest{})
	return list.GetMembers(), adminError("list members", "", looked(err))
}

// AddMember takes in the server that listens for other members at peerAddress, host:port, and that belongs to no
// cluster yet. It has no vote before it has caught up; Members tells. A server that is a member already stays as it is.
// Errors wrap ErrRefused, backend.ErrInvalidOption, backend.ErrUnavailable, or backend.ErrUnknown: it may have been
// added. The member is the server as the leader knows it, with its node id.
func (a *Admin) AddMember(ctx context.Context, peerAddress string) (*lockpb.Member, error) {
	q := &lockpb.AddMemberRequest{PeerAddress: peerAddress}
	member, err := askLeader(ctx, a, lockpb.AdminServiceClient.AddMember, q)
	return member, adminError("add member", peerAddress, err)
}

// RemoveMember takes the member with the node id out for good. A leader hands the leadership over first. Errors wrap
// ErrNoMember; ErrRefused, if most of the other members with a vote do not answer the leader; backend.ErrUnavailable;
// or backend.ErrUnknown: it may have been removed.
//
// The id is looked for first, because "not found" alone could mean that an earlier try of this call has removed it.
func (a *Admin) RemoveMember(ctx context.Context, id string) error {
	const call = "remove member"
	members, err := a.Members(ctx)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(members, func(m *lockpb.Member) bool { return m.NodeId == id }) {
		return adminError(call, id, status.Error(codes.NotFound, "none of those that the leader knows"))
	}
	_, err = askLeader(ctx, a, lockpb.AdminServiceClient.RemoveMember, &lockpb.RemoveMemberRequest{NodeId: id})
	if status.Code(err) == codes.NotFound {
		return nil // done by an earlier try, whose answer did not come
	}
	return adminError(call, id, err)
}

// TransferLeadership has the member with the node id lead, or where that is empty another than now, and returns the id
// of the one that leads then. Clients follow it; locks and sessions stay as they are. Errors wrap ErrNoMember;
// ErrRefused, if the member has no vote or does not answer the leader; backend.ErrUnavailable; or backend.ErrUnknown:
// the leader may have changed.
//
// It returns once the other one leads, not when it has been asked to. Where id is empty, "another than now" is measured
// by the leader that was found first, however often the call has to ask.
func (a *Admin) TransferLeadership(ctx context.Context, id string) (leader string, err error) {
	first := ""
	err = a.atLeader(ctx, func(ctx context.Context, c lockpb.AdminServiceClient) error {
		at, err := c.Status(ctx, &lockpb.StatusRequest{})
		if err != nil {
			return err
		}
		if first == "" {
			first = at.NodeId
		}
		if at.Leader && (at.NodeId == id || id == "" && at.NodeId != first) {
			leader = at.NodeId
			return nil
		}
		if _, err := c.TransferLeadership(ctx, &lockpb.TransferLeadershipRequest{NodeId: id}); err != nil {
			return err
		}
		return status.Error(codes.Unavailable, "the next leader is not elected yet") // to be looked for
	})
	return leader, adminError("transfer leadership", id, err)
}

// SetMaintenance has the member with the node id lead no more, or again; where id is empty, the one at the only address
// of the Admin. Between on and off, or until it is started anew, that member leads only if nobody else does. It returns
// once another one leads. Locks and sessions stay as they are. Errors wrap ErrNoMember; ErrRefused, if the member leads
// and no other can; backend.ErrInvalidOption; or backend.ErrUnavailable: the member, or one to lead in its place, was
// not found, and it may be in maintenance or not.
func (a *Admin) SetMaintenance(ctx context.Context, id string, on bool) error {
	ctx, cancel := context.WithTimeout(ctx, changeTime)
	defer cancel()
	err := a.setMaintenance(ctx, id, on)
	if status.Code(err) == codes.DeadlineExceeded {
		err = looked(err) // to set it once more does no harm
	}
	return adminError("maintenance", id, err)
}

// setMaintenance tells the member itself, not the leader: it has to work where the cluster has no leader that could
// pass it on. Then it waits until another member leads. Setting what is set already does no harm.
func (a *Admin) setMaintenance(ctx context.Context, id string, on bool) error {
	if id == "" && len(a.addresses) != 1 {
		return status.Error(codes.InvalidArgument, "there are several members: which one?")
	}
	m, err := a.member(ctx, id)
	if err != nil {
		return err
	}
	q := &lockpb.SetMaintenanceRequest{On: on}
	_, err = askAt(ctx, a, m.Address, changeTime, lockpb.AdminServiceClient.SetMaintenance, q)
	for on && err == nil {
		m, err = a.member(ctx, m.NodeId)
		if err != nil || m.LeaderId != "" && m.LeaderId != m.NodeId {
			break
		}
		if kit.Sleep(ctx, spread(busyPause)) != nil {
			err = status.Error(codes.Unavailable, "no other member leads yet")
		}
	}
	return err
}

// member is the one with the id; where that is empty, the one at the only address. It is NotFound only if all members
// were asked that could be it, and Unavailable if one of those was silent.
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

// atLeader does something at the leader, again if the leader changes meanwhile or is not found at once: whatever it is,
// it can be done twice. So do may run several times, and after one that was carried out but not answered.
func (a *Admin) atLeader(ctx context.Context, do func(context.Context, lockpb.AdminServiceClient) error) error {
	return patiently(ctx, func(ctx context.Context) error {
		address, err := leaderOf(a.Status(ctx))
		if err != nil {
			return err
		}
		return a.at(ctx, address, changeTime, do)
	})
}

// patiently repeats do while it is Unavailable or Unknown, with pauses, for up to changeTime. It returns nil, a
// refusal, or the error of the last try when the time is over, or ctx.
func patiently(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, changeTime)
	defer cancel()
	for {
		err := do(ctx)
		if code := status.Code(err); code != codes.Unavailable && code != codes.Unknown {
			return err
		}
		if kit.Sleep(ctx, spread(busyPause)) != nil {
			return err
		}
	}
}

// leaderOf returns the address of the member that leads. Each call asks all members: the leader of the last call may
// have been replaced since, and administration is too rare for the question to cost anything.
func leaderOf(members []MemberStatus) (address string, err error) {
	var silent []error
	for _, m := range members {
		if m.Err == nil && m.Leader {
			return m.Address, nil
		}
		if m.Err != nil {
			silent = append(silent, fmt.Errorf("%s: %w", m.Address, m.Err))
		}
	}
	return "", status.Errorf(codes.Unavailable, "no member that answers leads; %v", errors.Join(silent...))
}

// method is what a member answers with one message, such as lockpb.AdminServiceClient.Status.
type method[Q, A any] func(lockpb.AdminServiceClient, context.Context, *Q, ...grpc.CallOption) (*A, error)

// askLeader asks the leader, as atLeader does.
func askLeader[Q, A any](ctx context.Context, a *Admin, ask method[Q, A], q *Q) (answer *A, err error) {
	err = a.atLeader(ctx, func(ctx context.Context, c lockpb.AdminServiceClient) (err error) {
		answer, err = ask(c, ctx, q)
		return err
	})
	return answer, err
}

// askAt asks one member, once, as at does.
func askAt[Q, A any](
	ctx context.Context, a *Admin, address string, within time.Duration, ask method[Q, A], q *Q,
) (answer *A, err error) {
	err = a.at(ctx, address, within, func(ctx context.Context, c lockpb.AdminServiceClient) (err error) {
		answer, err = ask(c, ctx, q)
		return err
	})
	return answer, err
}

// at does something at one member, with a connection of its own, which it closes: nothing of an Admin stays open. The
// context that do gets ends after within.
func (a *Admin) at(
	ctx context.Context, address string, within time.Duration,
	do func(context.Context, lockpb.AdminServiceClient) error,
) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	cc, err := grpc.NewClient("passthrough:///"+address, a.options...)
	if err != nil {
		return err
	}
	defer func() { _ = cc.Close() }()
	return do(ctx, lockpb.NewAdminServiceClient(cc))
}

// adminClasses are the codes of gRPC in the words of the contract. InvalidArgument is backend.ErrInvalidOption; what is
// not here is backend.ErrUnknown: the change may have been made.
var adminClasses = map[codes.Code]error{
	codes.NotFound:           ErrNoMember,
	codes.FailedPrecondition: ErrRefused,
	codes.Unavailable:        backend.ErrUnavailable,
	codes.Unimplemented:      backend.ErrUnsupported,
	codes.Canceled:           fmt.Errorf("%w: %w", backend.ErrUnknown, context.Canceled),
	codes.DeadlineExceeded:   fmt.Errorf("%w: %w", backend.ErrUnknown, context.DeadlineExceeded),
}

// adminError is an error of gRPC as adminClasses says, with the call and what it was about.
func adminError(call, name string, err error) error {
	if err == nil {
		return nil
	}
	text := status.Convert(err).Message()
	class := adminClasses[status.Code(err)]
	switch {
	case status.Code(err) == codes.InvalidArgument:
		err = kit.InvalidOption("member", strconv.Quote(name), text)
	case status.Code(err) == codes.NotFound && call == endSession:
		err = fmt.Errorf("%w: %s", ErrNoSession, text)
	case class != nil:
		err = fmt.Errorf("%w: %s", class, text)
	default:
		err = fmt.Errorf("%w: %w", backend.ErrUnknown, err)
	}
	return &backend.CallError{Driver: driverName, Call: call, Name: name, Err: err}
}

// looked is the error of a call that changes nothing, in gRPC's words: Unavailable, also where the answer did not come
// in time, because nothing is in doubt.
func looked(err error) error {
	if err == nil {
		return nil
	}
	return status.Error(codes.Unavailable, status.Convert(err).Message())
}

// Sessions lists the open sessions: what clients hold and wait for hangs on them. client, if not empty, asks for those
// of one client, as SessionInfo names it. Errors wrap backend.ErrUnavailable.
//
// A session is shown with its name, which EndSession takes, and never with its id: anybody who knows the id could speak
// for the session. If the leader changes while the list comes in, it is asked for anew from the beginning.
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

// EndSession ends the session with that name, of SessionInfo, with all that hangs on it. Its client is told that its
// holds are lost. Errors wrap ErrNoSession, backend.ErrUnavailable, or backend.ErrUnknown: it may have ended. The names
// are free at once but for minimum holds. A client that lives makes a new session with its next acquire.
func (a *Admin) EndSession(ctx context.Context, name string) error {
	asked := false
	err := a.atLeader(ctx, func(ctx context.Context, c lockpb.AdminServiceClient) error {
		_, err := c.EndSession(ctx, &lockpb.EndSessionRequest{Name: name})
		if status.Code(err) == codes.NotFound && asked {
			return nil // by an earlier try, whose answer did not come
		}
		asked = true
		return err
	})
	return adminError(endSession, name, err)
}

// endSession is the one call of which NotFound does not mean a member.
const endSession = "end session"
