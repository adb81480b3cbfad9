package builtin

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/fencing"
)

// Ping is engine.Service's. It looks up a name that need not be held, because the reply needs the majority and writes no
// log entry. A leader that denies the client that name has answered, too.
func (s *service) Ping(ctx context.Context) error {
	_, err := s.nameState(ctx, driverName)
	if errors.Is(err, backend.ErrDenied) && !errors.Is(err, errToken) {
		return nil
	}
	return err
}

// nameState asks for the holders of a name.
func (s *service) nameState(ctx context.Context, name string) (*lockpb.NameState, error) {
	if err := backend.ValidateName(name); err != nil {
		return nil, err
	}
	r, err := s.look(ctx, &lockpb.Request{Call: &lockpb.Request_GetHolder{GetHolder: &lockpb.GetHolder{Name: name}}})
	if err == nil && r.GetName() == nil {
		err = errNoAnswer
	}
	return r.GetName(), err
}

// look sends a request that changes nothing.
func (s *service) look(ctx context.Context, r *lockpb.Request) (*lockpb.Reply, error) {
	return s.ask(ctx, &call{request: onBehalf(ctx, r), looks: true})
}

// Look is engine.Inspector's: as the leader knows the name after a majority has confirmed that it leads.
// Holder.ExpiresIn is the time after which the holder's session expires without a renewal; Holder.Since is by the
// leader's wall clock and is for people.
func (s *service) Look(ctx context.Context, name string) (backend.State, error) {
	n, err := s.nameState(ctx, name)
	if err != nil {
		return backend.State{}, err
	}
	state := stateOf(n, s.fences())
	state.Name = name
	return state, nil
}

// errNoAnswer: the server has violated the protocol.
var errNoAnswer = fmt.Errorf("%w: unexpected reply of the server", backend.ErrUnavailable)

// stateOf converts a name's state to the contract's type. It omits the tokens of a server that is not durable: they
// do not fence.
func stateOf(n *lockpb.NameState, fences bool) backend.State {
	info := backend.State{
		Name: n.Name, Held: len(n.Holders) > 0, Waiters: int(n.Waiters), Revision: n.Revision,
	}
	for _, h := range n.Holders {
		holder := backend.Holder{
			Owner: h.Owner, HoldID: h.HoldId, Kind: kindOf(h.Kind), Permits: int(h.Permits), Limit: int(h.Limit),
			Since: time.Unix(0, h.SinceUnixNanos), ExpiresIn: time.Duration(h.ExpiresInNanos), Metadata: h.Metadata,
		}
		copy(holder.Nonce[:], h.Nonce)
		if fences {
			holder.Token = fencing.Token(h.Token)
		}
		info.Holders = append(info.Holders, holder)
	}
	for _, w := range n.Queue {
		info.Queue = append(info.Queue, backend.Waiter{
			Owner: w.Owner, HoldID: w.HoldId, Kind: kindOf(w.Kind), Permits: int(w.Permits), Limit: int(w.Limit),
			Since: time.Unix(0, w.SinceUnixNanos),
		})
	}
	return info
}

// kindsOut are the kinds on the wire; kindOf is the inverse.
var kindsOut = map[backend.Kind]lockpb.Kind{
	backend.KindExclusive: lockpb.Kind_KIND_EXCLUSIVE,
	backend.KindShared:    lockpb.Kind_KIND_SHARED,
	backend.KindPermits:   lockpb.Kind_KIND_PERMITS,
}

// kindOf returns the kind of a hold; it shows an unknown kind as exclusive, the strictest.
func kindOf(k lockpb.Kind) backend.Kind {
	switch k {
	case lockpb.Kind_KIND_SHARED:
		return backend.KindShared
	case lockpb.Kind_KIND_PERMITS:
		return backend.KindPermits
	}
	return backend.KindExclusive
}

// listPage bounds the names in one page: while the leader, or this client, works on a page, all other calls wait.
const listPage = 100

// Names is engine.Inspector's. Each page shows the state at one moment, the pages together do not.
func (s *service) Names(ctx context.Context, prefix, after string) (page []backend.State, next string, err error) {
	if err := backend.ValidateName(prefix); prefix != "" && err != nil {
		return nil, "", err
	}
	r, err := s.look(ctx, &lockpb.Request{Call: &lockpb.Request_List{
		List: &lockpb.List{Prefix: prefix, After: after, Limit: listPage},
	}})
	if err == nil && r.GetNames() == nil {
		err = errNoAnswer
	}
	if err != nil {
		return nil, "", err
	}
	for _, n := range r.GetNames().Names {
		page = append(page, stateOf(n, s.fences()))
	}
	return page, r.GetNames().NextAfter, nil
}

// Force is engine.Forcer's. The server knows the principal itself; r's is not sent. A request without a nonce is not
// repeated after a lost answer, because it could end the next hold.
func (s *service) Force(ctx context.Context, r backend.ForceRequest) (int, error) {
	force := &lockpb.ForceRelease{Name: r.Name, Reason: r.Reason, By: r.By, Token: uint64(r.Token)}
	if r.Nonce != (fencing.Nonce{}) {
		force.Nonce = r.Nonce[:]
	}
	_, err := s.ask(ctx, &call{
		request: onBehalf(ctx, &lockpb.Request{Call: &lockpb.Request_ForceRelease{ForceRelease: force}}),
		once:    force.Nonce == nil,
	})
	switch {
	case errors.Is(err, backend.ErrNotHeld):
		return 0, nil
	case err != nil:
		return 0, err
	}
	return 1, nil
}
