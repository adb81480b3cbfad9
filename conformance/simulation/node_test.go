package simulation

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/fencing"
)

// node is one machine with a client: its clock, its network, its pauses. The client is replaced when it is closed or
// dies.
type node struct {
	w       *world
	id      int
	clock   *clock
	options fencelock.Options
	usual   time.Duration // the usual time of a message each way, roughly
	actors  []*actor

	mu        sync.Mutex // protects the following fields
	client    *fencelock.Client
	driver    *memory.Driver
	port      *port
	opened    int           // clients so far
	delay     time.Duration // of messages; zero: the weather decides
	paused    time.Duration // the end of the pause
	pauses    []pause
	closed    time.Duration // when the previous client was closed
	stands    bool          // takes part in an election
	stoodLast time.Duration // when the last acquire of a candidate ended, at the latest
}

type pause struct{ from, to time.Duration }

// open starts a client.
func (n *node) open() {
	d := n.w.store.Driver()
	p := newPort(n, d)
	if n.w.corrupt != nil {
		n.w.corrupt(p)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	o := n.options
	o.Owner = fmt.Sprintf("client-%d.%d", n.id, n.opened)
	c, err := fencelock.ForCorrectness(p, &o)
	if err != nil {
		n.w.t.Fatalf("%v", err)
	}
	n.client, n.driver, n.port = c, d, p
	n.opened++
	n.delay = n.usual
	d.Network().Delay(memory.Both, n.usual)
}

// close ends the client. A client that dies sends nothing.
func (n *node) close(ctx context.Context, dies bool) error {
	n.mu.Lock()
	c := n.client
	n.closed = n.w.now()
	if dies {
		n.delay = 0
		n.driver.Network().Drop(memory.Both)
		ended, cancel := context.WithCancel(ctx)
		cancel()
		ctx = ended
	}
	n.mu.Unlock()
	return c.Close(ctx)
}

func (n *node) current() *fencelock.Client {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.client
}

// pausedFor returns the remaining time of the client's pause.
func (n *node) pausedFor() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.paused - n.w.now()
}

// awake waits until the client runs.
func (n *node) awake() {
	for left := n.pausedFor(); left > 0; left = n.pausedFor() {
		time.Sleep(left)
	}
}

// pass delays a message on its way through the client's machine.
func (n *node) pass(m message, way uint64) {
	for {
		// A message that leaves at the end of a pause must have its own instant, too.
		time.Sleep(time.Duration(n.w.seed.roll(uint64(n.id), way, key(m.call), key(m.name),
			m.number, uint64(n.w.now()))%20_000 + 1))
		if n.pausedFor() <= 0 {
			return
		}
		n.awake()
	}
}

// vary draws the delay of the next messages while there is no fault.
func (n *node) vary(d *memory.Driver, m message) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.delay == 0 || d != n.driver {
		return
	}
	roll := n.w.seed.roll(uint64(n.id), 3, key(m.call), key(m.name), m.number, uint64(n.w.now()))
	d.Network().Delay(memory.Both, n.delay/2+time.Duration(roll%uint64(n.delay)))
}

// stand makes a candidate wait for the maximum of the core's election pause, whose random length does not depend on
// the seed.
func (n *node) stand(ctx context.Context) error {
	for ctx.Err() == nil {
		n.mu.Lock()
		stands, at := n.stands, n.stoodLast+1601*time.Millisecond
		n.mu.Unlock()
		if !stands || n.w.now() >= at {
			return nil
		}
		n.w.until(ctx, at)
	}
	return ctx.Err()
}

// stood notes that an acquire of a candidate, or its term, ended.
func (n *node) stood() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.stoodLast = n.w.now()
}

// runsBy returns the instant by which a call that has to end at end must have ended: shortly after end, or after the
// client's pause at that time.
func (n *node) runsBy(end time.Duration) time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	const slack = 100 * time.Millisecond
	end += slack
	for _, p := range n.pauses {
		if p.from <= end && end < p.to+slack {
			end = p.to + slack
		}
	}
	return end
}

// Observe implements fencelock.Observer.
func (n *node) Observe(_ context.Context, e fencelock.Event) {
	rec := &n.w.rec
	if e.Type == fencelock.EventLost {
		n.ends(e.Token)
	}
	switch e.Type {
	case fencelock.EventSuspect:
		if e.Left < lastAttempt {
			return // random: see port.Renew
		}
		fallthrough
	case fencelock.EventRenewed:
		rec.note(event{who: -1 - n.id, what: string(e.Type), name: e.Name, token: e.Token, answer: string(e.Reason)})
	}
	rec.mu.Lock()
	defer rec.mu.Unlock()
	switch e.Type {
	case fencelock.EventRenewed:
		rec.renewals++
	case fencelock.EventLost:
		if e.Reason != backend.ReasonClosed {
			rec.losses++
		}
	}
}

// byHand notes that a hold is renewed by hand.
func (n *node) byHand(t fencing.Token) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.port.hand[t] = true
}

// ends notes that a hold has ended here: the client releases it, or has noticed its loss. Renewals that began just
// before, at a random instant, no longer leave.
func (n *node) ends(t fencing.Token) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.port.gone[t] = true
}
