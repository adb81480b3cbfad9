package fencelock

// Reaction to a lock service that has lost its history. Acknowledged locks are free then, and the service may reissue
// tokens that guards have seen, so going on could admit two holders. There are two signs: a driver that says so
// (ErrHistoryLost, or a pushed loss), and a token or a token space that the client itself has seen otherwise
// (internal/history). In both cases every hold is lost, and this client never grants a lock again. An operator has to
// make sure that no earlier holder runs, so the client does not restart automatically.

import (
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// forgot records that the service has lost its history: every hold is lost with ReasonHistoryLost, and later acquires
// fail. Only the first call has an effect. The caller holds no mutex.
//
// Each holder is notified by its context and the observer by an EventLost, as with every loss. Remaining entries of
// the holds in the service are not released.
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

// accept checks a grant before it becomes a lease: the driver's exclusion must serve the tier, and the token must
// exist, be of the right kind, and be greater than all tokens granted for the name before sent. The caller releases
// the grant after an error. In the efficiency tier every grant is accepted.
//
// sent is the result of history.Now before the request was sent: an overtaken answer is no sign of a lost history.
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

// overstated returns an error if the driver claims an impossible proof: a request that was sent after its answer
// arrived, or a TTL longer than requested, beyond the granularity. Accepting it could make two holders.
func (c *Client) overstated(sent instant, ttl, asked time.Duration, now instant) error {
	switch step := c.driver.Describe().TTLGranularity; {
	case sent > now:
		return c.broken("SentAt %d lies %v after the clock, which reads %d ns", sent, sent.Sub(now), now)
	case ttl > asked+step:
		return c.broken("TTL %v is longer than the %v that were asked for", ttl, asked)
	}
	return nil
}

// broken is the error of a driver that breaks its contract.
func (c *Client) broken(format string, args ...any) error {
	return &ContractError{Driver: c.driver.Describe().Name, What: fmt.Sprintf(format, args...)}
}

// remember reports a lost history in an error of the driver to the whole client. It ignores other errors.
func (c *Client) remember(err error) {
	if errors.Is(err, ErrHistoryLost) {
		c.forgot(err)
	}
}
