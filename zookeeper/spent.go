// This file restarts a queue whose numbers are used up. See maxNumber: that takes 2³⁰ requests for one name that is
// never free for 2 s, after which the node of an unused name is removed.
//
// Every client that would hold an entry with such a number leaves the queue, and makes no entry before the name's node
// has been removed. The node cannot be removed while it has an entry, such as one of a client without this bound,
// which may hold. The requests then come in any order to the new node: once in 2³⁰ requests the queue is not FIFO.

package zookeeper

import (
	"context"
	"errors"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// errSpent: the entry of an acquire had a number too high to hold, and has left the queue.
var errSpent = errors.New("the sequence numbers of the name's queue are exhausted; they restart when the queue is " +
	"empty")

// The pauses between two looks at a queue that is to restart.
const (
	firstSpentLook = 10 * time.Millisecond
	spentLookEvery = time.Second
)

// stepDown removes an entry that must not hold, and returns errSpent, after which take restarts the queue.
func (a *attempt) stepDown(ctx context.Context, s *session, h *hold) error {
	if err := a.d.leave(ctx, h); err != nil {
		return err
	}
	a.mine, a.spent = "", true
	return errSpent
}

// startAnew returns when the name's node is missing, or another client has remade it. It removes the node when it has
// no entries. After passTime the error of an attempt without Wait is backend.ErrHeld, and a foreign node, which no
// client removes, is backend.ErrMisconfigured for all requests.
func (a *attempt) startAnew(ctx context.Context, s *session) error {
	now := a.d.clock.Now
	patience := now().Add(passTime)
	for pause := firstSpentLook; ; pause = min(2*pause, spentLookEvery) {
		stat, err := s.stat(ctx, a.dir)
		if err != nil {
			return err
		}
		if stat != nil && spentCount(stat) && stat.NumChildren == 0 {
			err = s.run(ctx, func(c *zk.Conn) error { return c.Delete(a.dir, -1) })
			stat = nil
		}
		switch {
		case errors.Is(err, zk.ErrNotEmpty): // another client has added an entry
		case err != nil && !errors.Is(err, zk.ErrNoNode):
			return err
		case stat == nil || !spentCount(stat):
			a.spent = false
			return nil
		}
		if now() > patience {
			if err := a.staysSpent(ctx, s); err != nil {
				return err
			}
		}
		if err := kit.Sleep(ctx, jitter(pause)); err != nil {
			return err
		}
	}
}

// staysSpent returns why the queue does not restart, if that is an answer to the request.
func (a *attempt) staysSpent(ctx context.Context, s *session) error {
	nodes, err := s.names(ctx, a.dir)
	if err != nil || len(nodes) == 0 {
		return err
	}
	first, ok, err := a.first(ctx, s, entriesOf(a.dir, nodes))
	switch {
	case err != nil || ok && a.r.Wait:
		return err
	case ok:
		return heldError(a.r.Name, first)
	}
	return &backend.ConfigError{
		Setting: "node of the name " + a.r.Name, Value: a.dir, Want: "no children but entries of locks",
		Why: "its count is used up and it cannot be removed: delete " + a.dir + "/" + nodes[0] +
			" and its other foreign children",
	}
}
