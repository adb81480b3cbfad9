package fencelock

import (
	"errors"

	"github.com/fencelock/fencelock/backend"
)

// forgot takes note that the service has lost its history: every hold is lost, and nothing is granted any more.
func (c *Client) forgot(err error) {
	if !c.history.Lose(err) {
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
	return c.history.Judge(sent, g, d.TokenSpace)
}

// remember makes an answer of the driver that its service has lost its history known to the whole client.
func (c *Client) remember(err error) {
	if errors.Is(err, ErrHistoryLost) {
		c.forgot(err)
	}
}
