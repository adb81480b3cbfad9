// This file is the life of one Acquire, from the check of the request to the grant or its error.
//
// The parts call each other in this order. Acquire names the call in errors. acquire repeats attempt.once until there
// is a definite answer, and attempt.giveUp handles the leftovers of a failure. once picks the session and hands over
// to take, which makes the node (create), or continues with the node of an earlier try (resume). From there queue.go
// waits, refuse.go refuses, and hold.go keeps the hold.
//
// Two facts of ZooKeeper shape all of it. A client cannot know that a node exists until the answer arrives, so the
// node's name carries the request id, and a second try looks for it before it makes another. And the server executes
// the requests of one session in the order in which they were sent, so an attempt uses one session while that session
// lives; the requests of a session that has ended are either done or will never be done.

package zookeeper

import (
	"context"
	"errors"
	"fmt"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/notify"
)

// tries is the maximum number of tries of an attempt without Wait, of an attempt to prove a session for another call,
// and of a deletion that the server throttles. A waiter is bounded only by its context.
const tries = 3

// Acquire takes a lock and returns a grant with a token above every earlier token of the name: the zxid of the
// transaction that created the node.
//
// Without r.Wait it makes one attempt, of up to three tries if the connection breaks. With r.Wait the request stays in
// the name's queue and watches the entries before it that block it; it returns when it holds the lock or when ctx ends,
// and its node is then removed in the background. The grant's TTL is the session's timeout, which the servers grant
// between 2 and 20 ticks, and SentAt is the latest instant from which the session is proved to live for its timeout
// less the margin of Describe.
//
// A repeated RequestID gets the same hold with the same token, even from another client. Errors wrap backend.ErrHeld,
// ErrLimitMismatch, ErrUnavailable (no node was created, or its removal is in progress), ErrUnknown (a node may have
// been created), ErrMisconfigured (a right, a quota or another setting of the servers), ErrHistoryLost (another
// ensemble answers), ErrInvalidTTL (outside the servers' bounds), an error of kit.Validate or of the options,
// ErrClosed, or ctx's own error. Acquire is safe for concurrent use; acquires of one client with one TTL share a
// session.
func (d *Driver) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	g, err := d.acquire(ctx, r)
	if err != nil {
		return backend.Grant{}, d.callError("acquire", r.Name, err)
	}
	return g, nil
}

// acquire is Acquire without the name of the call. It must count the call in before anything else, so that Close waits
// for it, and must adopt the leftover of an earlier acquire of the same request before it sends a request: the removal
// of that leftover would otherwise delete the node that this call is about to make.
//
// The tries of one attempt go to the session on which the leftover was made, if its TTL is still the requested one. On
// another session the read that looks for the leftover could overtake its creation.
func (d *Driver) acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	ctx, end, err := d.begin(ctx)
	if err != nil {
		return backend.Grant{}, err
	}
	defer end()
	if err := kit.Validate(d.Describe(), r); err != nil {
		return backend.Grant{}, err
	}
	// From here on this call owns the leftover of an earlier acquire of the request.
	left, err := d.adopt(ctx, r.Name, r.RequestID)
	if err != nil {
		return backend.Grant{}, err
	}

	a := &attempt{d: d, r: r, dir: d.dir(r.Name), slot: d.slotFor(r.TTL, r.Name), began: d.clock.Now()}
	// The server executes requests of one session in order: the try finds the leftover, or the leftover will never be
	// made.
	if left != nil && left.slot.ttl == r.TTL {
		a.slot = left.slot
	}
	for n := 1; ; n++ {
		g, err := a.once(ctx)
		if err == nil {
			return g, nil
		}
		if !a.worthRepeating(err, n) || ctx.Err() != nil {
			return backend.Grant{}, a.giveUp(ctx, err)
		}
		// The error keeps the reason for the repetition only if no request was sent; otherwise the context's error is
		// enough.
		if ended := kit.Sleep(ctx, kit.RetryPause(r.TTL)); ended != nil {
			if errors.Is(err, errNoConnection) {
				ended = fmt.Errorf("%w: %w", err, ended)
			}
			return backend.Grant{}, a.giveUp(ctx, ended)
		}
	}
}

