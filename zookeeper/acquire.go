package zookeeper

import (
	"context"
	"errors"
	"fmt"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// tries is how often an attempt without Wait is made when its answer got lost.
const tries = 3

// Acquire takes a lock, with a token that is higher than all that the name ever had: the transaction number of its
// node. With Wait the request stands in the name's queue, and watches whoever stands before it; when ctx ends its node
// is removed. The same RequestID again gets the same hold. Errors wrap backend.ErrHeld, ErrUnavailable (nothing was
// sent), ErrUnknown (what the request may have left could not be removed), ErrHistoryLost (another ensemble answers),
// or ctx's error.
func (d *Driver) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	g, err := d.acquire(ctx, r)
	if err != nil {
		return backend.Grant{}, d.callError("acquire", r.Name, err)
	}
	return g, nil
}

func (d *Driver) acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	if err := d.begin(ctx); err != nil {
		return backend.Grant{}, err
	}
	defer d.gate.Leave()
	if err := kit.Validate(d.Describe(), r); err != nil {
		return backend.Grant{}, err
	}
	bounded, done := d.gate.Bind(ctx)
	defer done()
	left, err := d.adopt(bounded, r.Name, r.RequestID)
	if err != nil {
		return backend.Grant{}, err
	}

	a := &attempt{d: d, r: r, dir: d.dir(r.Name), slot: d.slotFor(r.TTL, r.Name), began: d.clock.Now()}
	if left != nil && left.slot.ttl == r.TTL {
		a.slot = left.slot
	}
	for n := 1; ; n++ {
		g, err := a.once(bounded)
		if err == nil {
			return g, nil
		}
		if !a.worthRepeating(err, n) || bounded.Err() != nil {
			return backend.Grant{}, a.giveUp(bounded, err)
		}
		if ended := kit.Sleep(bounded, kit.RetryPause(r.TTL)); ended != nil {
			if errors.Is(err, errNoConnection) {
				ended = fmt.Errorf("%w: %w", err, ended)
			}
			return backend.Grant{}, a.giveUp(bounded, ended)
		}
	}
}

// attempt is one Acquire, over all repetitions.
type attempt struct {
	d       *Driver
	r       backend.Request
	dir     string
	slot    slot // of its session: what a repetition sent has been done before the next one asks, or never will be
	began   backend.Instant
	unknown bool   // a request that makes a node left and was not answered
	queued  bool   // the name was taken
	resumed bool   // the node may be that of an earlier acquire
	mine    string // the node that stands, if it is known

	foreign map[string]bool // nodes that look like entries, and nobody will ever remove them
	wake    chan struct{}   // says that an entry before ours has changed
	heard   []string        // what wakes it, or did
	passBy  backend.Instant // see letPass
	held    error           // why an attempt stepped back last
}

// worthRepeating reports whether an attempt that failed may do better: the session or the connection was lost under it.
// Where no connection came about, only those who wait go on.
func (a *attempt) worthRepeating(err error, n int) bool {
	if errors.Is(err, backend.ErrHeld) || !transient(err) {
		return false
	}
	broke := !errors.Is(err, errNoConnection) || errors.Is(err, zk.ErrConnectionClosed)
	return a.r.Wait || n < tries && broke
}

// giveUp adds to err what is known about what the attempts left. A place in the queue is removed in the background. If
// the outcome is not known, the caller decides: the same request again, or Release. If it does neither, the driver
// removes what was left.
func (a *attempt) giveUp(ctx context.Context, err error) error {
	if lost := a.d.historyLost(); lost != nil {
		if errors.Is(err, lost) {
			return err
		}
		return fmt.Errorf("%w: %w", lost, err) // whatever was sent, went to an ensemble that is no more
	}
	if cause := context.Cause(ctx); errors.Is(cause, backend.ErrClosed) {
		err = cause // Close ends the session, and the node goes with it
	} else if a.held != nil && errors.Is(err, errGone) {
		err = a.held // each time by somebody else
	}
	if a.mine != "" && !errors.Is(err, errSessionLost) {
		a.d.removeLater(a.mine)
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

// removeLater deletes a node that nobody waits for any more, in the background, until it is known to be gone.
func (d *Driver) removeLater(path string) {
	h := d.releasingAt(path)
	if h == nil {
		return // the session has ended
	}
	d.background(func() {
		d.repeat(d.ctx, func(ctx context.Context) error { return h.session.remove(ctx, path) })
		d.dropHold(h)
	})
}

// once makes an attempt on a session.
func (a *attempt) once(ctx context.Context) (backend.Grant, error) {
	s, err := a.d.sessionFor(ctx, a.slot)
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
			a.mine, a.unknown = "", false // nothing of that session stands, and nothing of it is delivered any more
		}
		return backend.Grant{}, err
	}
	g := grantOf(a.r, h)
	g.Queued = a.queued
	return g, nil
}

// since tells how old the proof may be on which the grant's validity rests. That of a session which others use may be
// old, and would give a short validity: a third of it may be over. A hold that is granted again has a new one.
func (a *attempt) since(s *session) backend.Instant {
	since := a.d.clock.Now().Add(-a.d.Describe().Validity(s.ttl) / 3)
	if a.resumed {
		return max(since, a.began)
	}
	return since
}

