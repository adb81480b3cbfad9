// Command bank transfers money between accounts, and kills the process that does in the middle of it.
//
//	go run ./examples/stories/bank
//	go run ./examples/stories/bank -unsafe
//
// Tier: correctness. Three measures together conserve money, and all are necessary. AcquireAll takes the locks of
// both accounts or none, so that transfers in a circle never wait for each other for good. The transaction makes debit
// and credit one step, even if the process is killed between the two. The guard in it (package sqlguard) refuses the
// writes of a transfer that was paused for longer than its leases, over the balances of later ones. The locks of the
// killed process end with their TTL; nobody has to clean up.
//
// With -unsafe the locks are of the efficiency tier, and debit and credit are two writes: under a lock, and yet 50 are
// gone.
package main

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

func main() {
	child := flag.Bool("child", false, "be the process that is going to be killed; the program starts it itself")
	story.Main(func(ctx context.Context, s *story.Story) error {
		if *child {
			return work(ctx, s)
		}
		return tell(ctx, s)
	})
}

func tell(ctx context.Context, s *story.Story) error {
	b, err := open(ctx, s, "successor")
	if err != nil {
		return err
	}
	if _, err := b.db.ExecContext(ctx, `CREATE TABLE accounts (name TEXT PRIMARY KEY, balance INTEGER);
		INSERT INTO accounts VALUES ('ann', 100), ('bob', 100), ('cat', 100)`); err != nil {
		return err
	}
	s.Tell("ann, bob and cat have 100 each; another process makes transfers in a circle, all at once")

	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, self, append(s.Args(), "-child")...)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe() // its end tells the child that this process has gone
	if err != nil {
		return err
	}
	defer stdin.Close()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	line, err := bufio.NewReader(stdout).ReadString('\n') // the child is in the middle of a transfer
	s.Tell("%s", strings.TrimSpace(line))
	_, held := b.locks.TryAcquireAll(ctx, []string{"accounts/ann", "accounts/bob"})
	err = errors.Join(err, cmd.Process.Kill()) // SIGKILL
	_ = cmd.Wait()                             // "signal: killed"
	if err != nil {
		return fmt.Errorf("the child: %w", err)
	}
	if !errors.Is(held, fencelock.ErrHeld) {
		return fmt.Errorf("a second transfer during the first: %v; want %v", held, fencelock.ErrHeld)
	}
	s.Tell("kill -9. Its locks end with their TTL")

	err = b.transfer(ctx, "ann", "bob", 50,
		func() { s.Tell("another process has the locks, and makes the transfer anew") })
	if err != nil {
		return err
	}
	var total int
	if err := b.db.QueryRowContext(ctx, `SELECT sum(balance) FROM accounts`).Scan(&total); err != nil {
		return err
	}
	if s.Unsafe {
		s.Tell("there were 300, and are %d: the debit was written, the credit was not, and ann has paid twice", total)
	} else {
		s.Tell("there were 300, and are %d: what the killed process had begun is as if it had never been", total)
	}
	if (total == 300) == s.Unsafe {
		return fmt.Errorf("the total is %d with -unsafe=%t", total, s.Unsafe)
	}
	return nil
}

// work is the child: transfers in a circle, which come to an end only because AcquireAll does not deadlock, and one
// transfer that stops half-way.
func work(ctx context.Context, s *story.Story) error {
	b, err := open(ctx, s, "child")
	if err != nil {
		return err
	}
	var all sync.WaitGroup
	var errs [3]error
	for i, pair := range [][2]string{{"ann", "bob"}, {"bob", "cat"}, {"cat", "ann"}} {
		all.Go(func() {
			for range 3 {
				errs[i] = errors.Join(errs[i], b.transfer(ctx, pair[0], pair[1], 10, func() {}))
			}
		})
	}
	all.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		return err
	}
	return b.transfer(ctx, "ann", "bob", 50, func() {
		s.Tell("after 9 transfers of 10 it takes 50 from ann to give them to bob, and hangs between the two")
		_, _ = io.Copy(io.Discard, os.Stdin)
	}, fencelock.TTL(10*story.ShortTTL(b.locks)))
}

type bank struct {
	locks *fencelock.Client
	db    *sql.DB
	guard *sqlguard.Guard // nil: debit and credit are two writes, and nobody checks them
}
