// This file decides who is refused: an attempt without Wait behind another entry, and a request that does not go with
// the present use of the name.
//
// The difficulty is that every request makes its node before it knows whether it is refused, so that entries stand in
// the queue which are about to leave. Only an entry that stays may refuse another one.
//
// An example: a reader holds, and a writer tries without waiting. Its node stands behind the reader's, and it is
// refused. Before it has removed its node, a second reader tries. The queue that it reads is reader, writer, and
// itself, and the writer is in its way. But the writer will go, and the first reader lets others in, so that the
// second one must not be refused: it waits for the writer's node to go, and holds. With the plain rule of the queue it
// would be refused now and then, in a name that only readers hold (refusedAttemptsRefuseNobody in the tests).
//
// blocked sorts the entries in front into firm ones, which hold or wait, and passing ones, which are refused
// themselves. Only a firm entry refuses ours. Where the queue cannot tell, because an entry of an attempt may have
// been granted and may have gone since, the own node is removed first and the leader is asked whether the other one
// stays.

package zookeeper

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
)

// passTime bounds how long an attempt waits, over all of its tries, for others that are refused and remove their
// entries. They need one round trip for that. An older one belongs to a client that has died, and its
// entry stays until the session expires, up to 20 ticks later: the attempt is then refused because of it, instead of
// waiting for so long.
const passTime = time.Second

// read reads an entry. It is false if the entry has gone, or was foreign: a foreign node is not ephemeral, whatever its
// name.
func (a *attempt) read(ctx context.Context, s *session, e entry) (node found, ok bool, err error) {
	node, err = s.get(ctx, e.path, false)
	switch {
	case errors.Is(err, zk.ErrNoNode):
		return node, false, nil
	case err != nil:
		return node, false, err
	case node.stat.EphemeralOwner == 0:
		a.noteForeign(e)
		return node, false, nil
	}
	return node, true, nil
}

// noteForeign remembers a foreign node that looks like an entry, so that the attempt does not reread it at each turn. A
// persistent node in the place of an entry would otherwise close the name indefinitely, since nobody removes it (clause
// N4).
func (a *attempt) noteForeign(e entry) {
	if a.foreign == nil {
		a.foreign = map[string]bool{}
	}
	a.foreign[e.path] = true
}

// first returns the first entry that really is one, with its content.
func (a *attempt) first(ctx context.Context, s *session, front []entry) (held, bool, error) {
	for _, e := range front {
		node, ok, err := a.read(ctx, s, e)
		if ok || err != nil {
			return held{entry: e, found: node}, ok, err
		}
	}
	return held{}, false, nil
}

// blocked is called for an attempt with an entry, own, that block, a part of front, keeps waiting. It returns nil when
// the queue must be reread. Otherwise it removes the entry and returns the reason of the refusal: it does not
// wait, or the name is in use for something else.
//
// The entry that refuses ours may itself belong to an attempt about to leave, and then is no reason. Where the
// queue shows that it was never granted, blocked waits until it has gone (letPass). Where it may have left because of
// a holder who has gone since, blocked looks whether it stays (stay), and removes our own node first, so that it
// stands in nobody's way meanwhile.
//
// errGone with a.held set means that the reason has gone while we looked: retry, and if the tries are used up, say
// who held the name last.
func (a *attempt) blocked(ctx context.Context, s *session, h *hold, front, block []entry, own entry) error {
	odd := slices.ContainsFunc(front, func(e entry) bool { return !e.Mixes(own.Use) })
	// The usual wait: all entries in front go with the request.
	if a.r.Wait && !odd {
		return a.await(ctx, s, h, block)
	}
	first, ok, err := a.first(ctx, s, front)
	if err != nil || !ok {
		return err
	}
	// Begin with the first entry alone: if it alone refuses ours, no other entry needs to be read.
	firm, sure, why := []entry{first.entry}, false, heldError(a.r.Name, first)
	refused := func(by []entry) bool { return len(blockers(by, own)) > 0 }
	switch {
	case !first.Mixes(own.Use):
		// The kind of the first entry is the use of the name. Others that do not go with ours do not go
		// with the first one either, and are refused themselves. Until they have gone they stand in the way: the first
		// one may go before they look.
		why, refused = mismatchError(a.r.Name, first), func(by []entry) bool { return len(by) > 0 }
	case a.r.Wait:
		return a.await(ctx, s, h, block)
	case refused(firm):
		sure = !first.Try
	default:
		// The first entry would let ours in; somebody behind it does not.
		var passing []entry
		behind := front[slices.IndexFunc(front, func(e entry) bool { return e.path == first.path })+1:]
		if firm, passing, err = a.sift(ctx, s, first.entry, behind, refused); err != nil {
			return err
		}
		if sure = !refused(firm); sure {
			if stood, err := a.letPass(ctx, s, h, passing); err != nil || !stood {
				return err
			}
		}
	}
	if err := a.d.leave(ctx, h); err != nil {
		return err
	}
	a.mine = ""
	if !sure {
		stay, err := a.stay(ctx, s, firm)
		if err != nil {
			return err
		}
		if !refused(stay) {
			if !a.r.Wait {
				a.held = heldError(a.r.Name, first)
			}
			return errGone
		}
	}
	return why
}

