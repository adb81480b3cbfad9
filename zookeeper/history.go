package zookeeper

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// history is what the driver knows of the ensemble's past. An ensemble that contradicts it was wiped, restored from a
// backup, or replaced by another one behind the same addresses: it would grant a name that is held and reissue tokens.
// The first contradiction is final, and an operator has to act: see the package comment. The driver keeps two facts:
//
//   - the highest zxid of any answer. Every connect request has it, even that of a new session, and a server that has
//     seen less closes the connection. That may be a lagging server; so the driver then asks, on a session that claims
//     no zxid, for a transaction. Its zxid comes from a leader with a majority. If it is not above the earlier ones,
//     the history was lost: zxids only grow.
//   - the token space, a random id in the root node. Every session reads and watches it. Another space, or a missing
//     one, means that everything was deleted, or that this is another ensemble. It catches a case that zxids do not:
//     an ensemble with higher zxids than the previous one.
type history struct {
	zxid       atomic.Int64
	suspecting atomic.Bool // recall runs

	mu    sync.Mutex // protects the following fields
	space string     // "" until it is known
	lost  error
}

// layout is the version of all nodes below the root. A later layout names itself in the root, and is refused.
const layout = 1

// rootValue is the content of the root node.
type rootValue struct {
	Space string `json:"fencelock_space"`
	// Layout is absent from layout 1.
	Layout int `json:"fencelock_layout,omitempty"`
}

// saw notes the zxid of an answer.
func (h *history) saw(zxid int64) {
	for seen := h.zxid.Load(); zxid > seen && !h.zxid.CompareAndSwap(seen, zxid); seen = h.zxid.Load() {
	}
}

// err is the error that the history is lost, or nil.
func (h *history) err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.lost
}

// learn returns the known token space, which becomes space if it was unknown. An empty space is not stored.
func (h *history) learn(space string) (known string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.space = cmp.Or(h.space, space)
	return h.space
}

// note notes that the history is lost. The first finding stays: later ones are its consequences.
func (h *history) note(what, was, now string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lost = cmp.Or(h.lost, error(&backend.HistoryError{What: what, Was: was, Now: now}))
	return h.lost
}

// lose notes that the history is lost, ends all sessions, and returns the error of all calls from then on.
func (e *service) lose(what, was, now string) error {
	err := e.history.note(what, was, now)
	for _, s := range e.all() {
		s.end()
	}
	return err
}

// checkZxid compares the zxid that a leader has given to a transaction with the highest that was seen before.
func (e *service) checkZxid(seen, given int64) error {
	if given >= seen {
		return nil
	}
	return e.lose("zxid", hex(seen), hex(given))
}

func hex(zxid int64) string { return fmt.Sprintf("%#x", zxid) }

// root is the root node as it was read. A root with foreign content, which an operator may have made, is not
// overwritten: its creation identifies it well enough.
type root struct {
	rootValue
	exists  bool
	version int32
}

func rootOf(a reply) (root, error) {
	n, err := a.node()
	if errors.Is(err, codeNoNode) {
		return root{}, nil
	}
	if err != nil {
		return root{}, err
	}
	var v rootValue
	if (json.Unmarshal(n.data, &v) != nil || v.Space == "") && len(n.data) > 0 {
		v.Space = fmt.Sprintf("zookeeper-%x-%x", n.stat.Czxid, n.stat.Ctime)
	}
	return root{v, true, n.stat.Version}, nil
}

// compareRoot compares the root as it was read with the known token space, which it learns.
func (e *service) compareRoot(a reply) error {
	r, err := rootOf(a)
	if err != nil {
		return err
	}
	known := e.history.learn("")
	switch {
	case r.Layout > layout && known != "": // this driver may have holds in the former layout
		return e.lose("layout of "+e.root, strconv.Itoa(layout), strconv.Itoa(r.Layout))
	case r.Layout > layout:
		return &backend.ConfigError{
			Setting: "layout of " + e.root, Value: strconv.Itoa(r.Layout), Want: strconv.Itoa(layout),
			Why: "a later version of this package wrote it",
		}
	}
	if known = e.history.learn(r.Space); known != r.Space {
		return e.lose("token space", known, cmp.Or(r.Space, "none"))
	}
	return nil
}

