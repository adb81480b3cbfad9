// This file waits for the turn of an entry: it reads the queue, watches the blockers of the entry, and rereads the
// queue.
//
// kit.Blockers decides the holders. queue applies it to a fresh read; await sleeps until one of the blockers may have
// left; watch and lookAt detect that, by the server's notification and by a look at intervals. A notification never
// grants. It only makes the waiter reread the queue, so that a lost, late, or outdated notification does no harm.

package zookeeper

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/notify"
)

// The pauses between a waiter's looks: the first look comes after about a second, the next ones after pauses that
// double up to half a minute, each drawn between three and five quarters of its length so that the waiters of one
// client do not look together.
//
// The looks are needed only if a watch is lost; the contract requires this fallback because notifications do get lost.
// A look reads the waiter's own node and its blockers, and not the queue. The cost of many waiters therefore grows
// with their number and not with its square: reading the queue each time, 2,000 waiters on one name would each read
// 2,000 names.
const (
	firstLook = time.Second
	lookEvery = 30 * time.Second
)

// errGone: another client deleted the node of an acquire.
var errGone = errors.New("the node of the request is gone")

// errStale: a node to be moved has changed since it was read.
var errStale = errors.New("the node of the request has changed")

// queue waits until no entry before the node of b blocks it, and returns its hold. An attempt without Wait is refused
// instead (see blocked). If this try found the node and did not make it, b has only its path.
//
// The queue, read with this node in it, decides "held". It is certain without another request that the node belongs to
// this session: the session made it under a unique name, or has just read the node. Only the same request, sent by
// another client, moves it to another session; that session then reports to its own client.
//
// Entries before a node can only leave, because the server numbers the nodes of a name in the order of their creation,
// up to maxNumber. A queue that grants therefore still grants while the node exists, and no second read is needed to
// confirm it. An entry with a higher number waits for entries with lower numbers, which are before it, and then leaves
// instead of holding.
//
// The hold is entered in Driver.holds before the wait: from then on a watch event for the path finds the hold, and
// giveUp finds the node.
func (a *attempt) queue(ctx context.Context, s *session, b birth) (*hold, error) {
	// From here on the node is known: a watch event finds its hold, and giveUp removes the node.
	h := a.d.addHold(s, b.path, b.zxid, b.version, nil)
	if h == nil {
		return nil, errGone
	}
	a.mine, a.hold = b.path, h
	// The node was found, not made: read it, for its token and nonce, and watch it in the same request.
	if b.zxid != 0 {
		h.nonce = b.nonce
	} else if err := a.d.see(ctx, h); err != nil {
		return h, a.vanished(err)
	}
	// Room for one wake-up is enough, since a full read follows.
	a.wake, a.heard = notify.New(), nil
	defer func() { s.unlisten(a.heard, a.wake) }()
	nodes := b.queue
	b.queue = nil // a waiter's memory does not grow with the queue
	for first := true; ; {
		queue := entriesOf(a.dir, nodes)
		if nodes == nil {
			var err error
			if queue, err = s.children(ctx, a.dir); err != nil {
				return h, err
			}
		}
		nodes = nil
		// An earlier acquire of the request may have made a node unknown to this one.
		if first {
			same := ofRequest(queue, a.r.RequestID)
			if waited, err := a.d.awaitLeaving(ctx, same); err != nil {
				return h, err
			} else if waited {
				continue
			}
			if len(same) > 1 {
				return a.merge(ctx, s, h, same)
			}
			first = false
		}
		at := place(queue, b.path)
		if at < 0 || h.isGone() {
			return h, a.vanished(zk.ErrNoNode)
		}
		// A foreign node that looks like an entry does not block.
		own := queue[at]
		front := slices.DeleteFunc(queue[:at], func(e entry) bool { return a.foreign[e.path] || e.spent() })
		block := slices.Clone(blockers(front, own))
		switch {
		case len(block) > 0:
		case own.spent():
			return h, a.stepDown(ctx, s, h)
		default:
			return h, nil
		}
		a.queued = true
		if err := a.blocked(ctx, s, h, front, block, own); err != nil {
			return h, a.vanished(err)
		}
		// After any wake-up only the state counts, read with this node in it.
	}
}

// vanished turns the absence of the attempt's node into an error that makes acquire retry. There is no node to remove
// any more, so it clears mine.
func (a *attempt) vanished(err error) error {
	if !errors.Is(err, zk.ErrNoNode) {
		return err
	}
	a.mine = ""
	return errGone
}

