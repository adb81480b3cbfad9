package zookeeper

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// passTime bounds how long an attempt waits for others that are refused, and remove their entries.
const passTime = time.Second

// read reads an entry. It is false if the entry has gone, or was none: a foreign node is not ephemeral, whatever its
// name.
func (a *attempt) read(ctx context.Context, s *session, e entry) (node found, ok bool, err error) {
	node, err = s.get(ctx, e.path)
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

func (a *attempt) noteForeign(e entry) {
	if a.foreign == nil {
		a.foreign = map[string]bool{}
	}
	a.foreign[e.path] = true
}

// first returns the first entry that is really one.
func (a *attempt) first(ctx context.Context, s *session, front []entry) (held, bool, error) {
	for _, e := range front {
		node, ok, err := a.read(ctx, s, e)
		if ok || err != nil {
			return held{entry: e, found: node}, ok, err
		}
	}
	return held{}, false, nil
}

// checkUse refuses a request for a name that is in use otherwise: the first entry tells. Others that do not go with
// ours do not go with the first one either, and are refused themselves; until they have gone they stand in the way,
// since the first one may go before they look. It is true if the queue must be read again.
func (a *attempt) checkUse(ctx context.Context, s *session, h *hold, front []entry) (again bool, err error) {
	mixes := func(e entry) bool { return e.Mixes(kit.UseOf(a.r)) }
	if !slices.ContainsFunc(front, func(e entry) bool { return !mixes(e) }) {
		return false, nil
	}
	first, ok, err := a.first(ctx, s, front)
	if err != nil || !ok || mixes(first.entry) {
		return !ok, err
	}
	if err := a.leave(ctx, s, h); err != nil {
		return false, err
	}
	// It may be on its way out, refused by one that stood before it. Look whether it stays.
	stays, err := a.stay(ctx, s, []entry{first.entry}, func([]entry) bool { return true })
	switch {
	case err != nil:
		return false, err
	case !stays:
		return false, a.passed(first)
	}
	return false, mismatchError(first)
}

// leave removes our entry.
func (a *attempt) leave(ctx context.Context, s *session, h *hold) error {
	a.d.setReleasing(h)
	if err := s.remove(ctx, h.path); err != nil && !errors.Is(err, zk.ErrNoNode) {
		return err
	}
	a.mine = ""
	return nil
}

// passed is the error of an attempt that stepped back for somebody who has gone.
func (a *attempt) passed(first held) error {
	if !a.r.Wait {
		a.held = heldError(a.r.Name, first)
	}
	return errGone
}

// stepBack leaves the queue, in which an attempt has no place. Without an error the queue must be read again.
//
// The entry before ours may belong to another attempt that is about to leave. It is no reason to refuse ours. If the
// queue shows that it was never granted, wait until it has gone. If it may have left because of a holder who has gone
// since, look whether it stays.
func (a *attempt) stepBack(ctx context.Context, s *session, h *hold, front []entry, own entry) error {
	first, ok, err := a.first(ctx, s, front)
	if err != nil || !ok {
		return err
	}
	firm := []entry{first.entry}
	refused := func(by []entry) bool { return len(blockers(by, own)) > 0 }
	sure := refused(firm) && !first.Try
	if !refused(firm) {
		behind := front[slices.IndexFunc(front, func(e entry) bool { return e.path == first.path })+1:]
		var passing []entry
		firm, passing, err = a.sift(ctx, s, first.entry, behind, refused)
		if err != nil {
			return err
		}
		if !refused(firm) {
			if stood, err := a.letPass(ctx, s, h, passing); err != nil || !stood {
				return err
			}
			sure = true
		}
	}
	if err := a.leave(ctx, s, h); err != nil {
		return err
	}
	if !sure {
		stays, err := a.stay(ctx, s, firm, refused)
		if err != nil {
			return err
		}
		if !stays {
			return a.passed(first)
		}
	}
	return heldError(a.r.Name, first)
}

// sift divides the entries behind the first one into firm and passing ones, and stops as soon as the firm ones are
// reason enough to refuse ours. Firm entries hold, as far as the queue tells, or wait, and nobody overtakes them.
// Passing entries will be refused and leave.
func (a *attempt) sift(
	ctx context.Context, s *session, first entry, behind []entry, refused func([]entry) bool,
) (firm, passing []entry, err error) {
	firm = []entry{first}
	for _, e := range behind {
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
		if firm = append(firm, e); refused(firm) {
			break
		}
	}
	return firm, passing, nil
}

// letPass returns when one of the entries may have gone. It is true if they stood for too long: whoever made them has
// died.
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

// stay reports whether those of some entries that the leader still knows refuse us.
func (a *attempt) stay(ctx context.Context, s *session, some []entry, refused func([]entry) bool) (bool, error) {
	if err := s.prove(ctx, a.d.clock.Now()); err != nil {
		return false, err
	}
	if len(some) == 1 {
		_, err := s.get(ctx, some[0].path)
		if errors.Is(err, zk.ErrNoNode) {
			return false, nil
		}
		return err == nil, err
	}
	queue, err := s.children(ctx, a.dir)
	if err != nil {
		return false, err
	}
	return refused(slices.DeleteFunc(some, func(e entry) bool { return place(queue, e.path) < 0 })), nil
}

// heldError tells who stands first in the queue. How long that session lasts is not known to ZooKeeper's clients.
func heldError(name string, first held) error {
	return &backend.HeldError{Name: name, Holder: first.Owner, HoldID: first.HoldID}
}

// mismatchError tells what a name is in use for.
func mismatchError(by held) error {
	err := fmt.Errorf("%w: %v", backend.ErrLimitMismatch, by.Use)
	if by.Owner != "" {
		err = fmt.Errorf("%w, by %s", err, by.Owner)
	}
	return err
}
