// This file refuses requests: an attempt without Wait behind another entry, and a request that is incompatible with
// the present use of the name.
//
// Every request makes its node before it is refused, so that the queue has entries which are about to leave. Only an
// entry that stays may refuse another one.
//
// An example: a reader holds, and a writer tries without waiting. Its node stands behind the reader's, and it is
// refused. Before it has removed its node, a second reader tries. The queue that it reads is reader, writer, and
// itself, and the writer blocks it. But the writer will leave, and the first reader admits other readers, so that the
// second one must not be refused: it waits until the writer's node has left, and holds. By the plain rule of the queue
// it would sometimes be refused, in a name that only readers hold (refusedAttemptsRefuseNobody in the tests).
//
// blocked sorts the entries in front into firm ones, which hold or wait, and passing ones, which are refused
// themselves. Only a firm entry refuses the attempt. If the queue does not decide that, because an entry of an attempt
// may have been granted and may have left since, blocked first removes the attempt's own node and then asks the leader
// whether the other entry stays.

package zookeeper

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
)

// passTime is the maximum time that an attempt waits, over all of its tries, for refused attempts to remove their
// entries, which takes one round trip. An older entry belongs to a client that has died, and stays until the session
// expires, up to 20 ticks later: the attempt is then refused because of it, instead of waiting that long.
const passTime = time.Second

// read reads an entry. It returns false if the entry has left, or is foreign: a foreign node is not ephemeral,
// whatever its name.
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

// noteForeign records a foreign node that looks like an entry, so that the attempt does not reread it at each turn. A
// persistent node in the place of an entry would otherwise close the name indefinitely, since no client removes it
// (clause N4).
func (a *attempt) noteForeign(e entry) {
	if a.foreign == nil {
		a.foreign = map[string]bool{}
	}
	a.foreign[e.path] = true
}

// first returns the first entry that is not foreign, with its content.
func (a *attempt) first(ctx context.Context, s *session, front []entry) (held, bool, error) {
	for _, e := range front {
		node, ok, err := a.read(ctx, s, e)
		if ok || err != nil {
			return held{entry: e, found: node}, ok, err
		}
	}
	return held{}, false, nil
}

// blocked is called for an attempt whose entry, own, is blocked by block, a part of front. It returns nil when the
// queue must be reread. Otherwise it removes the entry and returns the reason of the refusal: the request does not
// wait, or the name has another use.
//
// The entry that refuses own may itself belong to an attempt about to leave, and then is no reason. If the queue shows
// that it was never granted, blocked waits until it has left (letPass). If it may leave because of a holder that has
// ended since, blocked asks whether it stays (stay), and first removes own, so that own blocks no other entry
// meanwhile.
//
// errGone with a.held set means that the reason has left meanwhile: retry, and if the tries are used up, return the
// last holder.
func (a *attempt) blocked(ctx context.Context, s *session, h *hold, front, block []entry, own entry) error {
	odd := slices.ContainsFunc(front, func(e entry) bool { return !e.Mixes(own.Use) })
	// The usual wait: all entries in front are compatible with the request.
	if a.r.Wait && !odd {
		return a.await(ctx, s, h, block)
	}
	first, ok, err := a.first(ctx, s, front)
	if err != nil || !ok {
		return err
	}
	// Begin with the first entry alone: if it refuses own, no other entry needs to be read.
	firm, sure, why := []entry{first.entry}, false, heldError(a.r.Name, first)
	refused := func(by []entry) bool { return len(blockers(by, own)) > 0 }
	switch {
	case !first.Mixes(own.Use):
		// The kind of the first entry is the use of the name. Entries that are incompatible with own are incompatible with
		// the first one too, and are refused themselves. Until they have left they block own: the first one may leave before
		// they look.
		why, refused = mismatchError(a.r.Name, first), func(by []entry) bool { return len(by) > 0 }
	case a.r.Wait:
		return a.await(ctx, s, h, block)
	case refused(firm):
		sure = !first.Try
	default:
		// The first entry admits own; an entry behind it may not.
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

// sift divides the entries behind the first one into firm and passing ones, and stops as soon as the firm ones suffice
// to refuse the attempt. Firm entries hold, according to the queue, or wait, and no entry overtakes them. Passing
// entries will be refused and leave. Only blocked entries are read, since the others hold in any case; so the usual
// queue, of one holder or of readers, costs no request here.
func (a *attempt) sift(
	ctx context.Context, s *session, first entry, behind []entry, refused func([]entry) bool,
) (firm, passing []entry, err error) {
	firm = []entry{first}
	for _, e := range behind {
		// It does not hold: it waits, or is about to leave. Its content shows which.
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
		// The firm entries suffice; later entries do not change the answer.
		if firm = append(firm, e); refused(firm) {
			break
		}
	}
	return firm, passing, nil
}

// letPass returns when one of the entries may have left. It returns true if they stayed for longer than passTime,
// which means that their client has died. The time runs from the first wait of the attempt, so that a stream of
// refused attempts cannot keep it waiting.
func (a *attempt) letPass(ctx context.Context, s *session, h *hold, passing []entry) (stood bool, err error) {
	if len(passing) == 0 {
		return false, nil // they have left already
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

// stay returns the entries that the leader still has. The proof brings the session's server up to the leader's state,
// so that the read shows completed removals.
func (a *attempt) stay(ctx context.Context, s *session, some []entry) ([]entry, error) {
	if err := s.prove(ctx, a.d.clock.Now()); err != nil {
		return nil, err
	}
	queue, err := s.children(ctx, a.dir)
	return slices.DeleteFunc(some, func(e entry) bool { return place(queue, e.path) < 0 }), err
}

// heldError returns an error with the first entry in the queue. RetryAfter stays empty: ZooKeeper does not show the
// timeout of another client's session.
func heldError(name string, first held) error {
	return &backend.HeldError{Name: name, Holder: first.Owner, HoldID: first.HoldID}
}

// mismatchError returns an error with the present use of a name, and its user if the entry names one.
func mismatchError(name string, by held) error {
	return &backend.LimitError{Name: name, Kind: by.Kind, Limit: by.Limit, Holder: by.Owner}
}
