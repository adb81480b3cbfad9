package conformance

import (
	"context"
	"fmt"
	"time"

	"github.com/fencelock/fencelock"
)

// closingClauses cover Close with a context that has ended, as after a signal.
var closingClauses = []Clause{
	{
		ID: "D17", Group: "core", Slug: "close-after-its-context", serial: true, run: closeAfterItsContext,
		Rule: fmt.Sprintf("Close of a client with a context that has ended returns within %v and releases every lock",
			closeTime),
	},
}

// closeTime bounds Client.Close with a context that has ended.
const closeTime = 1100 * time.Millisecond

func closeAfterItsContext(t *trial) {
	c := t.core(t.client(), func(o *fencelock.Options) { o.TTL = t.long() })
	rival := t.client()
	t.outlives(rival)
	var names []string
	for range 20 {
		name := t.name()
		if _, err := c.Acquire(t.within(ample), name); err != nil {
			t.Fatalf("Acquire = %v", err)
		}
		names = append(names, name)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	began := time.Now()
	err := c.Close(ended)
	if took := time.Since(began); took > closeTime {
		t.Latef("Close with a context that has ended took %v, want at most %v", took.Round(time.Millisecond), closeTime)
	}
	if err != nil {
		t.Errorf("Close with a context that has ended = %v, want nil", err)
	}
	for _, name := range names {
		t.mustBeFree(rival, name, "after Close with a context that has ended")
	}
}