// sift divides the entries behind the first one into firm and passing ones, and stops as soon as the firm ones are
// reason enough to refuse ours. Firm entries hold, as far as the queue tells, or wait, and nobody overtakes them.
// Passing entries will be refused and leave. Only blocked entries are read, since the others hold in any case; so the
// usual queue, of one holder or of readers, costs no request here.
func (a *attempt) sift(
	ctx context.Context, s *session, first entry, behind []entry, refused func([]entry) bool,
) (firm, passing []entry, err error) {
	firm = []entry{first}
	for _, e := range behind {
		// It does not hold: it waits, or is about to leave. Its content tells which.
		if len(blockers(firm, e)) > 0 {
			node, ok, err := a.read(ctx, s, e)
			if err != nil {
				return nil, nil, err
			}
			if !ok {
				continue
			}
			if node.Try || !e.Mixes(first.Use) {
				passing = append(passing, e)
				continue
			}
		}
		// Reason enough; later entries do not change the answer.
		if firm = append(firm, e); refused(firm) {
			break
		}
	}
	return firm, passing, nil
}

// letPass returns when one of the entries may have gone. It is true if they stood for longer than passTime, which
// means that their client has died. The time runs from the first wait of the attempt, so that a stream of refused
// attempts cannot keep it waiting.
func (a *attempt) letPass(ctx context.Context, s *session, h *hold, passing []entry) (stood bool, err error) {
	if len(passing) == 0 {
		return false, nil // they have gone already
	}
	now := a.d.clock.Now()
	if a.passBy.IsZero() {
		a.passBy = now.Add(passTime)
	}
	bounded, cancel := context.WithTimeout(ctx, a.passBy.Sub(now))
	defer cancel()
	err = a.await(bounded, s, h, passing)
	if bounded.Err() != nil && ctx.Err() == nil {
		return true, nil
	}
	return false, err
}

// stay returns the entries that the leader still knows. The proof makes the session's server as new as the
// leader, so that a removal which is done is seen.
func (a *attempt) stay(ctx context.Context, s *session, some []entry) ([]entry, error) {
	if err := s.prove(ctx, a.d.clock.Now()); err != nil {
		return nil, err
	}
	queue, err := s.children(ctx, a.dir)
	return slices.DeleteFunc(some, func(e entry) bool { return place(queue, e.path) < 0 }), err
}

// heldError tells who stands first in the queue. RetryAfter stays empty: ZooKeeper does not tell one client how long
// the session of another one lasts.
func heldError(name string, first held) error {
	return &backend.HeldError{Name: name, Holder: first.Owner, HoldID: first.HoldID}
}

// mismatchError names the present use of a name, and the user if the entry names it.
func mismatchError(name string, by held) error {
	return &backend.LimitError{Name: name, Kind: by.Kind, Limit: by.Limit, Holder: by.Owner}
}