// Probe is engine.Prober's: it learns the token space, or plants one if it is missing. Drivers that begin at once
// agree, because each plants only over the version that it has read. A driver that has known a space never plants one:
// an empty root then shows that everything was deleted.
func (e *service) Probe(ctx context.Context) error {
	s, err := e.any(ctx)
	if err != nil {
		return err
	}
	for planted := ""; ; {
		replies, err := s.ask(ctx, confirmed(), getData(e.root, true), getData(configNode, false))
		if err != nil {
			return err
		}
		if err := ignore(replies[0].failed(), codeNoAuth); err != nil {
			return err
		}
		if config, err := replies[2].node(); err == nil { // without the right to read it, one server is declared
			e.quorum.Store(voters(string(config.data)) > 1)
		}
		if err := e.compareRoot(replies[1]); err != nil {
			return err
		}
		if known := e.history.learn(""); known != "" {
			if known == planted {
				e.o.Logger.Warn("fencelock/zookeeper: created a new token space; each chroot and prefix has a separate one",
					"node", e.root, "space", planted)
			}
			return nil
		}
		r, err := rootOf(replies[1])
		if err == nil {
			planted, err = e.plant(ctx, s, r)
		}
		if err != nil {
			return err
		}
	}
}

// plant gives the root a new token space: 128 random bits, so that no two ensembles share one by chance. It makes the
// root, and the nodes above it, if it is missing. Another client may be faster, which is no error: the next read
// counts.
func (e *service) plant(ctx context.Context, s *session, r root) (space string, err error) {
	space = "zookeeper-" + backend.NewRequestID()
	text, _ := json.Marshal(rootValue{Space: space}) // of text
	if !r.exists {
		return space, e.makePath(ctx, s, e.root, text)
	}
	replies, err := s.do(ctx, setData(e.root, text, r.version))
	if err == nil {
		err = ignore(replies[0].err, codeBadVersion, codeNoNode)
	}
	return space, err
}

// makePath makes a node, and those above it only if they are missing: the user may have no right to make them.
func (e *service) makePath(ctx context.Context, s *session, node string, data []byte) error {
	for again := false; ; again = true {
		replies, err := s.do(ctx, create(opCreate, node, data, e.o.ACL, 0))
		if err != nil {
			return err
		}
		err = ignore(replies[0].err, codeNodeExists)
		if !errors.Is(err, codeNoNode) || again || path.Dir(node) == "/" {
			return err
		}
		if err := e.makePath(ctx, s, path.Dir(node), nil); err != nil {
			return err
		}
	}
}

// recallTimeout is the maximum time of recall.
const recallTimeout = 3 * time.Second

// recall finds out why a server has refused a client with a higher zxid: it asks for a transaction on a session that
// claims nothing. If the history is lost, it gives an ensemble that was restored with its old token space a new one:
// its zxids restart in the past, and a later client cannot detect that. Without an answer it has no effect: a lagging
// server refuses the client until it has caught up.
func (e *service) recall(ctx context.Context, address string) {
	if !e.history.suspecting.CompareAndSwap(false, true) {
		return // one at a time is enough: the next refusal repeats it
	}
	defer e.history.suspecting.Store(false)
	ctx, cancel := context.WithTimeout(ctx, recallTimeout)
	defer cancel()
	seen := e.history.zxid.Load()
	s := e.question(ctx, address, time.Millisecond)
	defer s.end()
	if s.opened(ctx) != nil {
		return
	}
	replies, err := s.do(ctx, confirmed(), getData(e.root, false))
	if err != nil || ignore(replies[0].failed(), codeNoAuth) != nil || replies[0].zxid >= seen {
		return
	}
	if r, err := rootOf(replies[1]); err == nil && r.exists && r.Space == e.history.learn("") {
		_ = e.history.note("zxid", hex(seen), hex(replies[0].zxid)) // before another session reads the new space
		if _, err := e.plant(ctx, s, r); err != nil {
			e.o.Logger.Warn("fencelock/zookeeper: an ensemble without its history keeps the token space", "error", err)
		}
	}
	_ = e.lose("zxid", hex(seen), hex(replies[0].zxid))
}
