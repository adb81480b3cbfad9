package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/fault"
)

// Fault is one way to break a cluster under its clients.
type Fault struct {
	Slug string // "leader-kill"
	What string // in words
	// Needs names the required fields of Machines, separated by spaces; may be empty.
	Needs string

	run func(context.Context, *bench) error
}

// Faults returns all faults, in the order of Run.
func Faults() []Fault {
	return []Fault{
		{"leader-kill", "the leader ends without warning and comes back", "", leaderKill},
		{"leader-pause", "the leader freezes, and goes on when another one leads", "", leaderPause},
		{"holder-partition", "a holder is cut off from all nodes, until a rival holds", "", holderPartition},
		{"overtaken-leader",
			"the leader freezes, another one is elected, and it goes on without hearing of that: " +
				"the only node a holder reaches",
			"", overtakenLeader},
		{"leader-partition", "the leader is cut off from the other nodes, but not from its clients", "",
			leaderPartition},
		{"minority-partition", "a follower is cut off from the other nodes, but not from its clients", "",
			minorityPartition},
		{"rolling-restart", "one node after the other ends without warning and comes back", "", rollingRestart},
		{"one-way-peers", "a node hears the others and is not heard, or is heard and hears nothing", "", oneWayPeers},
		{"one-way-client", "a holder's requests arrive and the replies do not, or the other way round", "",
			oneWayClient},
		{"late-acquire", "an acquire is delivered after its caller gave up", "", lateAcquire},
		{"late-release", "a release is delivered after its caller gave up, or when the next one holds", "",
			lateRelease},
		{"failing-fsync", "a node's disk takes what it cannot keep, and says so", "Disk Hits Ended CaughtUp",
			failingFsync},
		{"full-disk", "a node's disk has no room", "Disk Hits Ended CaughtUp", fullDisk},
		{"slow-disk", "the leader's disk is slow, or stands still", "Disk Hits", slowDisk},
		{"wiped-node", "a node loses all that it kept, and joins again", "Wipe CaughtUp", wipedNode},
		{"far-behind", "a node is away for longer than the log of the others reaches back",
			"Forgotten Installed CaughtUp", farBehind},
		{"restored-backup", "all nodes lose everything, and a backup is restored", "Backup Restore", restoredBackup},
		{"clock-jump", "the clock of a node jumps by an hour, forwards or backwards", "Jump Looked", clockJump},
	}
}

// holder is the client that holds a name during the fault of this round; name is the name.
func (b *bench) holder() int       { return b.n % len(b.links) }
func (b *bench) name() string      { return b.rivals.names[0] }
func (b *bench) others() []string  { return b.rivals.names[1:] }
func anybody(int) bool             { return true }
func except(i int) func(int) bool  { return func(client int) bool { return client != i } }
func (b *bench) next(node int) int { return (node + 1 + b.n%(b.Nodes-1)) % b.Nodes } // another node, which varies

// hold makes a client hold the name across the fault.
func (b *bench) hold(ctx context.Context) (*held, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	h, err := b.rivals.acquire(ctx, b.holder(), b.name())
	if err != nil {
		return nil, fmt.Errorf("before the fault: %w", err)
	}
	return h, nil
}

// giveBack inspects a hold that was held across a fault, and releases it.
func (b *bench) giveBack(ctx context.Context, h *held) {
	ctx = context.WithoutCancel(ctx)
	h.confirm(ctx)
	h.release(ctx, b.TTL)
}

// underFault makes a client hold a name while breakAndHeal runs.
func (b *bench) underFault(ctx context.Context, breakAndHeal func(h *held, leader int, term uint64) error) error {
	h, err := b.hold(ctx)
	if err != nil {
		return err
	}
	defer b.giveBack(ctx, h)
	leader, term, err := b.Leader(ctx, 0)
	if err != nil {
		return err
	}
	return breakAndHeal(h, leader, term)
}

// steps are the consecutive steps of a fault: see within.
type steps []func(context.Context) error

