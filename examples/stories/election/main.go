// Command election lets replicas elect a leader, twice over: once because the leader hangs, and once because it
// resigns.
//
//	go run ./examples/stories/election
//	go run ./examples/stories/election -unsafe
//
// Tier: correctness. The leader writes the plan that all others follow, so two who believe that they lead must not both
// write. An election alone cannot see to that: the old leader may be paused when its lease runs out, and wake up in the
// middle of a write, with a successor at work. Its token is its term; the database takes no write of an earlier term
// than one that it has seen (package sqlguard). A leader that is merely cut off is notified by its context, in time.
//
// With -unsafe the tier is efficiency, and terms are not compared: the plan of the leader that woke up replaces the
// present one, and everybody follows it.
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

const scheduler = "scheduler" // the election, and the resource that its leaders write

func main() { story.Main(tell) }

func tell(ctx context.Context, s *story.Story) error {
	p := &plan{}
	var err error
	if p.db, err = s.Database(ctx); err != nil {
		return err
	}
	if _, err = p.db.ExecContext(ctx, `CREATE TABLE plans (id INTEGER PRIMARY KEY, author TEXT)`); err != nil {
		return err
	}
	tier := fencelock.Efficiency
	if !s.Unsafe {
		tier = fencelock.Correctness
		if p.guard, err = story.Guard(ctx, p.db, sqlguard.SQLite); err != nil {
			return err
		}
	}
	var nodes []*node
	for _, name := range []string{"node-1", "node-2", "node-3"} {
		locks, err := s.Open(ctx, tier, name)
		if err != nil {
			return err
		}
		nodes = append(nodes, &node{name: name, locks: locks})
	}
	return elect(ctx, s, p, nodes[0], nodes[1], nodes[2])
}

// elect lets the nodes stand, the first one before the others.
func elect(ctx context.Context, s *story.Story, p *plan, first, second, third *node) error {
	defer first.leave()
	defer second.leave()
	defer third.leave()

	// A paused process does not renew. NoRenew stands for that part of a pause.
	ttl := story.ShortTTL(first.locks)
	old, err := first.stand(ctx, fencelock.TTL(ttl), fencelock.NoRenew())
	if err != nil {
		return err
	}
	if err := p.write(ctx, old.lease.Claim(scheduler), first.name); err != nil {
		return err
	}
	s.Tell("%s leads (term %v), writes the plan, and hangs for longer than its lease of %v",
		first.name, old.lease.Token(), ttl)

	present, err := second.stand(ctx) // until the lease has run out
	if err != nil {
		return err
	}
	if err := p.write(ctx, present.lease.Claim(scheduler), second.name); err != nil {
		return err
	}
	s.Tell("%s leads (term %v) and writes another plan", second.name, present.lease.Token())

	// In the middle of its work: it looks at neither clock nor lease.
	err = p.write(ctx, old.lease.Claim(scheduler), first.name)
	switch {
	case s.Unsafe && err == nil:
		s.Tell("%s wakes up and writes; nothing stops it", first.name)
	case !s.Unsafe && errors.Is(err, fencing.ErrStale):
		s.Tell("%s wakes up and writes; the database refuses it: %v", first.name, err)
	default:
		return fmt.Errorf("write of an old leader: %v", err)
	}
	if err := p.expect(ctx, s, map[bool]string{false: second.name, true: first.name}[s.Unsafe]); err != nil {
		return err
	}
	<-old.ctx.Done()
	s.Tell("%s looks at its context at last: %v", first.name, context.Cause(old.ctx))
	first.leave() // Lead would stand anew
	second.leave()
	last, err := third.stand(ctx)
	if err != nil {
		return err
	}
	if err := p.write(ctx, last.lease.Claim(scheduler), third.name); err != nil {
		return err
	}
	s.Tell("%s resigns; %s leads at once (term %v)", second.name, third.name, last.lease.Token())
	return p.expect(ctx, s, third.name)
}

// plan is written by the leader and followed by all others.
type plan struct {
	db    *sql.DB
	guard *sqlguard.Guard // nil: the last writer is right
}

// write adds author's plan, and makes it the present one, unless the guard knows of a later term.
func (p *plan) write(ctx context.Context, term fencing.Claim, author string) error {
	return story.Guarded(ctx, p.db, p.guard, term, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO plans (author) VALUES (?)`, author)
		return err
	})
}

// expect checks the author of the present plan.
func (p *plan) expect(ctx context.Context, s *story.Story, want string) error {
	var author string
	if err := p.db.QueryRowContext(ctx, `SELECT author FROM plans ORDER BY id DESC LIMIT 1`).Scan(&author); err != nil {
		return err
	}
	s.Tell("everybody follows the plan of %s", author)
	if author != want {
		return fmt.Errorf("the plan is that of %s; want that of %s", author, want)
	}
	return nil
}