// note remembers that a request which changes something was not answered.
func (a *attempt) note(err error) {
	if !errors.Is(err, errNoConnection) && (kit.IsContext(err) || errors.Is(err, zk.ErrConnectionClosed)) {
		a.unknown = true
	}
}

// take puts a node into the queue and returns its hold when it is the first. It returns the hold with an
// error too, since the hold counts as a user of its session.
//
// The node is made before the queue is read, also for an attempt without Wait: a read that came first would cost every
// attempt one more round trip, and could show an old state.
func (a *attempt) take(ctx context.Context, s *session) (*hold, error) {
	if a.unknown || a.mine != "" {
		// An earlier repetition may have made the node. The proof makes the read as new as the leader's state, with all
		// that this session did before.
		if err := s.prove(ctx, a.d.clock.Now()); err != nil {
			return nil, err
		}
		queue, err := s.children(ctx, a.dir)
		if err != nil {
			return nil, err
		}
		if own := ofRequest(queue, a.r.RequestID); len(own) > 0 {
			return a.resume(ctx, s, own)
		}
		a.unknown, a.mine = false, "" // what was sent has been lost, and what stood has gone
	}
	b, err := a.create(ctx, s)
	if err != nil {
		return nil, err
	}
	return a.queue(ctx, s, b)
}

// create makes the node, and reads the queue behind it in the same round trip. What the wire sends in front, to make
// the name's node, belongs to it.
func (a *attempt) create(ctx context.Context, s *session) (birth, error) {
	data, err := valueOf(a.r).encode()
	if err != nil {
		return birth{}, err
	}
	for missing, n := !a.d.useDir(a.dir), 0; ; n++ {
		if missing {
			s.makeFirst(a.dir)
		}
		b, err := do(ctx, s, a.late(s), func(c *zk.Conn) (birth, error) {
			path, err := c.Create(a.dir+"/"+nodeName(a.r)+".", data, zk.FlagEphemeral|zk.FlagSequence, a.d.o.ACL)
			if b := s.takeBirth(path); b != nil {
				<-b.done
				return *b, err
			}
			return birth{path: path}, err
		})
		if errors.Is(err, zk.ErrNoNode) && n < remakes {
			// The first time the root may be missing, too. Later somebody removes the name each time that it is empty,
			// and is left no time for it.
			if missing = n > 0; missing {
				continue
			}
			if err = a.d.makeDir(ctx, s, a.dir); err == nil {
				continue
			}
		}
		if err != nil {
			s.takeMissing(a.dir)
			a.note(err)
			return birth{}, err
		}
		a.unknown = false
		return b, nil
	}
}

// late returns what to do with a node that is made after its acquire gave up: nobody knows it, unless the request was
// repeated and found it.
func (a *attempt) late(s *session) func(birth, error) {
	return func(b birth, err error) {
		if err != nil {
			return
		}
		a.d.mu.Lock()
		known := a.d.holds[b.path] != nil
		a.d.mu.Unlock()
		if !known {
			a.d.background(func() {
				a.d.repeat(a.d.ctx, func(ctx context.Context) error { return s.remove(ctx, b.path) })
			})
		}
	}
}

// resume goes on with the node that the request has. If it stands on another session it moves to s: place and token
// stay, which is what makes an acquire idempotent. More than one node was made if a creation was repeated; the first
// one counts. A request that has a node for another use than now is refused.
func (a *attempt) resume(ctx context.Context, s *session, own []entry) (*hold, error) {
	for _, e := range own[1:] {
		if err := s.remove(ctx, e.path); err != nil && !errors.Is(err, zk.ErrNoNode) {
			return nil, err
		}
	}
	node, err := s.get(ctx, own[0].path)
	if errors.Is(err, zk.ErrNoNode) {
		return nil, errGone
	}
	if err != nil {
		return nil, err
	}
	a.unknown, a.resumed = false, true
	if own[0].Use != kit.UseOf(a.r) {
		return nil, mismatchError(held{own[0], node})
	}
	if node.stat.EphemeralOwner != s.id {
		if err := a.d.move(ctx, s, own[0].path, node.value); err != nil {
			a.note(err)
			return nil, err
		}
	}
	return a.queue(ctx, s, birth{path: own[0].path})
}

// move replaces a node by one with the same name, content and token on session s, in one transaction.
func (d *Driver) move(ctx context.Context, s *session, path string, v value) error {
	v.Format = 1
	data, err := v.encode()
	if err != nil {
		return err
	}
	err = s.multi(ctx, &zk.DeleteRequest{Path: path, Version: -1},
		&zk.CreateRequest{Path: path, Data: data, Acl: d.o.ACL, Flags: zk.FlagEphemeral})
	if errors.Is(err, zk.ErrNoNode) {
		return errGone
	}
	return err
}

// held is an entry with its content.
type held struct {
	entry
	found
}

// before returns the entries before a path, the oldest first, and whether the path is there.
func before(queue []entry, path string) ([]entry, bool) {
	at := place(queue, path)
	return queue[:max(at, 0)], at >= 0
}
