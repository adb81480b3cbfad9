package fencelock

import (
	"errors"
	"strconv"
	"sync"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// history remembers what the service has acknowledged, in order to notice when it has forgotten: the greatest exclusive
// token of each name, and the space that the tokens belong to.
type history struct {
	mu    sync.Mutex // protects the following fields
	seq   uint64     // counts what was noted
	last  map[string]noted
	space string
	lost  error // set once the service has forgotten; nothing is granted from then on
}

type noted struct {
	token fencing.Token
	at    uint64 // history.seq when it was noted
}

// maxNoted bounds the names in history.last. Any name makes room for a new one beyond that.
const maxNoted = 1 << 16

// errOvertaken: a later request of this client was granted and is noted already, so this grant is over.
var errOvertaken = errors.New("the grant was overtaken by a later one")

// now returns the moment for a request that is about to be sent, and the reason why none may be.
func (h *history) now() (seq uint64, lost error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.seq, h.lost
}

// judge notes the token of a grant whose request was sent at sent. A token that is no greater than what was noted
// before that is a *HistoryError; one that was noted later has overtaken it.
func (h *history) judge(sent uint64, g *backend.Grant, space string) error {
	if !g.Token.Valid() {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if space != "" {
		if h.space != "" && h.space != space {
			return &backend.HistoryError{What: "token space", Was: h.space, Now: space}
		}
		h.space = space
	}
	if !g.Token.Exclusive() {
		return nil
	}
	before, known := h.last[g.Name]
	switch {
	case !known || g.Token > before.token:
	case before.at <= sent:
		return &backend.HistoryError{
			What: "token of " + strconv.Quote(g.Name), Was: before.token.String(), Now: g.Token.String(),
		}
	default:
		return errOvertaken
	}
	if h.last == nil {
		h.last = map[string]noted{}
	}
	if !known && len(h.last) >= maxNoted {
		for name := range h.last {
			delete(h.last, name)
			break
		}
	}
	h.seq++
	h.last[g.Name] = noted{g.Token, h.seq}
	return nil
}

// forgot takes note that the service has lost its history: every hold is lost, and nothing is granted any more.
func (c *Client) forgot(err error) {
	c.history.mu.Lock()
	first := c.history.lost == nil
	if first {
		c.history.lost = err
	}
	c.history.mu.Unlock()
	if !first {
		return
	}
	now := c.set.Clock.Now()
	told := c.heart.endAll(c.heart.all(), func(h *hold) error { return h.lostFor(ReasonHistoryLost, err) })
	for i := range told {
		c.heart.settleEnding(&told[i], now)
	}
}

// accept looks at a grant before it becomes a lease. Whoever gets an error gives it back.
func (c *Client) accept(r *backend.Request, g *backend.Grant, sent uint64) error {
	if c.tier != Correctness {
		return nil
	}
	d := c.driver.Describe()
	if err := checkExclusion(d, c.set.AcceptAsyncReplica); err != nil {
		return err
	}
	if !g.Token.Valid() || g.Token.Exclusive() != (r.Kind == backend.KindExclusive) {
		lacks := "it granted without a fencing token " + d.NoFencing
		if g.Token.Valid() {
			lacks = "it granted a hold of kind " + r.Kind.String() + " with the token " + g.Token.String()
		}
		return &CapabilityError{Driver: d.Name, Tier: c.tier, Lacks: lacks}
	}
	return c.history.judge(sent, g, d.TokenSpace)
}

// remember makes an answer of the driver that its service has lost its history known to the whole client.
func (c *Client) remember(err error) {
	if errors.Is(err, ErrHistoryLost) {
		c.forgot(err)
	}
}