// merge continues with the older node of the request, which an earlier acquire made and which was not known when this
// acquire created its own. resume deletes the younger node. merge first marks the hold of that node as releasing, so
// that the deletion is not reported as a loss.
func (a *attempt) merge(ctx context.Context, s *session, h *hold, same []entry) (*hold, error) {
	a.d.setReleasing(h)
	s.Add(1) // the next hold counts as another user
	next, err := a.resume(ctx, s, same)
	if next == nil {
		s.Leave(1)
		if errors.Is(err, errGone) {
			a.mine = "" // both nodes have ended
		}
		return h, err
	}
	a.d.dropHold(h)
	return next, err
}

// setReleasing marks a hold as released by the driver itself: its end is no loss and is not reported.
func (d *Driver) setReleasing(h *hold) {
	d.mu.Lock()
	defer d.mu.Unlock()
	h.releasing = true
}

// await returns nil when one of some entries before h may have left, and the queue should be reread. The error is
// zk.ErrNoNode if the node of h is missing, errSessionLost if the session has ended, or the end of ctx.
//
// It owns one timer, which it stops when it returns, and no goroutine: the library's event callback fills a.wake,
// which has room for one wake-up, and goneLocked closes h.gone.
func (a *attempt) await(ctx context.Context, s *session, h *hold, some []entry) error {
	if changed, err := a.watch(ctx, s, some); err != nil || changed {
		return err
	}
	pause := firstLook
	look := time.NewTimer(jitter(pause))
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return kit.Ended(ctx)
		case <-s.Over():
			return errSessionLost
		case <-h.gone:
			return zk.ErrNoNode
		case <-a.wake:
			return nil
		case <-look.C:
			// The session's server has reported its state. The session's proofs make sure that this is the leader's state; a
			// lost watch shows in the state.
			gone, err := a.look(ctx, s, h, some)
			if err != nil || gone {
				return err
			}
			pause = min(2*pause, lookEvery)
			look.Reset(jitter(pause))
		}
	}
}

// jitter spreads a pause over the half around d.
func jitter(d time.Duration) time.Duration { return d*3/4 + rand.N(d/2) }

// watch sets a watch on each of some entries that this attempt does not watch yet, concurrently. It returns true if
// one of them has left already, or is a foreign node. It listens on the session before it asks the server, so that it
// does not miss a notification that overtakes the answer.
func (a *attempt) watch(ctx context.Context, s *session, some []entry) (changed bool, err error) {
	some = slices.DeleteFunc(slices.Clone(some), func(e entry) bool { return !s.listen(e.path, a.wake) })
	for _, e := range some {
		a.heard = append(a.heard, e.path)
	}
	nodes, errs := make([]found, len(some)), make([]error, len(some))
	sideBySide(len(some), func(i int) { nodes[i], errs[i] = s.get(ctx, some[i].path, true) })
	for i, node := range nodes {
		switch {
		case errors.Is(errs[i], zk.ErrNoNode):
			changed = true
		case errs[i] != nil:
			err = errs[i]
		case node.stat.EphemeralOwner == 0:
			a.noteForeign(some[i])
			changed = true
		}
	}
	return changed, err
}

// lookAtNodes is the maximum number of entries that a waiter reads one by one. A waiter for permits may wait for many
// more: beyond this it reads the whole queue, in one request.
const lookAtNodes = 16

// look reports whether one of some entries has left; the error is zk.ErrNoNode if the node of h is missing. The first
// look also sets the watch on that node: most waits end earlier, so that a watch set at the start would cost every
// waiter a request for the few that wait for a second.
//
// A lost connection is no error: the place in the queue is kept as long as the session lives, and the next look
// repeats the question.
func (a *attempt) look(ctx context.Context, s *session, h *hold, some []entry) (gone bool, err error) {
	if gone, err = a.lookAt(ctx, s, some); err == nil {
		err = a.d.see(ctx, h)
	}
	if errors.Is(err, zk.ErrConnectionClosed) || errors.Is(err, errNoConnection) {
		return false, nil
	}
	return gone, err
}

// lookAt reports whether one of some entries has left, by one request for each or by one for the queue.
func (a *attempt) lookAt(ctx context.Context, s *session, some []entry) (gone bool, err error) {
	if len(some) > lookAtNodes {
		queue, err := s.children(ctx, a.dir)
		return slices.ContainsFunc(some, func(e entry) bool { return place(queue, e.path) < 0 }), err
	}
	there, errs := make([]bool, len(some)), make([]error, len(some))
	sideBySide(len(some), func(i int) {
		var stat *zk.Stat
		stat, errs[i] = s.stat(ctx, some[i].path)
		there[i] = stat != nil
	})
	return slices.Contains(there, false), errors.Join(errs...)
}