// attempt is one Acquire, over all its tries. Only the goroutine of the call uses it, so that it needs no mutex;
// signals of other goroutines arrive through wake.
type attempt struct {
	// The request, and its place.
	d     *Driver
	r     backend.Request
	dir   string
	slot  slot // of its session: the requests of a try are done before those of the next try, or never will be
	began backend.Instant

	// The known state of the attempt's node.
	unknown bool   // a request that makes a node may have been done without an answer
	spent   bool   // the numbers of the queue are used up, see spent.go
	queued  bool   // another entry has blocked the attempt's
	resumed bool   // the node was found, and may be an earlier acquire's
	mine    string // the existing node, if known
	hold    *hold  // on mine

	// The state of the wait in queue.go and refuse.go between its turns.
	foreign map[string]bool // nodes that look like entries, which no client will remove
	wake    notify.Signal   // an entry before ours has changed
	heard   []string        // the paths for which wake was entered in session.watched
	passBy  backend.Instant // see letPass
	held    error           // the reason why the last try withdrew
}

// worthRepeating reports whether the n-th try of an attempt failed with an error that the next try may avoid, such as
// a lost session or connection (see transient). Without any connection, an attempt without Wait is not repeated, since
// ErrUnavailable is correct and costs its caller little; only waiters retry.
func (a *attempt) worthRepeating(err error, n int) bool {
	if errors.Is(err, backend.ErrHeld) || !transient(err) {
		return false
	}
	broke := !errors.Is(err, errNoConnection) || errors.Is(err, zk.ErrConnectionClosed)
	return a.r.Wait || n < tries && broke
}

// giveUp turns the error of the last try into the caller's error, and makes sure that no node remains.
//
// A node that is known to exist is deleted in the background, and the error stays as it is. If a creation may have
// been done without an answer, the error becomes ErrUnknown and the driver records a leftover (see abandon). The
// caller then repeats or releases the request; if it does neither, the driver removes the leftover within one TTL.
// giveUp cannot delete the node before it returns: Acquire must return within 50 ms of its context's end (clause C2),
// and noticing an unresponsive server takes seconds.
func (a *attempt) giveUp(ctx context.Context, err error) error {
	if lost := a.d.historyLost(); lost != nil {
		if errors.Is(err, lost) {
			return err
		}
		return fmt.Errorf("%w: %w", lost, err) // the requests went to an ensemble that no longer exists
	}
	if cause := context.Cause(ctx); errors.Is(cause, backend.ErrClosed) {
		// The driver was closed; the caller's context has not ended. Close ends the session and its nodes.
		err = cause
	} else if a.held != nil && errors.Is(err, errGone) {
		err = a.held // each try met another holder
	}
	if a.mine != "" && !errors.Is(err, errSessionLost) {
		// A node that another attempt of the request has adopted stays. A lost session has no nodes.
		if a.d.leaving(a.mine, a.hold) {
			a.d.removeLater(a.hold.session, a.mine, a.hold.version, a.hold)
		}
	}
	if errors.Is(err, backend.ErrHeld) {
		return err
	}
	if a.unknown {
		a.d.abandon(a.r, a.slot)
		if errors.Is(err, backend.ErrUnknown) {
			return err
		}
		return fmt.Errorf("%w: %w", backend.ErrUnknown, err)
	}
	return err
}

// removeLater deletes a node, marked as leaving, after its call has returned. It retries in the background until the
// node is certainly gone, and disowns the node if the server refuses the deletion. A node that another client has
// taken over stays. Its hold, if it has one, stays in Driver.holds meanwhile, marked as releasing, so that its session
// keeps a user and is not retired with the node still on it.
func (d *Driver) removeLater(s *session, path string, version int32, h *hold) {
	d.background(func() {
		err := d.repeat(d.ctx, func(ctx context.Context) error { return s.remove(ctx, path, version) })
		d.left(path)
		if forbidden(err) {
			d.disown(s, path, version, h)
			return
		}
		d.dropHold(h)
	})
}

