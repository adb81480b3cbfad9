package builtin_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/conformance/cluster"
	"github.com/fencelock/fencelock/internal/server/replica"
	"github.com/fencelock/fencelock/internal/serverfault"
)

// Faults of the machines of processes. The child has a disk and a clock that its parent breaks with lines on the
// child's standard input. The child reports the effects as lines on its standard output.

// The lines of both.
const (
	lineLeading   = "leading "   // and the term
	lineDisk      = "disk "      // and a cluster.Disk
	lineJump      = "jump "      // and a duration
	lineHit       = "hit"        // the disk has refused or delayed something
	lineLooked    = "looked"     // the clock was read after a jump
	lineInstalled = "installed"  // a snapshot of another member was installed
	lineCompacted = "compacted " // and the last index that the log has dropped
)

// disks maps the states of the child's disk to its faults.
var disks = map[cluster.Disk]serverfault.Ailment{
	cluster.DiskWorks: {},
	cluster.DiskLies:  serverfault.FailingFsync,
	cluster.DiskFull:  serverfault.Full,
	cluster.DiskSlow:  {Delay: 100 * time.Millisecond},
	cluster.DiskStuck: {Delay: 3 * time.Second},
}

// machine returns the rig of the child, on which in injects faults.
func machine(m *member, in <-chan string) *serverfault.Rig {
	disk := &serverfault.Disk{Hit: func() { fmt.Println(lineHit) }}
	clock := &serverfault.Clock{Noticed: func() { fmt.Println(lineLooked) }}
	go func() {
		for line := range in {
			if how, ok := strings.CutPrefix(line, lineDisk); ok {
				disk.Suffer(disks[cluster.Disk(how)])
			} else if text, ok := strings.CutPrefix(line, lineJump); ok {
				d, err := time.ParseDuration(text)
				if err != nil {
					fmt.Fprintln(os.Stderr, err)
					os.Exit(1)
				}
				clock.Jump(d)
			}
		}
	}()
	return &serverfault.Rig{
		Files: disk.Files, Stable: disk.Stable, Now: clock.Now, SegmentBytes: m.SegmentBytes,
		SnapshotEntries: m.SnapshotEntries, TrailingEntries: m.TrailingEntries, SnapshotInterval: m.SnapshotInterval,
	}
}

// telling is a log handler that repeats messages on standard output for the tests that wait for them.
type telling struct{ slog.Handler }

// Enabled enables all messages of raft.
func (h telling) Enabled(context.Context, slog.Level) bool { return true }

func (h telling) Handle(ctx context.Context, r slog.Record) error {
	switch r.Message {
	case "leading":
		fmt.Printf(lineLeading+"%v\n", attr(r, "term"))
	case "raft: Installed remote snapshot":
		fmt.Println(lineInstalled)
	case "raft: compacting logs":
		fmt.Printf(lineCompacted+"%v\n", attr(r, "to"))
	}
	if !h.Handler.Enabled(ctx, r.Level) {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

func (h telling) WithAttrs(attrs []slog.Attr) slog.Handler {
	return telling{h.Handler.WithAttrs(attrs)}
}
func (h telling) WithGroup(name string) slog.Handler { return telling{h.Handler.WithGroup(name)} }

func attr(r slog.Record, key string) (value slog.Value) {
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == key {
			value = a.Value
		}
		return a.Key != key
	})
	return value
}

// felt has the reports of a member's processes so far.
type felt struct {
	hits, looked, installed int64
	compacted               uint64 // the log begins after this index
}

// note handles a line of a member's process.
func (p *processes) note(i int, line string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := &p.felt[i]
	var term uint64
	switch {
	case strings.HasPrefix(line, lineLeading):
		_, _ = fmt.Sscanf(line, lineLeading+"%d", &term)
		p.leads(i, term)
	case line == lineHit:
		f.hits++
	case line == lineLooked:
		f.looked++
	case line == lineInstalled:
		f.installed++
	case strings.HasPrefix(line, lineCompacted):
		_, _ = fmt.Sscanf(line, lineCompacted+"%d", &f.compacted)
	}
}

func (p *processes) feels(i int) felt {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.felt[i]
}

