package builtin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// Errors of Admin, to branch on with errors.Is.
var (
	// ErrNoMember: the cluster has no member with that id.
	ErrNoMember = errors.New("the cluster has no such member")
	// ErrRefused: the change would leave the cluster without a working majority, or the server cannot join.
	ErrRefused = errors.New("the cluster refuses the change")
)

// Admin looks after the members of a cluster of bundled servers. It keeps no connection. All methods are safe for
// concurrent use.
type Admin struct {
	addresses []string
	options   []grpc.DialOption
}

// NewAdmin returns the administration of the cluster of which addrs, as host:port, are members. It does no I/O.
func NewAdmin(addrs []string, o *Options) *Admin {
	if o == nil {
		o = &Options{}
	}
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

func (a *Admin) askAll(ctx context.Context, members []MemberStatus) {
	var all sync.WaitGroup
	for i := range members {
		all.Go(func() {
			m := &members[i]
			err := a.at(ctx, m.Address, statusTime, func(ctx context.Context, c lockpb.AdminServiceClient) error {
				answer, err := c.Status(ctx, &lockpb.StatusRequest{})
				if err == nil {
					m.MemberStatus = answer
				}
				return err
			})
			if err != nil {
				m.Err = fmt.Errorf("%w: %s", backend.ErrUnavailable, status.Convert(err).Message())
			}
		})
	}
	all.Wait()
}

// Members lists the members of the cluster, and which of them follow the leader now. Without a leader the error wraps
// backend.ErrUnavailable.
func (a *Admin) Members(ctx context.Context) ([]*lockpb.Member, error) {
	var members []*lockpb.Member
	err := a.atLeader(ctx, func(ctx context.Context, c lockpb.AdminServiceClient) error {
		answer, err := c.ListMembers(ctx, &lockpb.ListMembersRequest{})
		members = answer.GetMembers()
		return err
	})
	if err != nil {
		err = status.Error(codes.Unavailable, status.Convert(err).Message()) // also where the answer did not come in time
	}
	return members, adminError("list members", "", err)
}

// AddMember takes in the server that listens for other members at peerAddress, host:port, and that belongs to no
// cluster yet. It has no vote before it has caught up; Members tells. A server that is a member already stays as it is.
// Errors wrap ErrRefused, backend.ErrInvalidOption, backend.ErrUnavailable, or backend.ErrUnknown: it may have been
// added.
func (a *Admin) AddMember(ctx context.Context, peerAddress string) (*lockpb.Member, error) {
	var member *lockpb.Member
	err := a.atLeader(ctx, func(ctx context.Context, c lockpb.AdminServiceClient) (err error) {
		member, err = c.AddMember(ctx, &lockpb.AddMemberRequest{PeerAddress: peerAddress})
		return err
	})
	if err != nil {
		return nil, adminError("add member", peerAddress, err)
	}
	return member, nil
}

// RemoveMember takes the member with the node id out for good. A leader hands the leadership over first. Errors wrap
// ErrNoMember; ErrRefused, if most of the other members with a vote do not answer the leader; backend.ErrUnavailable;
// or backend.ErrUnknown: it may have been removed.
func (a *Admin) RemoveMember(ctx context.Context, id string) error {
	const call = "remove member"
	members, err := a.Members(ctx)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(members, func(m *lockpb.Member) bool { return m.NodeId == id }) {
		return adminError(call, id, status.Error(codes.NotFound, "none of those that the leader knows"))
	}
	err = a.atLeader(ctx, func(ctx context.Context, c lockpb.AdminServiceClient) error {
		_, err := c.RemoveMember(ctx, &lockpb.RemoveMemberRequest{NodeId: id})
		if status.Code(err) == codes.NotFound {
			return nil // done by an earlier attempt, whose answer did not come
		}
		return err
	})
	return adminError(call, id, err)
}

// TransferLeadership has the member with the node id lead, or where that is empty another than now, and returns the id
// of the one that leads then. Clients follow it; locks and sessions stay as they are. Errors wrap ErrNoMember;
// ErrRefused, if the member has no vote or does not answer the leader; backend.ErrUnavailable; or backend.ErrUnknown:
// the leader may have changed.
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

// atLeader does something at the leader, again if the leader changes meanwhile or is not found at once: whatever it is,
// it can be done twice.
func (a *Admin) atLeader(ctx context.Context, do func(context.Context, lockpb.AdminServiceClient) error) error {
	ctx, cancel := context.WithTimeout(ctx, changeTime)
	defer cancel()
	for {
		address, err := a.leader(ctx)
		if err == nil {
			err = a.at(ctx, address, changeTime, do)
		}
		if code := status.Code(err); code != codes.Unavailable && code != codes.Unknown {
			return err
		}
		timer := time.NewTimer(spread(busyPause))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return err
		}
	}
}

func (a *Admin) leader(ctx context.Context) (address string, err error) {
	var silent []error
	for _, m := range a.Status(ctx) {
		if m.Err == nil && m.Leader {
			return m.Address, nil
		}
		if m.Err != nil {
			silent = append(silent, fmt.Errorf("%s: %w", m.Address, m.Err))
		}
	}
	return "", status.Errorf(codes.Unavailable, "no member that answers leads; %v", errors.Join(silent...))
}

// at does something at one member, with a connection of its own.
func (a *Admin) at(
	ctx context.Context, address string, within time.Duration, do func(context.Context, lockpb.AdminServiceClient) error,
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

// adminError is an error of gRPC in the words of the contract.
func adminError(call, name string, err error) error {
	if err == nil {
		return nil
	}
	text := status.Convert(err).Message()
	switch status.Code(err) {
	case codes.NotFound:
		err = fmt.Errorf("%w: %s", ErrNoMember, text)
	case codes.FailedPrecondition:
		err = fmt.Errorf("%w: %s", ErrRefused, text)
	case codes.InvalidArgument:
		err = &backend.InvalidError{Kind: backend.ErrInvalidOption, What: "member", Value: fmt.Sprintf("%q", name), Why: text}
	case codes.Unavailable:
		err = fmt.Errorf("%w: %s", backend.ErrUnavailable, text)
	case codes.Unimplemented:
		err = fmt.Errorf("%w: %s", backend.ErrUnsupported, text)
	case codes.Canceled:
		err = fmt.Errorf("%w: %w: %s", backend.ErrUnknown, context.Canceled, text)
	case codes.DeadlineExceeded:
		err = fmt.Errorf("%w: %w: %s", backend.ErrUnknown, context.DeadlineExceeded, text)
	default:
		err = fmt.Errorf("%w: %w", backend.ErrUnknown, err)
	}
	return &backend.CallError{Driver: driverName, Call: call, Name: name, Err: err}
}
