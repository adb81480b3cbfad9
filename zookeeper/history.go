// This file detects that an ensemble has lost acknowledged changes: it was wiped, restored from a backup, or replaced
// by another one behind the same addresses. Such an ensemble would grant a name that is held and reissue tokens. The
// package comment, section History, has the consequences for operators.
//
// session.turnedAway and proof answers call suspect and checkZxid; sessions that open, and watches on the root, call
// recognize. Any finding ends in forgot, after which the driver only returns ErrHistoryLost. It does not restart
// automatically: an operator has to make sure that no earlier holder still relies on its lock.

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

// The driver keeps two facts:
//
//   - the highest zxid of any answer. Every connect request has it, even that of a new session, and a server that has
//     seen less closes the connection. That may be a lagging server; so the driver then asks, on a session that claims
//     no zxid, for a transaction. Its zxid comes from a leader with a majority. If it is not above the earlier ones,
//     the history was lost: zxids only grow.
//   - the token space, a random id in the root node. Every session reads and watches it. Another space, or a missing
//     one, means that everything was deleted, or that this is another ensemble. It catches a case that zxids do not:
//     an ensemble with higher zxids than the previous one.

// layout is the version of all nodes below the root. A later layout names itself in the root, and is refused.
const layout = 1

// rootValue is the content of the root node.
type rootValue struct {
	Space string `json:"fencelock_space"`
	// Layout is absent from layout 1.
	Layout int `json:"fencelock_layout,omitempty"`
}

// tokenSpace returns the token space of the driver, or "" before it is known.
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

// forgot ends every session and every hold of the driver permanently, and returns the error that all calls return from
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

// suspect checks, in the background, why a server has refused a client with a higher zxid. It must not block, since
// the goroutine that reads a connection calls it. One check at a time is enough: the next refusal repeats it.
func (d *Driver) suspect() {
	if d.ctx.Err() == nil && d.historyLost() == nil && d.suspecting.CompareAndSwap(false, true) {
		d.background(func() {
			defer d.suspecting.Store(false)
			d.recall()
		})
	}
}

// recall compares the zxid of the ensemble's leader with the driver's, on a separate session that lives only for this.
// Its prove calls checkZxid. Without an answer within callTime it has no effect: a lagging server refuses the client
// until it has caught up.
func (d *Driver) recall() {
	ctx, cancel := context.WithTimeout(d.ctx, callTime)
	defer cancel()
	s, err := d.connectProbe(ctx)
	if err == nil {
		err = s.prove(ctx, d.clock.Now())
	}
	// prove has found a zxid below the known one. Later clients must see another space.
	if errors.Is(err, backend.ErrHistoryLost) {
		d.respace(ctx, s)
	}
	s.end(backend.ReasonHistoryLost) // there are no holds on it
}

// respace writes a new token space into an ensemble that was restored from a backup with its old one: its zxids
// restart in the past, and a later client cannot detect that. The version makes sure that only one of several clients
// writes. A failure is only logged: the holds of this client are lost in any case.
func (d *Driver) respace(ctx context.Context, s *session) {
	root, err := s.readRoot(ctx)
	if err != nil || root.space != d.tokenSpace() {
		return // there is no space, or another client was first
	}
	if _, err := s.plant(ctx, root); err != nil {
		d.o.Logger.Warn("fencelock/zookeeper: an ensemble without its history keeps the token space", "error", err)
	}
}

// checkZxid compares the zxid of a leader's transaction with the highest zxid seen before the transaction was sent.
func (d *Driver) checkZxid(seen, given int64) error {
	if given >= seen {
		return nil
	}
	return d.forgot("zxid", fmt.Sprintf("%#x", seen), fmt.Sprintf("%#x", given))
}

// recognize reads the token space on a session, and plants one if it is missing. If the ensemble differs from the one
// that the driver knew, the error is backend.ErrHistoryLost. A space that another client has planted in between is
// read in the next turn and counts. A driver that has known a space never plants one: an empty root then shows that
// everything was deleted. The driver logs a space that it has planted: after a typing mistake in the chroot or the
// prefix, no other program uses that space.
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
		// learnSpace stores and compares in one step, so that one of two sessions with different spaces detects it.
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

// learnSpace returns the driver's token space, which becomes space if it was empty. An empty space is not stored.
func (d *Driver) learnSpace(space string) (known string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.space == "" {
		d.space = space
	}
	return d.space
}

// rootChanged reads the root after a watch has fired.
func (d *Driver) rootChanged(s *session) {
	ctx, cancel := context.WithTimeout(d.ctx, callTime)
	defer cancel()
	_ = d.recognize(ctx, s) // without an answer, the next read of the root finds out
}

// root is the root node as it was read.
type root struct {
	space   string // empty without one
	layout  int    // 0 in the first layout
	exists  bool
	version int32
}

// readRoot reads the root node and watches it, if it exists. A root with foreign content, which an operator may have
// made, is not overwritten: its creation identifies it well enough.
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

// plant gives the root a new token space: 128 random bits, so that no two ensembles share one by chance. It makes the
// root, and the nodes above it, if it is missing. Another client may be faster, which is no error: the next read
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