// machines returns the faults that can be injected into the machines.
func (p *processes) machines() cluster.Machines {
	return cluster.Machines{
		Disk: func(_ context.Context, i int, how cluster.Disk) error {
			if _, ok := disks[how]; !ok {
				return fmt.Errorf("a disk that %s: not known", how)
			}
			return p.child(i).Send(lineDisk + string(how))
		},
		Hits:  func(i int) int64 { return p.feels(i).hits },
		Ended: p.ended,
		Wipe: func(_ context.Context, i int) error {
			dir := p.members[i].DataDir
			return errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o700))
		},
		CaughtUp:  p.caughtUp,
		Forgotten: p.forgotten,
		Installed: func(i int) int64 { return p.feels(i).installed },
		Backup: func(ctx context.Context) ([]byte, error) {
			var to bytes.Buffer
			err := builtin.NewAdmin(p.addrs(), nil).Backup(ctx, &to)
			return to.Bytes(), err
		},
		Restore: p.restore,
		Jump: func(_ context.Context, i int, d time.Duration) error {
			return p.child(i).Send(lineJump + d.String())
		},
		Looked: func(i int) int64 { return p.feels(i).looked },
	}
}

// restore restores the first member from the backup, and lets the others join it.
func (p *processes) restore(ctx context.Context, backup []byte) error {
	for i := range p.members {
		if err := p.kill(ctx, i); err != nil {
			return err
		}
		if err := os.RemoveAll(p.members[i].DataDir); err != nil {
			return err
		}
	}
	closed := replica.RestoreOptions{ClosedFor: 4 * time.Second} // twice the TTL of all locks there
	if _, err := replica.Restore(p.members[0].DataDir, bytes.NewReader(backup), closed); err != nil {
		return err
	}
	p.mu.Lock()
	p.term = 0 // terms begin anew
	p.mu.Unlock()
	for i := range p.members {
		if err := p.start(ctx, i); err != nil {
			return err
		}
	}
	for i := range p.members {
		if err := p.caughtUp(ctx, i); err != nil {
			return err
		}
	}
	return nil
}

// ended waits until a member has stopped because of its disk.
func (p *processes) ended(ctx context.Context, i int) error {
	for p.child(i).Running() {
		if err := moment(ctx); err != nil {
			return fmt.Errorf("member %d goes on: %w", i, err)
		}
	}
	if text := p.child(i).Stderr(); !strings.Contains(text, "the disk refused") {
		return fmt.Errorf("member %d has ended for another reason:\n%s", i, text)
	}
	return nil
}

// moment waits before the caller polls again.
func moment(ctx context.Context) error {
	select {
	case <-time.After(20 * time.Millisecond):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// caughtUp waits until member i has applied the changes that the leader had committed, and all running members know
// that all members are voters: knowledge that only the leader has may be lost with it.
func (p *processes) caughtUp(ctx context.Context, i int) error {
	admin := builtin.NewAdmin(p.addrs(), nil)
	var target uint64
	for {
		status := admin.Status(ctx)
		done := len(status) == len(p.members)
		for _, m := range status {
			if m.Err != nil {
				done = false
				continue
			}
			if m.Leader && target == 0 {
				target = m.CommitIndex
			}
			done = done && len(m.Members) == len(p.members) &&
				!slices.ContainsFunc(m.Members, func(other *lockpb.Member) bool { return !other.Voter }) &&
				(m.Address != p.members[i].Listen || m.AppliedIndex >= target)
		}
		if done && target > 0 {
			return nil
		}
		if err := moment(ctx); err != nil {
			return fmt.Errorf("member %d has not caught up with %d: %w: %v", i, target, err, status)
		}
	}
}

// smallSegment is the segment size of a log that is soon compacted, in bytes. inSegment exceeds the number of entries
// in a segment: a member can still read compacted entries while their file exists.
const (
	smallSegment = 4 << 10
	inSegment    = smallSegment / 64
)

// forgotten waits until the log of each running member begins after the last entry that member node may have.
func (p *processes) forgotten(ctx context.Context, node int) error {
	var last uint64
	for _, m := range builtin.NewAdmin(p.addrs(), nil).Status(ctx) {
		if m.Err == nil {
			last = max(last, m.LastIndex)
		}
	}
	if last == 0 {
		return errors.New("no member reports the length of its log")
	}
	for i := range p.members {
		for i != node && p.feels(i).compacted <= last+inSegment {
			if err := moment(ctx); err != nil {
				return fmt.Errorf("member %d keeps log entry %d: %w", i, last, err)
			}
		}
	}
	return nil
}
