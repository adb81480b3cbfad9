package cluster

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"
)

// Machines has the faults of the nodes' machines, if a Harness has them.
type Machines struct {
	// Disk changes the behaviour of a running node's disk; with DiskWorks, or after the node has ended, it works
	// normally. Hits returns the number of operations that the node's disk has refused or delayed since the cluster
	// began.
	Disk func(ctx context.Context, node int, how Disk) error
	Hits func(node int) int64
	// Ended waits until a node has ended because its disk refused a write. If it has not ended, the error is the reason.
	Ended func(ctx context.Context, node int) error

	// Wipe removes all data of a stopped node.
	Wipe func(ctx context.Context, node int) error
	// CaughtUp waits until a node has a vote and all changes that were acknowledged before the call.
	CaughtUp func(ctx context.Context, node int) error

	// Forgotten waits until the running nodes have dropped the part of the log that a stopped node lacks. Installed
	// returns the number of snapshots that a node has installed from others since the cluster began.
	Forgotten func(ctx context.Context, node int) error
	Installed func(node int) int64

	// Backup returns a copy of the service's data. Restore ends all nodes, deletes their data, and makes the cluster
	// again from such a copy.
	Backup  func(ctx context.Context) ([]byte, error)
	Restore func(ctx context.Context, backup []byte) error

	// Jump moves the wall clock of a running node by d, until the node ends. Looked returns the number of jumps that the
	// node has noticed by reading its clock since the cluster began.
	Jump   func(ctx context.Context, node int, d time.Duration) error
	Looked func(node int) int64
}

// Disk is the behaviour of a disk.
type Disk string

// The kinds of disks.
const (
	DiskWorks Disk = "works"
	// DiskLies accepts every write and fails every fsync.
	DiskLies Disk = "lies"
	// DiskFull fails every write after writing a part of it.
	DiskFull Disk = "full"
	// DiskSlow takes 100 ms for an fsync, DiskStuck takes 3 s, longer than an election.
	DiskSlow  Disk = "slow"
	DiskStuck Disk = "stuck"
)

// missing returns the first of the named fields that is nil.
func (m Machines) missing(names string) string {
	for _, name := range strings.Fields(names) {
		if reflect.ValueOf(m).FieldByName(name).IsNil() {
			return name
		}
	}
	return ""
}

// victim is the leader in one round and a follower in the next.
func (b *bench) victim(leader int) int {
	if b.n%2 == 0 {
		return leader
	}
	return b.next(leader)
}

// without returns the steps that check that the others go on without node: another node leads if node was the leader.
func (b *bench) without(node, leader int, term uint64) steps {
	if node == leader {
		return steps{b.another(node, term), b.goOn}
	}
	return steps{b.goOn}
}

// back returns the steps that start a node and check that it catches up, and that the cluster can rely on it while
// another node is down.
func (b *bench) back(node int) steps {
	other := b.next(node)
	return steps{
		func(ctx context.Context) error { return b.Start(ctx, node) },
		func(ctx context.Context) error { return b.CaughtUp(ctx, node) },
		func(ctx context.Context) error { return b.Kill(ctx, other) },
		b.goOn,
		func(ctx context.Context) error { return b.Start(ctx, other) },
		func(ctx context.Context) error { return b.CaughtUp(ctx, other) },
	}
}

// failingFsync and fullDisk: a node that cannot store a write must not acknowledge it, and ends.
func failingFsync(ctx context.Context, b *bench) error { return b.refusingDisk(ctx, DiskLies) }

func fullDisk(ctx context.Context, b *bench) error { return b.refusingDisk(ctx, DiskFull) }

func (b *bench) refusingDisk(ctx context.Context, how Disk) error {
	return b.underFault(ctx, func(_ *held, leader int, term uint64) error {
		node := b.victim(leader)
		hits := b.Hits(node)
		return within(ctx, slices.Concat(
			steps{
				func(ctx context.Context) error { return b.Disk(ctx, node, how) },
				func(ctx context.Context) error { return b.Ended(ctx, node) },
				func(ctx context.Context) error {
					return b.more(ctx, b.Hits, node, hits, "its disk has refused nothing")
				},
			},
			b.without(node, leader, term),
			b.back(node),
		)...)
	})
}

// more waits until count of node differs from before: then the fault has happened.
func (b *bench) more(ctx context.Context, count func(int) int64, node int, before int64, otherwise string) error {
	for count(node) == before {
		if ctx.Err() != nil {
			return fmt.Errorf("node %d: %s", node, otherwise)
		}
		pause(ctx, 10*time.Millisecond) // no notification
	}
	return nil
}

