// Command quickstart shows in a few seconds the abilities and the limits of a lock, and the remedy.
//
//	go run ./examples/quickstart
//	go run ./examples/quickstart -backend redis://127.0.0.1:6379
//
// Without a backend it starts the bundled lock server within the process, with its data in a temporary folder.
//
// Three workers share an account. They take turns by a lock, and no deposit is lost. Then one of them is paused for
// longer than its lease, the next one gets the lock, and the paused one wakes up in the middle of its work. It writes:
// a lock alone cannot stop it. The fencing token does, if the driver issues tokens and the store checks them.
//
// The exit code is 0 if all of this happened, and 1 otherwise.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/builtin/embedded"
	"github.com/fencelock/fencelock/fencing"
)

const accountName = "accounts/7" // the lock is named for its resource

func main() {
	url := flag.String("backend", "",
		"`URL` of the lock service, such as redis://127.0.0.1:6379. Default: one in this process")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := run(ctx, os.Stdout, *url); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

// run tells the story, and returns an error where it goes otherwise than it must.
func run(ctx context.Context, out io.Writer, url string) error {
	s := &story{out: out, start: time.Now()}
	if url != "" {
		return s.tellWith(ctx, func(tier fencelock.Tier, o *fencelock.Options) (*fencelock.Client, error) {
			return fencelock.Open(ctx, url, tier, o)
		})
	}
	return withServer(ctx, func(server *embedded.Server) error {
		s.tell("a lock server runs in this process, and keeps its locks in a temporary folder")
		return s.tellWith(ctx, func(tier fencelock.Tier, o *fencelock.Options) (*fencelock.Client, error) {
			return fencelock.New(server.Driver(nil), tier, o)
		})
	})
}

// tellWith tells the story with clients that open makes.
func (s *story) tellWith(
	ctx context.Context, open func(fencelock.Tier, *fencelock.Options) (*fencelock.Client, error),
) (err error) {
	// A double write would damage the account, so this is a case for the correctness tier. Not every driver serves it.
	tier := fencelock.Correctness
	probe, err := open(tier, nil)
	if errors.Is(err, fencelock.ErrTier) {
		s.tell("the correctness tier is refused at startup:")
		s.tell("    %v", err)
		s.tell("so this run uses the efficiency tier: its leases carry no fencing tokens")
		tier, err = fencelock.Efficiency, nil
	} else if err == nil {
		s.tell("correctness tier: every lease carries a fencing token that is greater than all before it")
		err = probe.Close(ctx)
	}
	if err != nil {
		return err
	}

	// Each worker has its own client, as if it were a separate process.
	var workers []*worker
	for _, name := range []string{"ann", "bob", "cat"} {
		locks, failed := open(tier, &fencelock.Options{Owner: name})
		if failed != nil {
			return failed
		}
		defer func() { err = errors.Join(err, locks.Close(context.WithoutCancel(ctx))) }()
		workers = append(workers, &worker{name: name, locks: locks})
	}
	ann, bob := workers[0], workers[1]

	if tier == fencelock.Correctness {
		acct := &account{guard: new(fencing.Memory)}
		if err := s.takeTurns(ctx, workers, acct); err != nil {
			return err
		}
		return s.overtake(ctx, bob, ann, acct, fencing.ErrStale)
	}
	if err := s.writeWithoutToken(ctx, ann); err != nil {
		return err
	}
	acct := &account{}
	if err := s.takeTurns(ctx, workers, acct); err != nil {
		return err
	}
	return s.overtake(ctx, bob, ann, acct, nil)
}

type worker struct {
	name  string
	locks *fencelock.Client
}

// deposit shows the use of a lock: read, compute and write under it, and pass the token with the write. Do renews the
// lease meanwhile, ends ctx if the lock is lost, and releases.
func (w *worker) deposit(ctx context.Context, acct *account, amount int) (token fencing.Token, err error) {
	err = w.locks.Do(ctx, accountName, func(ctx context.Context, lease *fencelock.Lease) error {
		token = lease.Token()
		balance := acct.read()
		time.Sleep(time.Millisecond) // the work, long enough for others to come between if they could
		return acct.write(ctx, token, balance+amount)
	})
	return token, err
}

// takeTurns lets all workers update the account at once. Without the lock they would overwrite each other's deposits.
func (s *story) takeTurns(ctx context.Context, workers []*worker, acct *account) error {
	const rounds, amount = 10, 1
	s.tell("three workers make %d deposits of %d each, all at once, under the lock %q", rounds, amount, accountName)
	var all sync.WaitGroup
	errs := make([]error, len(workers))
	for i, w := range workers {
		all.Go(func() {
			for range rounds {
				if _, err := w.deposit(ctx, acct, amount); err != nil {
					errs[i] = errors.Join(errs[i], fmt.Errorf("%s: %w", w.name, err))
				}
			}
		})
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return s.expectBalance(acct, len(workers)*rounds*amount, "none was lost")
}

// overtake pauses one worker in the middle of its work for longer than its lease. The account must answer its late
// write with want.
func (s *story) overtake(ctx context.Context, paused, next *worker, acct *account, want error) error {
	ttl := max(time.Second, paused.locks.Describe().MinTTL) // ZooKeeper's sessions are longer
	before := acct.read()
	// A paused process does not renew. NoRenew stands for that part of a pause: a long garbage collection, a suspended
	// machine.
	lease, err := paused.locks.Acquire(ctx, accountName, fencelock.TTL(ttl), fencelock.NoRenew())
	if err != nil {
		return fmt.Errorf("%s: %w", paused.name, err)
	}
	stale := acct.read() + 10
	s.tell("%s takes the lock for %v (token %v), reads %d – and is paused", paused.name, ttl, lease.Token(), stale-10)

	token, err := next.deposit(ctx, acct, 1000) // waits until the lease has run out
	if err != nil {
		return fmt.Errorf("%s: %w", next.name, err)
	}
	s.tell("the lease has run out; %s takes the lock (token %v) and deposits 1000", next.name, token)

	s.tell("%s wakes up, looks at neither clock nor lease, and writes %d (token %v)", paused.name, stale, lease.Token())
	err = acct.write(ctx, lease.Token(), stale)
	if !errors.Is(err, want) {
		return fmt.Errorf("%s: stale write: %v; want %v", paused.name, err, want)
	}
	if want == nil {
		s.tell("nothing stops this write: the store checks no tokens, and the driver issues none")
		err = s.expectBalance(acct, stale, next.name+"'s 1000 are gone")
	} else {
		s.tell("the store refuses the write: %v", err)
		err = s.expectBalance(acct, before+1000, next.name+"'s 1000 are safe")
	}
	if err != nil {
		return err
	}
	if err := lease.Release(ctx); !errors.Is(err, fencelock.ErrLost) {
		return fmt.Errorf("%s: release after the end of the lease: %v; want %v", paused.name, err, fencelock.ErrLost)
	}
	s.tell("%s looks at the lease at last: %v", paused.name, lease.Err())
	return nil
}

// writeWithoutToken shows that a guarded store takes no write of the efficiency tier at all, so that the mistake shows
// on the first test run.
func (s *story) writeWithoutToken(ctx context.Context, w *worker) error {
	_, err := w.deposit(ctx, &account{guard: new(fencing.Memory)}, 1)
	if !errors.Is(err, fencing.ErrNoToken) {
		return fmt.Errorf("%s: write without a token: %v; want %v", w.name, err, fencing.ErrNoToken)
	}
	s.tell("a store that checks tokens takes no write of this tier: %v", err)
	s.tell("the rest runs on a store that does not check")
	return nil
}

// story prints what happens, and when.
type story struct {
	out   io.Writer
	start time.Time
}

func (s *story) tell(format string, args ...any) {
	fmt.Fprintf(s.out, "%6.3fs  %s\n", time.Since(s.start).Seconds(), fmt.Sprintf(format, args...))
}

func (s *story) expectBalance(acct *account, want int, comment string) error {
	if got := acct.read(); got != want {
		return fmt.Errorf("balance is %d; want %d", got, want)
	}
	s.tell("balance %d: %s", want, comment)
	return nil
}
