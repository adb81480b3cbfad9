// This file notices that an ensemble has forgotten acknowledged changes: it was wiped, restored from a backup, or
// replaced by another one behind the same addresses. Such an ensemble would grant a name that is held and reissue
// tokens. The package comment, section History, has the consequences for operators.
//
// session.turnedAway and proof answers call suspect and checkZxid; sessions that open, and watches on the root, call
// recognize. Any finding ends in forgot, after which the driver only returns ErrHistoryLost. It does not restart
// automatically: an operator has to decide that no earlier holder still believes in its lock.

package zookeeper

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
)

// Two things are remembered:
//
//   - the highest zxid of any answer. It goes with every connect request, also of a new session, and a server that has
//     seen less closes the connection. That may be a server which lags behind; so the driver then asks, on a session
//     that claims no zxid, for a transaction. Its zxid comes from a leader with a majority. If it is not above the
//     earlier ones, the history was lost: zxids only grow.
//   - the token space, a random id in the root node. Every session reads and watches it. Another one there, or a
//     missing one, means that somebody has deleted everything, or that this is another ensemble. It catches a case that
//     zxids do not: an ensemble that has counted further than the one before.

// layout is the version of all nodes below the root. A later layout names itself in the root, and is refused.
const layout = 1

// rootValue is the content of the root node.
type rootValue struct {
	Space string `json:"fencelock_space"`
	// Layout is absent from layout 1.
	Layout int `json:"fencelock_layout,omitempty"`
}

// tokenSpace returns the space that the driver has learnt, or "".
func (d *Driver) tokenSpace() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.space
}

// saw notes the zxid of an answer. It is called for every message read, hence without a mutex.
func (d *Driver) saw(zxid int64) {
	for seen := d.zxid.Load(); zxid > seen && !d.zxid.CompareAndSwap(seen, zxid); seen = d.zxid.Load() {
	}
}

// historyLost returns the reason why the driver refuses all calls, or nil.
func (d *Driver) historyLost() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.forgotten
}

// forgot ends every session and every hold of the driver, for good, and returns the error that all calls return from
// then on. The first finding counts; sessions that are being made see it before they become usable.
func (d *Driver) forgot(what, was, now string) error {
	d.mu.Lock()
	// The first finding stays: it names the cause, and later ones are its consequences.
	if d.forgotten == nil {
		d.forgotten = &backend.HistoryError{What: what, Was: was, Now: now}
	}
	err := d.forgotten
	d.mu.Unlock()
	// Outside the mutex: end calls the holders.
	for _, s := range d.sessions.Live() {
		s.end(backend.ReasonHistoryLost)
	}
	return err
}

// suspect finds out, in the background, why a server has refused a client that has seen more than it. It must not
// block, since the goroutine that reads a connection calls it. One question at a time is enough: the next refusal
// repeats it.
func (d *Driver) suspect() {
	if d.ctx.Err() == nil && d.historyLost() == nil && d.suspecting.CompareAndSwap(false, true) {
		d.background(func() {
			defer d.suspecting.Store(false)
			d.recall()
		})
	}
}

// recall compares the zxid of the ensemble's leader with the driver's, on a separate session that lives only for this.
// Its prove calls checkZxid. Without an answer within callTime nothing happens: a server that merely lags refuses the
// client until it has caught up.
func (d *Driver) recall() {
	ctx, cancel := context.WithTimeout(d.ctx, callTime)
	defer cancel()
	s, err := d.connectProbe(ctx)
	if err == nil {
		err = s.prove(ctx, d.clock.Now())
	}
	// prove has found a zxid below the known one. Later clients shall see another space.
	if errors.Is(err, backend.ErrHistoryLost) {
		d.respace(ctx, s)
	}
	s.end(backend.ReasonHistoryLost) // nobody holds anything on it
}

// respace gives an ensemble that was restored from a backup, with its old token space, a new one: it will count from
// the past, and a client that comes later cannot know. The version makes sure that only one of several clients writes.
// That it fails is logged and not answered: the holds of this client are lost in any case.
func (d *Driver) respace(ctx context.Context, s *session) {
	root, err := s.readRoot(ctx)
	if err != nil || root.space != d.tokenSpace() {
		return // there is no space, or another client was first
	}
	if _, err := s.plant(ctx, root); err != nil {
		d.o.Logger.Warn("fencelock/zookeeper: an ensemble without its history keeps the token space", "error", err)
	}
}