// once makes one try on one session: it puts a node into the queue, waits for its turn, waits for a recent proof of
// the session, and grants the hold unless it has been lost meanwhile.
//
// The user that sessionFor counts belongs to the hold as soon as there is a hold; otherwise once releases it. After
// errSessionLost the attempt has no node: the servers delete the session's nodes with it, and the driver's connection
// never carries requests of an ended session (see dial).
func (a *attempt) once(ctx context.Context) (backend.Grant, error) {
	s, err := a.d.sessionFor(ctx, a.slot, a.r.Wait)
	if err != nil {
		a.note(err)
		return backend.Grant{}, err
	}
	h, err := a.take(ctx, s)
	if err == nil {
		err = s.proveUntil(ctx, a.since(s))
	}
	if err == nil && !a.d.grant(h, a.r.Lost) {
		err = errSessionLost
	}
	if err != nil {
		if h == nil {
			s.Leave(1)
			a.d.leftDir(a.dir)
		} else if a.mine == "" {
			a.d.dropHold(h)
		}
		if errors.Is(err, errSessionLost) {
			a.mine, a.unknown = "", false // the session has no nodes, and none of its requests will be delivered
		}
		return backend.Grant{}, err
	}
	// The steps that could lose the hold are over: its node exists, the session is proved, and grant has entered the
	// callback for a loss.
	g := grantOf(a.r, h)
	g.Queued = a.queued
	return g, nil
}

// since returns the earliest instant from which the grant's validity may count. A session in use was proved some time
// ago, so that part of the validity of a new grant is over: a third at most. The validity of a hold that is granted
// again counts from the beginning of the call or later, since its caller asks for a fresh validity.
//
// A proof per acquire would add a logged transaction to each; all acquires of a TTL share the keepalive's.
func (a *attempt) since(s *session) backend.Instant {
	since := a.d.clock.Now().Add(-a.d.Describe().Validity(s.ttl) / 3)
	if a.resumed {
		return max(since, a.began)
	}
	return since
}

// note records whether err means that a request with an effect may have been done without an answer. The next try must
// then look for its node, and giveUp must return ErrUnknown.
func (a *attempt) note(err error) {
	if unanswered(err) {
		a.unknown = true
	}
}

// take puts a node into the queue, or finds the request's node, and returns its hold when it is granted. If the hold
// exists by the time of an error, take returns both: the session's user then belongs to the hold, and the caller has
// to drop the hold.
//
// The node is made before the queue is read, also for an attempt without Wait. An earlier read would cost every
// attempt one more round trip, and a queue without this node does not determine its place.
func (a *attempt) take(ctx context.Context, s *session) (*hold, error) {
	if a.unknown || a.mine != "" {
		// An earlier try may have made the node. After the proof the read shows the leader's state, with all earlier changes
		// of this session.
		if err := s.prove(ctx, a.d.clock.Now()); err != nil {
			return nil, err
		}
		own, err := a.own(ctx, s)
		if err != nil {
			return nil, err
		}
		if len(own) > 0 {
			return a.resume(ctx, s, own)
		}
		a.unknown, a.mine = false, "" // the creation was lost, or the node was deleted
	}
	if a.spent {
		if err := a.startAnew(ctx, s); err != nil {
			return nil, err
		}
	}
	b, err := a.create(ctx, s)
	if err != nil {
		return nil, err
	}
	return a.queue(ctx, s, b)
}

// own returns the nodes of the request, except nodes that its earlier attempts are removing.
func (a *attempt) own(ctx context.Context, s *session) ([]entry, error) {
	for {
		queue, err := s.children(ctx, a.dir)
		if err != nil {
			return nil, err
		}
		own := ofRequest(queue, a.r.RequestID)
		if waited, err := a.d.awaitLeaving(ctx, own); err != nil || !waited {
			return own, err
		}
	}
}

// create makes the node, and reads the queue behind it in the same round trip; askBirth in wire.go sends both requests
// in one write.
//
// The node of the name may be missing, because the name is new or because a client removed its empty node. For a name
// that this driver has not used lately, the wire sends a creation of that node before the creation of the entry: this
// saves new names a round trip, and a goroutine for which other requests would wait. For a name that was used lately,
// that request would be wasted; ErrNoNode shows that it was needed. An operator's script, or another client, may
// remove the node each time, so create repeats this remakes times at most.
func (a *attempt) create(ctx context.Context, s *session) (birth, error) {
	v := valueOf(a.r)
	data, err := v.encode()
	if err != nil {
		return birth{}, err
	}
	for missing, n := !a.d.useDir(a.dir), 0; ; n++ {
		if missing {
			s.makeFirst(a.dir)
		}
		b, err := do(ctx, s, a.late(s), func(c *zk.Conn) (birth, error) {
			text, err := c.Create(a.dir+"/"+nodeName(a.r)+".", data, zk.FlagEphemeral|zk.FlagSequence, a.d.o.ACL)
			return readBirth(text), err
		})
		if errors.Is(err, zk.ErrNoNode) && n < remakes {
			// At the first failure the root may be missing, too. Later failures mean that another client removes the name's
			// node whenever it is empty, so the wire sends both creations together.
			if missing = n > 0; missing {
				continue
			}
			if err = a.d.makeDir(ctx, s, a.dir); err == nil {
				continue
			}
		}
		// A node of the same name exists only when the server's count has reached its end.
		if errors.Is(err, zk.ErrNodeExists) {
			a.spent, err = true, errSpent
		}
		if err != nil {
			s.takeMissing(a.dir)
			a.note(err)
			return birth{}, err
		}
		a.unknown = false
		b.nonce = v.nonce()
		return b, nil
	}
}

