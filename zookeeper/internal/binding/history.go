package binding

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

	"github.com/fencelock/fencelock/backend"
)

// history is what the driver knows of the ensemble's past. An ensemble that contradicts it was wiped, restored from a
// backup, or is another one behind the same addresses. The first contradiction is final.
//
//   - The highest zxid of any answer goes with every connect request, also of a new session, and a server that has seen
//     less closes the connection. It may only lag behind: so the driver then asks, on a session that claims no zxid, for
//     a transaction. Its zxid comes from a leader with a majority. If it is not above the earlier ones, the history was
//     lost: zxids only grow.
//   - The token space is a random id in the root node. Every session reads and watches it. Another one there, or a
//     missing one, means that somebody has deleted everything, or that this is another ensemble. It catches a case that
//     zxids do not: an ensemble that has counted further than the one before.
type history struct {
	zxid atomic.Int64

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

func (h *history) seen() int64 { return h.zxid.Load() }

// err is the error that the history is lost, or nil.
func (h *history) err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.lost
}

// learn returns the known token space, which is space if none was known. An empty space is not learnt.
func (h *history) learn(space string) (known string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.space = cmp.Or(h.space, space)
	return h.space
}

// lose notes that the history is lost, ends all sessions, and returns the error of all calls from then on.
func (e *service) lose(what, was, now string) error {
	h := &e.history
	h.mu.Lock()
	if h.lost == nil {
		h.lost = &backend.HistoryError{What: what, Was: was, Now: now}
	}
	err := h.lost
	h.mu.Unlock()
	for _, s := range e.all() {
		s.end(backend.ReasonHistoryLost)
	}
	return err
}

// root is the root node as it was read. A root with foreign content, which an operator may have made, is not
// overwritten: its creation identifies it well enough.
type root struct {
	space   string // empty without one
	layout  int    // 0 in the first one
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
	return root{v.Space, v.Layout, true, n.stat.Version}, nil
}

// compareRoot compares the root as it was read with the known one. It does not learn a space that is missing.
func (e *service) compareRoot(a reply) error {
	r, err := rootOf(a)
	switch {
	case err != nil:
		return err
	case r.layout > layout && e.history.learn("") != "":
		return e.lose("layout of "+e.root, strconv.Itoa(layout), strconv.Itoa(r.layout))
	case r.layout > layout:
		return &backend.ConfigError{
			Setting: "layout of " + e.root, Value: strconv.Itoa(r.layout), Want: strconv.Itoa(layout),
			Why: "a later version of this package wrote it",
		}
	}
	if known := e.history.learn(r.space); known != r.space {
		return e.lose("token space", known, cmp.Or(r.space, "none"))
	}
	return nil
}

// Probe is engine.Prober's: it learns the token space, or plants one if it is missing. Drivers that begin at once agree,
// because each plants only over the version that it has read. A driver that has known a space never plants one.
func (e *service) Probe(ctx context.Context) error {
	s, err := e.any(ctx)
	if err != nil {
		return err
	}
	planted := ""
	for {
		replies, err := s.do(ctx, confirmed(), getData(e.root, true), getData(configNode, false))
		if err != nil {
			return err
		}
		if _, _, err := replies[0].results(); err != nil && !isOneOf(err, codeNoAuth) {
			return err
		}
		if config, err := replies[2].node(); err == nil {
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
		if err != nil {
			return err
		}
		if planted, err = e.plant(ctx, s, r); err != nil {
			return err
		}
	}
}

// Ping is engine.Service's.
func (e *service) Ping(ctx context.Context) error { return e.Probe(ctx) }

// plant gives the root a new token space. It makes the root, and the nodes above it, where it is missing. Another client
// may be faster, which is no error: the next read counts.
func (e *service) plant(ctx context.Context, s *session, r root) (space string, err error) {
	space = "zookeeper-" + backend.NewRequestID()
	text, _ := json.Marshal(rootValue{Space: space})
	if !r.exists {
		return space, e.makePath(ctx, s, e.root, text)
	}
	replies, err := s.do(ctx, setData(e.root, text, r.version))
	if err == nil && !isOneOf(replies[0].err, codeBadVersion, codeNoNode) {
		err = replies[0].err
	}
	return space, err
}

// makePath makes a node, and those above it only where they are missing: the user may have no right to make them.
func (e *service) makePath(ctx context.Context, s *session, node string, data []byte) error {
	for again := false; ; again = true {
		replies, err := s.do(ctx, create(opCreate, node, data, e.o.ACL, 0))
		if err != nil {
			return err
		}
		switch err = replies[0].err; {
		case errors.Is(err, codeNodeExists):
			return nil
		case !errors.Is(err, codeNoNode) || again || path.Dir(node) == "/":
			return err
		}
		if err := e.makePath(ctx, s, path.Dir(node), nil); err != nil {
			return err
		}
	}
}

// checkZxid compares the zxid that a leader has given to a transaction with the highest that was seen before it was
// sent.
func (e *service) checkZxid(_ context.Context, seen, given int64) error {
	if given >= seen {
		return nil
	}
	return e.lose("zxid", fmt.Sprintf("%#x", seen), fmt.Sprintf("%#x", given))
}

// recall finds out why a server has refused a client that has seen more than it: it asks for a transaction on a session
// that claims nothing. If the history is lost, it gives an ensemble that was restored with its old token space a new
// one: it will count from the past, and a client that comes later cannot know. Without an answer nothing happens: a
// server that merely lags refuses the client until it has caught up.
func (e *service) recall(ctx context.Context, address string) {
	ctx, cancel := context.WithTimeout(ctx, recallTimeout)
	defer cancel()
	known := e.history.seen()
	p, err := e.probe(ctx, address, spareTTL)
	if err != nil {
		return
	}
	defer p.close()
	replies, err := p.ask(confirmed(), getData(e.root, false))
	if err != nil || replies[0].zxid == 0 {
		return
	}
	if _, _, err := replies[0].results(); err != nil || replies[0].zxid >= known {
		return
	}
	r, err := rootOf(replies[1])
	if space := e.history.learn(""); err == nil && r.exists && r.space == space {
		text, _ := json.Marshal(rootValue{Space: "zookeeper-" + backend.NewRequestID()})
		if _, err := p.ask(setData(e.root, text, r.version)); err != nil {
			e.o.Logger.Warn("fencelock/zookeeper: an ensemble without its history keeps the token space", "error", err)
		}
	}
	_ = e.checkZxid(ctx, known, replies[0].zxid)
}
