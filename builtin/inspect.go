package builtin

// Looking: Ping, Look, List and ForceRelease. They name no session and work beside all others.

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/fencing"
)

// Ping makes sure that a leader answers, and that most members follow it; backend.ErrUnavailable otherwise.
//
// It asks for a name that nobody need hold, because that answer needs the majority; it writes nothing into the log.
// Other errors are ErrMisconfigured (another protocol), ErrHistoryLost and ErrClosed, or wrap ctx's error. Without a
// ctx that ends sooner it takes up to 10 seconds while nobody leads.
func (d *Driver) Ping(ctx context.Context) error {
	_, err := d.nameState(ctx, driverName)
	return d.callError("ping", "", err)
}

// nameState asks who holds a name.
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

// look asks for something that changes nothing: sent again it does no harm, and without an answer nothing is in doubt.
// It counts itself in at the gate, and out.
func (d *Driver) look(ctx context.Context, r *lockpb.Request) (*lockpb.Reply, error) {
	if err := d.begin(ctx); err != nil {
		return nil, err
	}
	defer d.gate.Leave()
	return d.ask(ctx, call{request: r, looks: true})
}

// Look tells who holds a name and how many wait for it, as the leader knows it after a majority has confirmed that it
// leads.
//
// A name that nobody holds is no error. Holder.ExpiresIn is how long the holder's session lives unless it is renewed;
// Holder.Since is by the leader's wall clock and is for people. Errors wrap backend.ErrInvalidName, ErrUnavailable,
// ErrHistoryLost, ErrClosed, or ctx's.
func (d *Driver) Look(ctx context.Context, name string) (backend.State, error) {
	n, err := d.nameState(ctx, name)
	if err != nil {
		return backend.State{}, d.callError("holder", name, err)
	}
	state := stateOf(n, d.fences())
	state.Name = name
	return state, nil
}

// errNoAnswer: the server does not keep to the protocol.
var errNoAnswer = fmt.Errorf("%w: the server answers something else", backend.ErrUnavailable)

// stateOf is a name in the words of the contract. Tokens of a server that is not durable are left out: they do not
// fence.
func stateOf(n *lockpb.NameState, fences bool) backend.State {
	info := backend.State{
		Name: n.Name, Held: len(n.Holders) > 0, Waiters: int(n.Waiters), Revision: n.Revision,
	}
	for _, h := range n.Holders {
		holder := backend.Holder{
			Owner: h.Owner, HoldID: h.HoldId, Kind: kindOf(h.Kind), Permits: int(h.Permits),
			Since: time.Unix(0, h.SinceUnixNanos), ExpiresIn: time.Duration(h.ExpiresInNanos), Metadata: h.Metadata,
		}
		if fences {
			holder.Token = fencing.Token(h.Token)
		}
		info.Holders = append(info.Holders, holder)
	}
	return info
}

// kindsOut are the kinds on the wire; kindOf is the other way.
var kindsOut = map[backend.Kind]lockpb.Kind{
	backend.KindExclusive: lockpb.Kind_KIND_EXCLUSIVE,
	backend.KindShared:    lockpb.Kind_KIND_SHARED,
	backend.KindPermits:   lockpb.Kind_KIND_PERMITS,
}

// kindOf is the kind of a hold; one that this version does not know is shown as exclusive, the strictest.
func kindOf(k lockpb.Kind) backend.Kind {
	switch k {
	case lockpb.Kind_KIND_SHARED:
		return backend.KindShared
	case lockpb.Kind_KIND_PERMITS:
		return backend.KindPermits
	}
	return backend.KindExclusive
}

// listPage is how many names List asks for at once: what the leader, and this client, need for a page is what the locks
// of others wait for meanwhile.
const listPage = 100

// List yields the names that begin with prefix and are held, in the order of their bytes, page by page. Each page shows
// one moment, the pages together do not.
//
// What is taken or given back while pages are read may be shown or not, but no name comes twice. An error ends it, as
// the last element. Leaving the loop early costs nothing, and its body may call the driver:
//
//	for state, err := range d.List(ctx, "orders/") {
//		if err != nil {
//			return err
//		}
//		fmt.Println(state.Name, state.Holders[0].Owner)
//	}
func (d *Driver) List(ctx context.Context, prefix string) iter.Seq2[backend.State, error] {
	return func(yield func(backend.State, error) bool) {
		after := ""
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

// ForceRelease ends all holds of name; a minimum hold ends too. Their holders are told at once, with
// backend.ReasonForceReleased. A name that nobody holds is backend.ErrNotHeld.
//
// reason is text for people: those who watch the name read it. The first waiters are granted in the same step. After
// backend.ErrUnknown look who holds the name before calling it again: it may be the next holder by now.
func (d *Driver) ForceRelease(ctx context.Context, name, reason string) error {
	return d.callError("force-release", name, d.forceRelease(ctx, name, reason))
}

// forceRelease is ForceRelease without the error's frame.
func (d *Driver) forceRelease(ctx context.Context, name, reason string) error {
	if err := cmp.Or(backend.ValidateName(name), kit.ValidateText("reason", reason)); err != nil {
		return err
	}
	if err := d.begin(ctx); err != nil {
		return err
	}
	defer d.gate.Leave()
	// Sent again after a lost answer it would hit the next holder.
	_, err := d.ask(ctx, call{once: true, request: &lockpb.Request{Call: &lockpb.Request_ForceRelease{
		ForceRelease: &lockpb.ForceRelease{Name: name, Reason: reason},
	}}})
	return err
}
