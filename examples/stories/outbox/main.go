// Command outbox sends one mail and counts one sale for each paid order, although a mail service and a topic of events
// know no fencing tokens, and each worker is paused in the middle of its part.
//
//	go run ./examples/stories/outbox
//	go run ./examples/stories/outbox -unsafe
//
// Tier: correctness. A guard cannot protect effects outside of its store. So the holder of the order's lock causes
// none: the guarded transaction that marks the order as paid also writes the intent, a row of the outbox. A relay, one
// at a time by its own lock, carries intents out and strikes them off. A relay paused between the two is followed by
// another, which repeats the same with the same idempotency key, made of the intent; so the mail is sent once. The
// topic has no such keys, and gets the event twice. The consumer, one at a time for each partition, keeps its offset
// and the keys of counted events in the store that it writes to, in the transaction of the count. Claim.At(offset+1)
// makes a repeat within one hold have no effect, and the guard refuses an overtaken consumer.
//
// With -unsafe nobody checks, there are no keys, and offsets are kept apart from the counts.
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

func main() { story.Main(tell) }

func tell(ctx context.Context, s *story.Story) error {
	sh, err := open(ctx, s)
	if err != nil {
		return err
	}
	for _, part := range []struct {
		lock, who, what string
		prepare         func(context.Context, fencing.Claim) (finish func(context.Context) error, err error)
	}{
		{"orders/7", "worker", "write that order 7 is paid", sh.pay},
		{"outbox", "relay", "strike off what it has sent", sh.relay},
		{"sales/0", "consumer", "count what it has read", sh.consume},
	} {
		if err := sh.paused(ctx, part.lock, part.who, part.what, part.prepare); err != nil {
			return err
		}
	}
	var sales int
	if err := sh.db.QueryRowContext(ctx, `SELECT sum(amount) FROM sales`).Scan(&sales); err != nil {
		return err
	}
	s.Tell("one order of 50 was paid: mails sent: %d, events in the topic: %d, sales: %d",
		len(sh.mail.sent), len(sh.topic), sales)
	if once := len(sh.mail.sent) == 1 && sales == 50; once == s.Unsafe {
		return fmt.Errorf("%d mails and sales of %d with -unsafe=%t", len(sh.mail.sent), sales, s.Unsafe)
	}
	return nil
}

// paused lets one participant prepare its work under the lock and then be paused for longer than its lease. Another
// does the whole work meanwhile. Then the first goes on.
func (sh *shop) paused(ctx context.Context, lock, who, what string,
	prepare func(context.Context, fencing.Claim) (finish func(context.Context) error, err error),
) error {
	// A paused process does not renew. NoRenew stands for that part of a pause.
	late, err := sh.first.Acquire(ctx, lock, fencelock.TTL(story.ShortTTL(sh.first)), fencelock.NoRenew())
	if err != nil {
		return err
	}
	finish, err := prepare(ctx, late.Claim(lock))
	if err != nil {
		return err
	}
	sh.story.Tell("%s 0 (token %v) is about to %s, and is paused", who, late.Token(), what)
	// Do waits until that lease has run out.
	err = sh.second.Do(ctx, lock, func(ctx context.Context, lease *fencelock.Lease) error {
		finish, err := prepare(ctx, lease.Claim(lock))
		if err != nil {
			return err
		}
		sh.story.Tell("%s 1 (token %v) does it", who, lease.Token())
		return finish(ctx)
	})
	if err != nil {
		return fmt.Errorf("%s 1: %w", who, err)
	}
	switch err := finish(ctx); {
	case err == nil:
		sh.story.Tell("%s 0 wakes up, and does it, too", who)
	case errors.Is(err, fencing.ErrStale):
		sh.story.Tell("%s 0 wakes up, and is refused: %v", who, err)
	default:
		return fmt.Errorf("%s 0: %w", who, err)
	}
	return nil
}

// shop has its orders, its outbox and its sales in one database.
type shop struct {
	story         *story.Story
	first, second *fencelock.Client
	db            *sql.DB
	guard         *sqlguard.Guard // nil: nobody checks
	mail          mailer
	topic         []event // one partition
}

func open(ctx context.Context, s *story.Story) (sh *shop, err error) {
	sh = &shop{story: s}
	if sh.first, err = s.Open(ctx, fencelock.Correctness, "first"); err != nil {
		return nil, err
	}
	if sh.second, err = s.Open(ctx, fencelock.Correctness, "second"); err != nil {
		return nil, err
	}
	if sh.db, sh.guard, err = s.GuardedDatabase(ctx); err != nil {
		return nil, err
	}
	_, err = sh.db.ExecContext(ctx, `
		CREATE TABLE orders (id INTEGER PRIMARY KEY, amount INTEGER, paid BOOLEAN);
		CREATE TABLE outbox (id INTEGER PRIMARY KEY, key TEXT UNIQUE, amount INTEGER, sent BOOLEAN);
		CREATE TABLE offsets (partition INTEGER PRIMARY KEY, next INTEGER);
		CREATE TABLE sales (key TEXT, amount INTEGER);
		INSERT INTO orders VALUES (7, 50, FALSE); INSERT INTO offsets VALUES (0, 0)`)
	return sh, err
}

func (sh *shop) guarded(ctx context.Context, claim fencing.Claim, f func(*sql.Tx) error) error {
	return story.Guarded(ctx, sh.db, sh.guard, claim, f)
}
