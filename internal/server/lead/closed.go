package lead

import (
	"context"
	"sync"
	"time"
)

// Closed is a leadership that does not serve clients yet. The cluster was restored from a backup or from one disk, and
// has not served clients since. A client that acquired a lock after the backup was made may still rely on it, for its
// TTL.
type Closed struct {
	// Until is the end of the closed time, by Config.Now.
	Until time.Time
	// UsedTTL is the longest TTL in use when the backup was made.
	UsedTTL time.Duration

	once   sync.Once
	opened chan struct{}
}

// Open ends the closed time early.
func (c *Closed) Open() { c.once.Do(func() { close(c.opened) }) }

// stayClosed waits until the cluster may serve clients. It returns false if ctx ends earlier, or if Reopen fails.
func (r *Leadership) stayClosed(ctx context.Context) bool {
	c := &r.config
	wait, used := c.Replica.State.Closed()
	if wait == 0 {
		return true
	}
	closed := &Closed{Until: c.Now().Add(wait), UsedTTL: used, opened: make(chan struct{})}
	c.Closed(closed)
	defer c.Closed(nil)
	c.Log.Warn("the cluster was restored: clients are refused until every earlier hold has ended, or until "+
		"\"fencelock open\"",
		"until", time.Now().Add(wait), "for", wait, "longest TTL in use before", used)
	over := time.NewTimer(wait)
	defer over.Stop()
	select {
	case <-over.C:
	case <-closed.opened:
		c.Log.Warn("an operator has opened the cluster before every earlier hold has ended")
	case <-ctx.Done():
		return false
	}
	return r.Term.Reopen(ctx)
}