// checkZxid compares a zxid that a leader has given to a transaction with the highest that was seen before the
// transaction was sent.
func (d *Driver) checkZxid(seen, given int64) error {
	if given >= seen {
		return nil
	}
	return d.forgot("zxid", fmt.Sprintf("%#x", seen), fmt.Sprintf("%#x", given))
}

// recognize learns the token space on a session, and plants one if it is missing. If the ensemble is another one
// than the driver knew, the error is backend.ErrHistoryLost. A space that somebody else has planted in between is read
// in the next turn and counts. A driver that has known a space never plants one: an empty root is then the sign that
// everything was deleted. A space that this driver has planted is reported: with a typing mistake in the chroot or the
// prefix, it is one that no other program uses.
func (d *Driver) recognize(ctx context.Context, s *session) error {
	planted := ""
	for {
		root, err := s.readRoot(ctx)
		if err != nil {
			return err
		}
		if root.layout > layout {
			// A driver that has known an earlier layout here may have holds in it.
			if d.tokenSpace() != "" {
				return d.forgot("layout of "+d.root, strconv.Itoa(layout), strconv.Itoa(root.layout))
			}
			return &backend.ConfigError{
				Setting: "layout of " + d.root, Value: strconv.Itoa(root.layout), Want: strconv.Itoa(layout),
				Why: "a later version of this package wrote it",
			}
		}
		// Learning and comparing is one step, so that one of two sessions with different spaces notices.
		switch known := d.learnSpace(root.space); {
		case known != root.space:
			return d.forgot("token space", known, cmp.Or(root.space, "none"))
		case known != "":
			if known == planted {
				d.o.Logger.Warn("fencelock/zookeeper: created a new token space; each chroot and prefix has a "+
					"separate one",
					"node", d.root, "space", planted)
			}
			return nil
		}
		if planted, err = s.plant(ctx, root); err != nil {
			return err
		}
	}
}

// learnSpace returns the token space that the driver knows, which is space if it has not known any. An empty space is
// not learnt.
func (d *Driver) learnSpace(space string) (known string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.space == "" {
		d.space = space
	}
	return d.space
}

// rootChanged looks at the root after it has changed under a session.
func (d *Driver) rootChanged(s *session) {
	ctx, cancel := context.WithTimeout(d.ctx, callTime)
	defer cancel()
	_ = d.recognize(ctx, s) // without an answer, the next read of the root finds out
}

// root is the root node as it was read.
type root struct {
	space   string // empty without one
	layout  int    // 0 in the first one
	exists  bool
	version int32
}

// readRoot reads the root node and watches it, where it is there. A root with foreign content, which an
// operator may have made, is not overwritten: its creation identifies it well enough.
func (s *session) readRoot(ctx context.Context) (root, error) {
	node, err := s.read(ctx, s.d.root, true)
	if errors.Is(err, zk.ErrNoNode) {
		return root{}, nil
	}
	if err != nil {
		return root{}, err
	}
	var v rootValue
	if (json.Unmarshal(node.data, &v) != nil || v.Space == "") && len(node.data) > 0 {
		v.Space = fmt.Sprintf("zookeeper-%x-%x", node.stat.Czxid, node.stat.Ctime)
	}
	return root{space: v.Space, layout: v.Layout, exists: true, version: node.stat.Version}, nil
}

// plant gives the root a new token space: 128 random bits, so that no two ensembles ever share one by chance. It makes
// the root, and the nodes above it, where it is missing. Another client may be faster, which is no error: the next read
// counts.
func (s *session) plant(ctx context.Context, r root) (space string, err error) {
	space = "zookeeper-" + backend.NewRequestID()
	text, err := json.Marshal(rootValue{Space: space})
	if err != nil {
		return "", err
	}
	if !r.exists {
		return space, s.d.makePath(ctx, s, s.d.root, text)
	}
	err = s.run(ctx, func(c *zk.Conn) error {
		_, err := c.Set(s.d.root, text, r.version)
		return err
	})
	if errors.Is(err, zk.ErrBadVersion) || errors.Is(err, zk.ErrNoNode) {
		err = nil
	}
	return space, err
}