// within bounds each step of a fault.
func within(ctx context.Context, steps ...func(context.Context) error) error {
	for _, step := range steps {
		ctx, cancel := context.WithTimeout(ctx, patience)
		err := step(ctx)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// goOn is the step that waits until the other names are granted again.
func (b *bench) goOn(ctx context.Context) error { return b.rivals.goOn(ctx, b.others(), anybody) }

// another returns the step that waits for a leader other than the broken node.
func (b *bench) another(broken int, term uint64) func(context.Context) error {
	return func(ctx context.Context) error {
		now, _, err := b.Leader(ctx, term)
		if err == nil && now == broken {
			err = fmt.Errorf("node %d leads again although it is broken", broken)
		}
		return err
	}
}

// underLeaderFault breaks the leader while a client holds a name, waits until another node leads and other names are
// granted, and heals.
func (b *bench) underLeaderFault(ctx context.Context, breakIt,
	healIt func(ctx context.Context, leader int) error) error {
	return b.underFault(ctx, func(_ *held, leader int, term uint64) error {
		var broken time.Time
		return within(ctx,
			func(ctx context.Context) error {
				broken = time.Now()
				return breakIt(ctx, leader)
			},
			b.another(leader, term),
			b.goOn,
			func(ctx context.Context) error {
				b.recoveries = append(b.recoveries, time.Since(broken))
				return healIt(ctx, leader)
			},
		)
	})
}

func leaderKill(ctx context.Context, b *bench) error { return b.underLeaderFault(ctx, b.Kill, b.Start) }

// leaderPause resumes the leader when other clients go on, and in every second round only when all earlier holds have
// expired by the leader's clock.
func leaderPause(ctx context.Context, b *bench) error {
	var frozen time.Time
	return b.underLeaderFault(ctx,
		func(ctx context.Context, leader int) error {
			frozen = time.Now()
			return b.Pause(ctx, leader)
		},
		func(ctx context.Context, leader int) error {
			if b.n%2 == 1 {
				pause(ctx, time.Until(frozen.Add(b.TTL+b.TTL/4)))
			}
			return b.Resume(ctx, leader)
		})
}

// overtakenLeader limits a holder to the connection to an overtaken leader that has not noticed this yet.
func overtakenLeader(ctx context.Context, b *bench) error {
	return b.underFault(ctx, func(h *held, leader int, term uint64) error {
		links := b.links[b.holder()]
		defer links.Pass()
		defer b.Heal()
		b.isolate(leader) // before the pause: a resumed leader first reads the messages received by then
		return within(ctx,
			func(ctx context.Context) error { return b.Pause(ctx, leader) },
			b.another(leader, term),
			b.goOn,
			func(ctx context.Context) error {
				for node, link := range links {
					if node != leader {
						link.Refuse()
					}
				}
				for before := links[leader].Seen(fault.Requests); links[leader].Seen(fault.Requests) == before; {
					if h.lease.Err() != nil {
						break // too busy for a request in time
					}
					pause(ctx, time.Millisecond) // no notification
				}
				return b.Resume(ctx, leader)
			},
			h.lost,
			func(ctx context.Context) error {
				return b.rivals.goOn(ctx, b.rivals.names, except(b.holder()))
			},
		)
	})
}

func leaderPartition(ctx context.Context, b *bench) error {
	var said int64
	return b.underLeaderFault(ctx,
		func(_ context.Context, leader int) error {
			b.isolate(leader)
			said = b.Said(leader, b.next(leader))
			return nil
		},
		func(_ context.Context, leader int) error {
			if b.Said(leader, b.next(leader)) == said {
				return errors.New("nothing was kept back: the leader was not cut off")
			}
			b.Heal()
			return nil
		})
}

// isolate cuts a node off from the others, in both directions.
func (b *bench) isolate(node int) {
	for other := range b.Nodes {
		if other != node {
			b.Cut(node, other)
			b.Cut(other, node)
		}
	}
}

func minorityPartition(ctx context.Context, b *bench) error {
	return b.underFault(ctx, func(_ *held, leader int, _ uint64) error {
		follower := b.next(leader)
		b.isolate(follower)
		defer b.Heal()
		return within(ctx,
			func(ctx context.Context) error {
				for {
					has, err := b.HasLeader(ctx, follower)
					if err == nil && !has {
						return nil
					}
					if ctx.Err() != nil {
						return fmt.Errorf("node %d is cut off and still knows a leader: %w", follower, err)
					}
					pause(ctx, 20*time.Millisecond) // no notification
				}
			},
			b.goOn,
		)
	})
}

func rollingRestart(ctx context.Context, b *bench) error {
	return b.underFault(ctx, func(_ *held, _ int, term uint64) error {
		for i := range b.Nodes {
			node := (b.n + i) % b.Nodes
			restart := func(ctx context.Context) error { return errors.Join(b.Kill(ctx, node), b.Start(ctx, node)) }
			if err := within(ctx, restart, b.goOn); err != nil {
				return fmt.Errorf("restart of node %d: %w", node, err)
			}
		}
		// Every node has ended once, including the leader.
		return within(ctx, func(ctx context.Context) error {
			_, _, err := b.Leader(ctx, term)
			return err
		})
	})
}

func oneWayPeers(ctx context.Context, b *bench) error {
	return b.underFault(ctx, func(_ *held, leader int, term uint64) error {
		follower := b.next(leader)
		from, to, overtaken := leader, follower, false
		switch b.n % 4 {
		case 0: // the leader does not hear one follower
			from, to = follower, leader
			b.Cut(from, to)
		case 1: // a follower does not hear the leader
			b.Cut(from, to)
		case 2: // no follower hears the leader: they must elect another
			overtaken = true
			for node := range b.Nodes {
				if node != leader {
					b.Cut(leader, node)
				}
			}
		case 3: // the leader hears no follower: it must step down
			overtaken = true
			from, to = follower, leader
			for node := range b.Nodes {
				if node != leader {
					b.Cut(node, leader)
				}
			}
		}
		defer b.Heal()
		said := b.Said(from, to)
		todo := steps{b.goOn}
		if overtaken {
			todo = b.without(leader, leader, term)
		}
		return within(ctx, append(todo, func(ctx context.Context) error {
			for b.Said(from, to) == said {
				if ctx.Err() != nil {
					return fmt.Errorf("nothing was kept back from node %d to node %d", from, to)
				}
				pause(ctx, 10*time.Millisecond) // no notification
			}
			return b.goOn(ctx)
		})...)
	})
}

func holderPartition(ctx context.Context, b *bench) error {
	if b.n%2 == 0 {
		return b.cutHolder(ctx, func(l fault.Link) { l.Drop(fault.Both) }, fault.Requests)
	}
	return b.cutHolder(ctx, func(l fault.Link) { l.Hold(fault.Both) }, fault.Requests)
}

func oneWayClient(ctx context.Context, b *bench) error {
	if b.n%2 == 0 {
		return b.cutHolder(ctx, func(l fault.Link) { l.Hold(fault.Replies) }, fault.Replies)
	}
	return b.cutHolder(ctx, func(l fault.Link) { l.Hold(fault.Requests) }, fault.Requests)
}

// cutHolder breaks the links of a holder, until it is notified of the loss and other clients are granted all names.
// Seen is the direction in which the broken links must have received bytes.
func (b *bench) cutHolder(ctx context.Context, breakIt func(fault.Link), seen fault.Direction) error {
	h, err := b.hold(ctx)
	if err != nil {
		return err
	}
	defer b.giveBack(ctx, h)
	link := b.links[b.holder()]
	breakIt(link)
	defer link.Pass()
	before := link.Seen(seen)
	err = within(ctx, h.lost, func(ctx context.Context) error {
		return b.rivals.goOn(ctx, b.rivals.names, except(b.holder()))
	})
	if err == nil && link.Seen(seen) == before {
		err = errors.New("nothing was kept back: the holder was not cut off")
	}
	return err
}

// quick is a short time limit of a call.
const quick = 200 * time.Millisecond

func lateAcquire(ctx context.Context, b *bench) error {
	link := b.links[b.holder()]
	link.Hold(fault.Requests)
	defer link.Pass()
	before := link.Seen(fault.Requests)
	err := within(ctx, func(ctx context.Context) error {
		for link.Seen(fault.Requests) == before { // a busy machine may need more than one call to send bytes
			if ctx.Err() != nil {
				return errors.New("no request was kept back")
			}
			short, cancel := context.WithTimeout(ctx, quick)
			h, err := b.rivals.acquire(short, b.holder(), b.name())
			cancel()
			if err == nil {
				// Such a grant would need a hand-over within this client, which no earlier reply proves.
				h.release(ctx, b.TTL)
				return fmt.Errorf("%v was granted by a request that was not delivered", h)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if b.n%2 == 1 { // deliver it after the client's lease has ended
		err := within(ctx, func(ctx context.Context) error {
			return b.rivals.goOn(ctx, b.rivals.names, except(b.holder()))
		})
		if err != nil {
			return err
		}
	}
	healed := time.Now()
	link.Pass()
	err = within(ctx, func(ctx context.Context) error {
		return b.rivals.goOn(ctx, []string{b.name()}, anybody)
	})
	if closed := time.Since(healed); err == nil && closed > b.TTL+slack {
		err = fmt.Errorf("the late acquire closed the name for %v, with a TTL of %v", closed, b.TTL)
	}
	return err
}

// slack is the allowance of a busy machine for an immediate step.
const slack = 5 * time.Second

func lateRelease(ctx context.Context, b *bench) error {
	h, err := b.hold(ctx)
	if err != nil {
		return err
	}
	link := b.links[b.holder()]
	link.Hold(fault.Requests)
	defer link.Pass()
	before := link.Seen(fault.Requests)
	if err := h.release(ctx, quick); err == nil {
		return errors.New("a release that was not delivered is said to be done")
	} else if errors.Is(err, fencelock.ErrLost) {
		return fmt.Errorf("%v: %w before anything could be lost", h, err)
	}
	if link.Seen(fault.Requests) == before {
		return errors.New("no request was kept back")
	}
	if b.n%2 == 0 { // deliver it while the name is still closed
		link.Pass()
		return within(ctx, func(ctx context.Context) error { return b.rivals.goOn(ctx, []string{b.name()}, anybody) })
	}
	// Deliver it while another client holds the name: that hold must survive.
	var second *held
	err = within(ctx, func(ctx context.Context) (err error) {
		second, err = b.rivals.acquire(ctx, (b.holder()+1)%len(b.links), b.name())
		return err
	})
	if err != nil {
		return err
	}
	defer second.release(context.WithoutCancel(ctx), b.TTL)
	link.Pass()
	delivered := time.Now()
	return within(ctx, func(ctx context.Context) error { return second.survives(ctx, delivered.Add(b.TTL)) })
}
