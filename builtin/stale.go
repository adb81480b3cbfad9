package builtin

// Looks at single members, without a leader. They are part of Admin, because a Driver promises up-to-date answers.

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// StaleState is one member's knowledge of a name. It may be long outdated: it is for people while no member leads.
// Never access a resource that a lock protects because of it.
type StaleState struct {
	backend.State // ExpiresIn of its holders is zero: only a leader knows it
	// Member that answered, by its id, and the Address at which it was asked.
	Member, Address string
	// Heard is the time since its last contact with a leader: zero if it leads itself, negative if it had no contact
	// since its start.
	Heard time.Duration
}

// StaleLook asks one member, the first that answers at an address of the Admin, for the holders of a name. It needs
// neither a leader nor a majority. Errors wrap backend.ErrInvalidName, backend.ErrUnsupported, or
// backend.ErrUnavailable: no member answers. It waits two seconds for each member. Two calls may ask two members, of
// which the second knows less; do not use the result to decide about a lock.
func (a *Admin) StaleLook(ctx context.Context, name string) (StaleState, error) {
	err := backend.ValidateName(name)
	if err != nil {
		return StaleState{}, &backend.CallError{Driver: driverName, Call: "stale look", Name: name, Err: err}
	}
	answer, address, err := a.askStale(ctx, a.addresses, &lockpb.LookStaleRequest{Name: name})
	if err == nil && len(answer.Names) != 1 {
		err = status.Error(codes.Unavailable, errNoAnswer.Error())
	}
	if err != nil {
		return StaleState{}, adminError("stale look", name, err)
	}
	return staleState(answer, address, answer.Names[0]), nil
}

// StaleList asks one member as StaleLook does, for the names that begin with prefix and are held. All pages come from
// the member that answered the first one, so that they can be compared with each other. An error is the last element.
// The loop may end early.
func (a *Admin) StaleList(ctx context.Context, prefix string) iter.Seq2[StaleState, error] {
	return func(yield func(StaleState, error) bool) {
		at, after := a.addresses, ""
		for {
			q := &lockpb.LookStaleRequest{Name: prefix, Prefix: true, After: after}
			answer, address, err := a.askStale(ctx, at, q)
			if err != nil {
				yield(StaleState{}, adminError("stale list", prefix, err))
				return
			}
			for _, n := range answer.Names {
				if len(n.Holders) > 0 && !yield(staleState(answer, address, n), nil) {
					return
				}
			}
			if at, after = []string{address}, answer.NextAfter; after == "" {
				return
			}
		}
	}
}

// askStale returns the first answer, and the address from which it came. A member that does not know the request ends
// the search, as backend.ErrUnsupported: another member's answer must not hide that.
func (a *Admin) askStale(
	ctx context.Context, addresses []string, q *lockpb.LookStaleRequest,
) (*lockpb.LookStaleReply, string, error) {
	var silent error
	for _, address := range addresses {
		answer, err := askAt(ctx, a, address, statusTime, lockpb.AdminServiceClient.LookStale, q)
		switch {
		case err == nil:
			return answer, address, nil
		case status.Code(err) == codes.Unimplemented:
			return nil, "", err
		}
		silent = errors.Join(silent, fmt.Errorf("%s: %s", address, status.Convert(err).Message()))
	}
	return nil, "", status.Errorf(codes.Unavailable, "no member answers: %v", silent)
}

// staleState converts one name of an answer, and adds the member that gave it.
func staleState(answer *lockpb.LookStaleReply, address string, n *lockpb.NameState) StaleState {
	return StaleState{
		State: stateOf(n, answer.Durable), Member: answer.NodeId, Address: address,
		Heard: time.Duration(answer.HeardNanos),
	}
}
