package builtin

// Ping, Look, List and ForceRelease. They use no session and run concurrently with all other calls.

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/fencing"
)

// Ping checks that a leader answers, and that most members follow it; otherwise it returns backend.ErrUnavailable.
//
// It looks up a name that need not be held, because the reply needs the majority and writes no log entry. A leader
// that denies the client that name has answered, too. Other errors are ErrMisconfigured (another protocol), ErrDenied
// (the token is not valid), ErrHistoryLost and ErrClosed, or wrap ctx's error. Unless ctx ends sooner, it takes up to
// 10 seconds while there is no leader.
func (d *Driver) Ping(ctx context.Context) error {
	_, err := d.nameState(ctx, driverName)
	if errors.Is(err, backend.ErrDenied) && !errors.Is(err, errToken) {
		return nil
	}
	return d.callError("ping", "", err)
}

// nameState asks for the holders of a name.
func (d *Driver) nameState(ctx context.Context, name string) (*lockpb.NameState, error) {
	if err := backend.ValidateName(name); err != nil {
		return nil, err
	}
	reply, err := d.look(ctx, &lockpb.Request{Call: &lockpb.Request_GetHolder{
		GetHolder: &lockpb.GetHolder{Name: name},
	}})
	if err == nil && reply.GetName() == nil {
		err = errNoAnswer
	}
	return reply.GetName(), err
}

// look sends a request that changes nothing, so it may be repeated, and without an answer no change is in doubt. It
// enters and leaves the gate.
func (d *Driver) look(ctx context.Context, r *lockpb.Request) (*lockpb.Reply, error) {
	if err := d.begin(ctx); err != nil {
		return nil, err
	}
	defer d.gate.Leave()
	return d.ask(ctx, call{request: onBehalf(ctx, r), looks: true})
}

// Look returns the holders of a name and the number of its waiters, as the leader knows them after a majority has
// confirmed that it leads.
//
// A name without a holder is no error. Holder.ExpiresIn is the time after which the holder's session expires without
// a renewal; Holder.Since is by the leader's wall clock and is for people. Errors wrap backend.ErrInvalidName,
// ErrUnavailable, ErrHistoryLost, ErrClosed, or ctx's.
func (d *Driver) Look(ctx context.Context, name string) (backend.State, error) {
	n, err := d.nameState(ctx, name)
	if err != nil {
		return backend.State{}, d.callError("holder", name, err)
	}
	state := stateOf(n, d.fences())
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

// listPage bounds the names in one page of List: while the leader, or this client, works on a page, all other calls
// wait.
const listPage = 100

// List yields the names that begin with prefix and are held, in the order of their bytes, page by page. Each page
// shows the state at one moment, the pages together do not.
//
// Names that are acquired or released while pages are read may be missing or shown, but no name comes twice. An error
// is the last element. The loop may end early, and its body may call the driver:
//
//	for state, err := range d.List(ctx, "orders/") {
//		if err != nil {
//			return err
//		}
//		fmt.Println(state.Name, state.Holders[0].Owner)
//	}
func (d *Driver) List(ctx context.Context, prefix string) iter.Seq2[backend.State, error] {
	return d.ListAfter(ctx, prefix, "")
}

// ListAfter implements backend.Pager.
func (d *Driver) ListAfter(ctx context.Context, prefix, after string) iter.Seq2[backend.State, error] {
	return func(yield func(backend.State, error) bool) {
		after := after // each loop over the sequence begins at the same name
		if err := backend.ValidateName(prefix); prefix != "" && err != nil {
			yield(backend.State{}, d.callError("list", prefix, err))
			return
		}
		for {
			reply, err := d.look(ctx, &lockpb.Request{Call: &lockpb.Request_List{
				List: &lockpb.List{Prefix: prefix, After: after, Limit: listPage},
			}})
			if err == nil && reply.GetNames() == nil {
				err = errNoAnswer
			}
			if err != nil {
				yield(backend.State{}, d.callError("list", prefix, err))
				return
			}
			page := reply.GetNames()
			for _, n := range page.Names {
				if len(n.Holders) > 0 && !yield(stateOf(n, d.fences()), nil) {
					return
				}
			}
			if after = page.NextAfter; after == "" {
				return
			}
		}
	}
}

// ForceRelease ends the holds that r names, even during their minimum hold. Their holders are notified immediately,
// with backend.ReasonForceReleased. A name without a holder, or without a matching hold, is backend.ErrNotHeld. The
// server knows the principal itself; r's is not sent.
//
// r.Reason is text for people, and is shown to watchers of the name. The first waiters are granted in the same step.
// After backend.ErrUnknown, look at the holder before you call ForceRelease again: the name may have another holder by
// now.
func (d *Driver) ForceRelease(ctx context.Context, r backend.ForceRequest) error {
	return d.callError("force-release", r.Name, d.forceRelease(ctx, &r))
}

// forceRelease is ForceRelease without the error's frame.
func (d *Driver) forceRelease(ctx context.Context, r *backend.ForceRequest) error {
	if err := kit.ValidateForce(d.Describe(), r); err != nil {
		return err
	}
	if err := d.begin(ctx); err != nil {
		return err
	}
	defer d.gate.Leave()
	force := &lockpb.ForceRelease{Name: r.Name, Reason: r.Reason, By: r.By, Token: uint64(r.Token)}
	if r.Nonce != (fencing.Nonce{}) {
		force.Nonce = r.Nonce[:]
	}
	// A call without a nonce is not repeated after a lost answer, because it could end the next hold.
	request := onBehalf(ctx, &lockpb.Request{Call: &lockpb.Request_ForceRelease{ForceRelease: force}})
	_, err := d.ask(ctx, call{once: r.Nonce == (fencing.Nonce{}), request: request})
	return err
}