// late returns a function for a creation that is answered after its acquire has ended: no call has the node, so the
// function deletes it. If a repetition of the request has found the node by its name meanwhile, the node is in
// Driver.holds and stays.
func (a *attempt) late(s *session) func(birth, error) {
	return func(b birth, err error) {
		if err != nil {
			return
		}
		if a.d.leaving(b.path, nil) {
			a.d.removeLater(s, b.path, b.version, nil)
		}
	}
}

// resume continues with the request's existing node, which makes an acquire idempotent.
//
// A node on another session moves to s with its place and its token. If a creation was repeated there is more than one
// node; the oldest counts, and the others are deleted first, so that the request never blocks itself. A request for
// another use than that of its node (another kind, other permits) is refused with ErrLimitMismatch: changing the
// node's name would give it a new place in the queue.
func (a *attempt) resume(ctx context.Context, s *session, own []entry) (*hold, error) {
	for _, e := range own[1:] {
		if err := s.remove(ctx, e.path, anyVersion); err != nil && !errors.Is(err, zk.ErrNoNode) {
			return nil, err
		}
	}
	node, err := s.get(ctx, own[0].path, false)
	if errors.Is(err, zk.ErrNoNode) {
		return nil, errGone
	}
	if err != nil {
		return nil, err
	}
	a.unknown, a.resumed = false, true
	if own[0].Use != kit.UseOf(a.r) {
		return nil, mismatchError(a.r.Name, held{own[0], node})
	}
	version := node.stat.Version
	if node.stat.EphemeralOwner != s.id {
		if version, err = a.d.move(ctx, s, own[0].path, node); err != nil {
			a.note(err)
			return nil, err
		}
	}
	return a.queue(ctx, s, birth{path: own[0].path, version: version})
}

// move replaces a node by one with the same name, content and token on session s, in one transaction. The sequence
// number is part of the name so that the place in the queue stays; the content carries the token, because the new node
// has its own zxid. Creating first and deleting afterwards is impossible with equal names, and any order in two
// requests would leave an instant in which another client finds the name free.
//
// Writes into the new node give it another version than the old one, so that a late removal or another late move of
// the old node does not affect it. If the ACL gives no right to write, the version stays 0; then only the read before
// each removal and each move protects the new node.
func (d *Driver) move(ctx context.Context, s *session, path string, node found) (version int32, err error) {
	v := node.value
	v.Format = 1
	data, err := v.encode()
	if err != nil {
		return 0, err
	}
	ops := []any{
		&zk.DeleteRequest{Path: path, Version: node.stat.Version},
		&zk.CreateRequest{Path: path, Data: data, Acl: d.o.ACL, Flags: zk.FlagEphemeral},
	}
	for range node.stat.Version%movedVersions + 1 {
		ops = append(ops, &zk.SetDataRequest{Path: path, Data: data, Version: version})
		version++
	}
	err = s.multi(ctx, ops...)
	if errors.Is(err, zk.ErrNoAuth) {
		version, err = 0, s.multi(ctx, ops[:2]...)
	}
	switch {
	case errors.Is(err, zk.ErrNoNode):
		err = errGone
	case errors.Is(err, zk.ErrBadVersion):
		err = errStale
	}
	return version, err
}

// movedVersions is the number of versions through which moved nodes cycle.
const movedVersions = 7

// held is an entry of a queue with its content.
type held struct {
	entry
	found
}