// slowDisk: with a slow disk the locks go on; with a stuck disk another node must lead.
func slowDisk(ctx context.Context, b *bench) error {
	return b.underFault(ctx, func(_ *held, leader int, term uint64) error {
		hits := b.Hits(leader)
		how, goOn := DiskStuck, b.without(leader, leader, term)
		if b.n%2 == 1 {
			how, goOn = DiskSlow, steps{b.goOn}
		}
		return within(ctx, slices.Concat(
			steps{func(ctx context.Context) error { return b.Disk(ctx, leader, how) }},
			goOn,
			steps{
				func(ctx context.Context) error {
					return b.more(ctx, b.Hits, leader, hits, "its disk has delayed nothing")
				},
				func(ctx context.Context) error { return b.Disk(ctx, leader, DiskWorks) },
				b.goOn,
			},
		)...)
	})
}

// wipedNode: a node that has lost its data must not vote under its former identity.
func wipedNode(ctx context.Context, b *bench) error {
	return b.underFault(ctx, func(_ *held, leader int, term uint64) error {
		node := b.victim(leader)
		return within(ctx, slices.Concat(
			steps{func(ctx context.Context) error { return errors.Join(b.Kill(ctx, node), b.Wipe(ctx, node)) }},
			b.without(node, leader, term),
			b.back(node),
		)...)
	})
}

// farBehind: the log entries that a node lacks are gone, so it must install a snapshot.
func farBehind(ctx context.Context, b *bench) error {
	return b.underFault(ctx, func(_ *held, leader int, term uint64) error {
		node := b.victim(leader)
		installed := b.Installed(node)
		return within(ctx, slices.Concat(
			steps{func(ctx context.Context) error { return b.Kill(ctx, node) }},
			b.without(node, leader, term),
			steps{func(ctx context.Context) error { return b.Forgotten(ctx, node) }},
			b.back(node),
			steps{func(ctx context.Context) error {
				return b.more(ctx, b.Installed, node, installed, "it has caught up without a snapshot")
			}},
		)...)
	})
}

// restoredBackup: all changes since the backup are lost. Later holds stay valid until their deadlines, and their
// tokens are not reissued.
func restoredBackup(ctx context.Context, b *bench) error {
	return b.underFault(ctx, func(h *held, _ int, _ uint64) error {
		var backup []byte
		return within(ctx,
			func(ctx context.Context) (err error) {
				backup, err = b.Backup(ctx)
				return err
			},
			b.goOn,
			b.goOn,
			func(ctx context.Context) error {
				b.rivals.forgetting()
				return b.Restore(ctx, backup)
			},
			h.lost,
			func(context.Context) error {
				b.rivals.succeed(func() rival {
					c, _ := b.client()
					return c
				})
				return nil
			},
			func(ctx context.Context) error { return b.rivals.goOn(ctx, b.rivals.names, anybody) },
		)
	})
}

// clockJump: no promise of a lock service may depend on the wall clock. A hold survives the jump, and then a node
// takes over whose wall clock differs by an hour from its predecessor's.
func clockJump(ctx context.Context, b *bench) error {
	return b.underFault(ctx, func(h *held, leader int, term uint64) error {
		node := b.victim(leader)
		d := time.Hour
		if b.n/2%2 == 1 {
			d = -d
		}
		looked := b.Looked(node)
		return within(ctx, slices.Concat(
			steps{
				func(ctx context.Context) error { return b.Jump(ctx, node, d) },
				func(ctx context.Context) error { return h.survives(ctx, time.Now().Add(b.TTL)) },
				func(ctx context.Context) error {
					_, err := b.HasLeader(ctx, node) // so that even a follower reads its clock
					return errors.Join(err, b.more(ctx, b.Looked, node, looked, "it has not looked at its clock"))
				},
				b.goOn,
				func(ctx context.Context) (err error) {
					if leader, term, err = b.Leader(ctx, 0); err == nil {
						err = b.Kill(ctx, leader)
					}
					return err
				},
				func(ctx context.Context) error { return b.another(leader, term)(ctx) },
				b.goOn,
				func(ctx context.Context) error {
					if node == leader {
						return nil // the jump has ended with the node
					}
					return b.Jump(ctx, node, -d)
				},
				func(ctx context.Context) error { return b.Start(ctx, leader) },
			},
		)...)
	})
}
