package builtin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// atLeader calls do with a client of the leader's address for clients. It retries as withLeader does.
func (a *Admin) atLeader(ctx context.Context, do func(context.Context, lockpb.AdminServiceClient) error) error {
	return a.withLeader(ctx, func(ctx context.Context, m *MemberStatus) error {
		return a.at(ctx, m.Address, changeTime, do)
	})
}

// withLeader calls do for the leader. It retries if the leader changes meanwhile or is not found immediately. So do
// may run several times, even after a run that took effect without an answer.
func (a *Admin) withLeader(ctx context.Context, do func(context.Context, *MemberStatus) error) error {
	return patiently(ctx, func(ctx context.Context) error {
		m, err := leaderOf(a.Status(ctx))
		if err != nil {
			return err
		}
		return do(ctx, m)
	})
}

// changeLeader makes a change at the leader, as withLeader does.
func changeLeader[Q, A any](ctx context.Context, a *Admin, ask method[Q, A], q *Q) (answer *A, err error) {
	err = a.withLeader(ctx, func(ctx context.Context, m *MemberStatus) (err error) {
		answer, err = change(ctx, a, m, ask, q)
		return err
	})
	return answer, err
}

// change makes a change at one member.
func change[Q, A any](ctx context.Context, a *Admin, m *MemberStatus, ask method[Q, A], q *Q) (answer *A, err error) {
	err = a.changeAt(ctx, m, changeTime, func(ctx context.Context, c lockpb.AdminServiceClient) (err error) {
		answer, err = ask(c, ctx, q)
		return err
	})
	return answer, err
}

// changeAt calls do at the address of a member for changes. It first asks the server there for its status, to check
// that it is that member: a socket of the same path may belong to another member on this machine.
func (a *Admin) changeAt(
	ctx context.Context, m *MemberStatus, within time.Duration,
	do func(context.Context, lockpb.AdminServiceClient) error,
) error {
	if m.AdminAddress == "" { // the answer at Address names the missing option; an earlier version makes the change
		return a.at(ctx, m.Address, within, do)
	}
	elsewhere := func(code codes.Code, why any) error {
		return status.Errorf(code, "the member %s at %s accepts changes only at %s: %v", m.NodeId,
			m.Address, m.AdminAddress, why)
	}
	if path, is := strings.CutPrefix(m.AdminAddress, unixPrefix); is {
		c, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
		switch {
		case errors.Is(err, fs.ErrPermission):
			return elsewhere(codes.PermissionDenied, err)
		case err != nil:
			return elsewhere(codes.Unavailable, fmt.Errorf("%w; if the path is on another machine, make the call there", err))
		}
		c.Close()
	}
	return a.at(ctx, m.AdminAddress, within, func(ctx context.Context, c lockpb.AdminServiceClient) error {
		there, err := c.Status(ctx, &lockpb.StatusRequest{})
		if err != nil {
			return err
		}
		if there.NodeId != m.NodeId {
			return elsewhere(codes.PermissionDenied, "here that is another member; make the call on the machine of the first")
		}
		return do(ctx, c)
	})
}

// closedFor is a *ClosedError with gRPC's code.
type closedFor struct{ error }

func (e closedFor) GRPCStatus() *status.Status { return status.New(codes.Unavailable, e.Error()) }
func (e closedFor) Unwrap() error              { return e.error }

// patiently retries do while it is Unavailable or Unknown, with pauses, for up to changeTime. It returns nil, a
// refusal, or the error of the last try when the time is over or ctx ends. It does not wait for a cluster that is
// closed for longer.
func patiently(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, changeTime)
	defer cancel()
	for {
		err := do(ctx)
		var closed *ClosedError
		lasts := errors.As(err, &closed) && time.Until(closed.Until) > changeTime
		if code := status.Code(err); lasts || code != codes.Unavailable && code != codes.Unknown {
			return err
		}
		if kit.Sleep(ctx, spread(busyPause)) != nil {
			return err
		}
	}
}

// leads returns the id of the leader: as the leader reports or, if it did not answer, as its followers report.
func leads(members []MemberStatus) (id string) {
	answers := map[string]bool{}
	for _, m := range members {
		if m.Err == nil {
			if m.Leader {
				return m.NodeId
			}
			answers[m.NodeId] = true
		}
	}
	term := uint64(0)
	for _, m := range members {
		if m.Err == nil && m.Term > term && m.LeaderId != "" && !answers[m.LeaderId] {
			id, term = m.LeaderId, m.Term
		}
	}
	return id
}

// leaderOf returns the leader among members that have been asked. The error is a closedFor if the cluster serves no
// clients yet.
func leaderOf(members []MemberStatus) (leader *MemberStatus, err error) {
	var silent []error
	for i := range members {
		m := &members[i]
		switch {
		case m.Err == nil && m.Leader:
			return m, nil
		case m.Err == nil && m.ClosedNanos > 0:
			return nil, closedFor{closedError(m.ClosedNanos)}
		}
		if m.Err != nil {
			silent = append(silent, fmt.Errorf("%s: %w", m.Address, m.Err))
		}
	}
	return nil, status.Errorf(codes.Unavailable, "no member that answers leads; %v", errors.Join(silent...))
}

// method is a unary call of a member, such as lockpb.AdminServiceClient.Status.
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

// at calls do for one member, with a separate connection, which it closes: an Admin keeps no connection open. The
// context that do gets ends after within.
func (a *Admin) at(
	ctx context.Context, address string, within time.Duration,
	do func(context.Context, lockpb.AdminServiceClient) error,
) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	options := a.options
	if path, is := strings.CutPrefix(address, unixPrefix); is {
		options = slices.Concat(a.local, []grpc.DialOption{
			grpc.WithTransportCredentials(insecure.NewCredentials()), // the system decides who can open the socket
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "unix", path)
			}),
		})
		address = "localhost"
	}
	cc, err := grpc.NewClient("passthrough:///"+address, options...)
	if err != nil {
		return err
	}
	defer func() { _ = cc.Close() }()
	return do(ctx, lockpb.NewAdminServiceClient(cc))
}

// adminClasses maps the codes of gRPC to the classes of the contract. InvalidArgument is backend.ErrInvalidOption;
// all other codes are backend.ErrUnknown: the change may have been made.
var adminClasses = map[codes.Code]error{
	codes.NotFound:           ErrNoMember,
	codes.FailedPrecondition: ErrRefused,
	codes.PermissionDenied:   ErrRefused,
	codes.Unauthenticated:    backend.ErrDenied,
	codes.Unavailable:        backend.ErrUnavailable,
	codes.Unimplemented:      backend.ErrUnsupported,
	codes.Canceled:           fmt.Errorf("%w: %w", backend.ErrUnknown, context.Canceled),
	codes.DeadlineExceeded:   fmt.Errorf("%w: %w", backend.ErrUnknown, context.DeadlineExceeded),
}

// adminError gives an error of gRPC its class by adminClasses, with the call and its subject.
func adminError(call, name string, err error) error {
	if err == nil {
		return nil
	}
	text := status.Convert(err).Message()
	class := adminClasses[status.Code(err)]
	switch {
	case status.Code(err) == codes.InvalidArgument && (call == setRules || call == setPolicies):
		err = kit.InvalidOption(strings.TrimPrefix(call, "set "), "of the file", text)
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

// looked returns the error of a call without changes as Unavailable, even if the answer did not come in time, because
// no change is in doubt.
func looked(err error) error {
	if err == nil {
		return nil
	}
	return status.Error(codes.Unavailable, status.Convert(err).Message())
}
