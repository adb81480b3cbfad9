package zookeeper

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend/kit"
)

// How often a waiter looks for itself: at first soon, then after pauses that double. Watches make this unnecessary as
// long as none is lost. A look reads the waiter's own node and those that it waits for, and not the queue, so that what
// many waiters cost together grows with their number and not with its square.
const (
	firstLook = time.Second
	lookEvery = 30 * time.Second
)

// errGone: the node that an acquire stood on was deleted by somebody else.
var errGone = errors.New("the node of the request is gone")

// queue waits until no entry before path keeps it waiting, and returns its hold. An attempt without Wait steps back
// instead. Of a node that was found, and not made now, only the path is known.
//
// What says "held" is the queue, read with our own node in it. That the node is our session's is known without another
// request: the session made it under a name that nobody else gives, or the node was read. Only the same request, sent
// by another client, moves it to another session; that session then has to tell its own client.
//
// What stands before our node only ever leaves: the server numbers the nodes of a name in the order of their creation.
// A queue that grants therefore goes on granting while our node stands.
func (a *attempt) queue(ctx context.Context, s *session, b birth) (*hold, error) {
	// From here on the node is known. Its hold is what the watch finds, and what removes the node if we give up.
	h := a.d.addHold(s, b.path, b.zxid, nil)
	a.mine = b.path
	if b.zxid == 0 {
		if err := a.d.watchHold(ctx, h); err != nil {
			return h, a.vanished(h, err)
		}
	}
	a.wake = make(chan struct{}, 1)
	defer a.stopListening(s)
	own := entry{path: b.path, requestID: a.r.RequestID, Use: kit.UseOf(a.r)}
	nodes := b.queue
	b.queue = nil // a waiter keeps nothing that grows with the queue
	for first := true; ; first = false {
		queue := entriesOf(a.dir, nodes)
		if nodes == nil {
			var err error
			if queue, err = s.children(ctx, a.dir); err != nil {
				return h, err
			}
		}
		nodes = nil
		if same := ofRequest(queue, a.r.RequestID); len(same) > 1 && first {
			return a.merge(ctx, s, h, same)
		}
		front, there := before(queue, b.path)
		if !there || h.isGone() {
			return h, a.vanished(h, zk.ErrNoNode)
		}
		front = slices.DeleteFunc(front, func(e entry) bool { return a.foreign[e.path] })
		block := slices.Clone(blockers(front, own))
		if len(block) == 0 {
			a.d.watchLater(h)
			return h, nil
		}
		a.queued = true
		if err := a.blocked(ctx, s, h, front, block, own); err != nil {
			return h, a.vanished(h, err)
		}
		// Whatever woke us: what counts is the state, read with our own node in it.
	}
}

// vanished turns the absence of our node into an error that begins anew.
func (a *attempt) vanished(h *hold, err error) error {
	if !errors.Is(err, zk.ErrNoNode) {
		return err
	}
	a.mine = ""
	return errGone
}

// merge goes on with the older node of the request, which an earlier acquire made; resume removes the one made now.
func (a *attempt) merge(ctx context.Context, s *session, h *hold, same []entry) (*hold, error) {
	a.d.setReleasing(h)
	s.Add(1) // the next hold has a user of its own
	next, err := a.resume(ctx, s, same)
	if next == nil {
		s.Leave(1)
		return h, err
	}
	a.d.dropHold(h)
	return next, err
}

func (d *Driver) setReleasing(h *hold) {
	d.mu.Lock()
	defer d.mu.Unlock()
	h.releasing = true
}

// await returns when one of some entries before ours may have gone; the error is zk.ErrNoNode if ours has.
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
			// Our server has told all it knows. That it knows what the leader knows, the session's proofs see to; a
			// watch that is lost shows in the state.
			gone, err := a.look(ctx, s, h, some)
			if err != nil || gone {
				return err
			}
			pause = min(2*pause, lookEvery)
			look.Reset(jitter(pause))
		}
	}
}

func jitter(d time.Duration) time.Duration { return d*3/4 + rand.N(d/2) }

// watch watches entries that are not watched yet. It is true if one of them has gone, or was none.
func (a *attempt) watch(ctx context.Context, s *session, some []entry) (changed bool, err error) {
	some = slices.DeleteFunc(slices.Clone(some), func(e entry) bool { return !s.listen(e.path, a.wake) })
	for _, e := range some {
		a.heard = append(a.heard, e.path)
	}
	nodes, errs := make([]found, len(some)), make([]error, len(some))
	sideBySide(len(some), func(i int) { nodes[i], errs[i] = s.watch(ctx, some[i].path) })
	for i, node := range nodes {
		foreign := errs[i] == nil && node.stat.EphemeralOwner == 0
		switch {
		case foreign:
			a.noteForeign(some[i])
			changed = true
		case errors.Is(errs[i], zk.ErrNoNode):
			changed = true
		case errs[i] != nil:
			err = errs[i]
		}
		if foreign || errs[i] != nil {
			s.unlisten(some[i].path, a.wake)
		}
	}
	return changed, err
}

func (a *attempt) stopListening(s *session) {
	for _, path := range a.heard {
		s.unlisten(path, a.wake)
	}
	a.heard = nil
}

// lookAtNodes is how many entries a waiter looks at one by one. Where it waits for more it reads the whole queue, at
// once.
const lookAtNodes = 16

// look reports whether one of some entries has gone; the error is zk.ErrNoNode if ours has. The first look watches
// ours: few wait for so long.
func (a *attempt) look(ctx context.Context, s *session, h *hold, some []entry) (gone bool, err error) {
	if gone, err = a.lookAt(ctx, s, some); err == nil {
		err = a.d.seeAgain(ctx, h)
	}
	if errors.Is(err, zk.ErrConnectionClosed) || errors.Is(err, errNoConnection) {
		return false, nil // the place in the queue is kept as long as the session lives
	}
	return gone, err
}

// lookAt reports whether one of some entries has gone.
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
