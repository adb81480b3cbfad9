package fencelock

// What the core does when the lock service has forgotten. Locks that it acknowledged are free again then, and tokens
// that guards have seen may be issued again, so going on could admit two holders. There are two signs: a driver that
// says so (ErrHistoryLost, or a pushed loss), and a token or a token space that the client itself has seen otherwise
// (internal/history). Both end the same way: every hold is lost, and nothing is granted through this client any more. A
// person has to make sure that no earlier holder runs; a client that began anew by itself would take that decision away
// from them.

import (
	"errors"

	"github.com/fencelock/fencelock/backend"
)

// forgot takes note that the service has lost its history: every hold is lost with ReasonHistoryLost, and nothing is
// granted any more. The first call does it; later ones find it done. The caller holds no mutex.
//
// Each holder is told by its context and the observer by an EventLost, as with every loss. What the service may still
// have of the holds is not given back.
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

// accept looks at a grant before it becomes a lease: whether the driver still excludes as the tier needs it, whether
// the token is there and of the right kind, and whether it is greater than what was granted for the name before sent.
// The caller gives the grant back after an error. In the efficiency tier nothing depends on tokens, and every grant
// will do.
//
// sent is what history.Now said before the request was sent: an answer that was overtaken by a later one is no sign of
// a service that forgot.
//
//	token of "a"   noted before sent   answer
//	35             34                  accepted, and noted
//	34             34, same request    accepted: the same hold once more
//	34             34 or more          *HistoryError: the service has forgotten
//	34             35, after sent      history.ErrOvertaken: this grant is over, and the service is sound
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

// remember makes an answer of the driver that its service has lost its history known to the whole client. Any other
// error means nothing here.
func (c *Client) remember(err error) {
	if errors.Is(err, ErrHistoryLost) {
		c.forgot(err)
	}
}
