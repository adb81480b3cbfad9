// Package tasks compiles the Go code of README.md, docs/GUIDE.md, docs/DRIVERS.md and docs/tasks: this file contains each
// block of these pages.
package tasks

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	goredis "github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/embedded"
	"github.com/fencelock/fencelock/etcd"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/pgxguard"
	"github.com/fencelock/fencelock/fencing/sqlguard"
	"github.com/fencelock/fencelock/postgres"
	"github.com/fencelock/fencelock/redis"
)

var (
	_ = []any{readme, cron, election, workers, transferMoney, postgresAlone, efficiency, attempt, correctness, configured, held, kinds,
		embed}

	buildReport func(context.Context) error
	schedule    func(context.Context, fencing.Token) error
	convert     func(context.Context, string) error
	transfer    func(ctx context.Context, tx *sql.Tx, from, to, amount int) error
)

func readme(ctx context.Context, debit func(context.Context, int, fencing.Token) error) error {
	// import _ "github.com/fencelock/fencelock/etcd", the driver of this URL
	locks, err := fencelock.Open(ctx, "etcd://127.0.0.1:2379", fencelock.Correctness, nil)
	if err != nil {
		return err // wraps ErrTier for a backend without fencing tokens
	}
	defer locks.Close(ctx)

	return locks.Do(ctx, "accounts/42", func(ctx context.Context, lease *fencelock.Lease) error {
		return debit(ctx, 42, lease.Token()) // renewed meanwhile; ctx ends before another client can hold the lock
	})
}

func efficiency(ctx context.Context, client *goredis.Client) error {
	locks, err := fencelock.ForEfficiency(redis.New(client, nil), nil)
	if err != nil {
		return err
	}
	defer locks.Close(ctx)
	err = locks.Do(ctx, "reports/nightly", func(ctx context.Context, lease *fencelock.Lease) error {
		return buildReport(ctx) // renewed in the background; ctx ends before another client can acquire the lock
	})
	return err
}

func attempt(ctx context.Context, locks *fencelock.Client) error {
	lease, err := locks.TryAcquire(ctx, "reports/nightly")
	if errors.Is(err, fencelock.ErrHeld) {
		return nil // another client is building it
	}
	return errors.Join(err, lease.Release(ctx))
}

func correctness(ctx context.Context, client *clientv3.Client, amount int, accounts interface {
	Debit(ctx context.Context, token fencing.Token, account, amount int) error
}) error {
	locks, err := fencelock.ForCorrectness(etcd.New(client, nil), &fencelock.Options{TTL: 10 * time.Second})
	if err != nil {
		return err
	}
	defer locks.Close(ctx)
	err = locks.Do(ctx, "accounts/42", func(ctx context.Context, lease *fencelock.Lease) error {
		return accounts.Debit(ctx, lease.Token(), 42, amount) // the store compares the token: package fencing
	})
	return err
}

func configured(ctx context.Context) error {
	locks, err := fencelock.Open(ctx, "redis://10.0.0.1:6379", fencelock.Correctness, nil)
	if errors.Is(err, fencelock.ErrTier) {
		return err // the message names the missing capability
	}
	return errors.Join(err, locks.Close(ctx))
}

func held(ctx context.Context, locks *fencelock.Client) error {
	lease, err := locks.Acquire(ctx, "orders/7", fencelock.TTL(30*time.Second), fencelock.WaitAtMost(time.Minute))
	if err != nil {
		return err
	}
	defer lease.Release(ctx)
	<-lease.Context().Done() // context.Cause(lease.Context()) is a *LostError: name, token, reason
	return context.Cause(lease.Context())
}

func kinds(ctx context.Context, locks *fencelock.Client, lease *fencelock.Lease, name string) {
	locks.Acquire(ctx, "catalog", fencelock.Shared())           // readers; a waiting writer stops new readers
	locks.Acquire(ctx, "gpu-pool", fencelock.Permits(2, 8))     // 2 of 8 permits; another limit is ErrLimitMismatch
	locks.Acquire(ctx, "eu/orders/7", fencelock.Hierarchical()) // also excludes "eu/orders" and "eu/orders/7/lines"
	locks.AcquireAll(ctx, []string{"account/1", "account/2"})   // all or none; concurrent calls never deadlock
	locks.Acquire(lease.Context(), name, fencelock.Reentrant()) // returns the caller's own hold, if it has one

	locks.Lead(ctx, "scheduler", func(ctx context.Context, lease *fencelock.Lease) error {
		return schedule(ctx, lease.Token()) // ctx ends before another client can lead; the token is the term
	})
}

func embed(ctx context.Context) (*fencelock.Client, error) {
	server, err := embedded.Start(ctx, embedded.Options{DataDir: "/var/lib/app/locks"}) // package builtin/embedded
	if err != nil {
		return nil, err
	}
	locks, err := fencelock.ForCorrectness(server.Driver(nil), nil)
	return locks, err
}

func cron(ctx context.Context, locks *fencelock.Client, day string) error {
	lease, err := locks.TryAcquire(ctx, "reports/"+day, fencelock.HoldAtLeast(time.Minute))
	if errors.Is(err, fencelock.ErrHeld) {
		return nil // another replica runs it
	}
	if err != nil {
		return err
	}
	defer lease.Release(ctx)
	return buildReport(lease.Context())
}

func election(ctx context.Context, locks *fencelock.Client) error {
	return locks.Lead(ctx, "scheduler", func(ctx context.Context, lease *fencelock.Lease) error {
		return schedule(ctx, lease.Token()) // ctx ends before another process can lead
	})
}

func workers(ctx context.Context, locks *fencelock.Client, files []string) error {
	for _, file := range files {
		lease, err := locks.TryAcquire(ctx, "files/"+file)
		if errors.Is(err, fencelock.ErrHeld) {
			continue // another worker has it
		}
		if err != nil {
			return err
		}
		err = convert(lease.Context(), file)
		if err := errors.Join(err, lease.Release(ctx)); err != nil {
			return err
		}
	}
	return nil
}

func transferMoney(ctx context.Context, driver backend.FencingDriver, db *sql.DB, amount int) error {
	locks, err := fencelock.ForCorrectness(driver, nil) // a driver without fencing tokens does not compile here
	if err != nil {
		return err
	}
	guard, err := sqlguard.New(db, sqlguard.PostgreSQL, nil) // in the database of the accounts
	if err != nil {
		return err
	}
	accounts := []string{"account/1", "account/2"}
	return locks.DoAll(ctx, accounts, func(ctx context.Context, leases fencelock.Leases) error {
		return guard.Tx(ctx, leases.Claims(), func(ctx context.Context, tx *sql.Tx) error {
			return transfer(ctx, tx, 1, 2, amount) // commits only if no later holder has written
		})
	})
}

func postgresAlone(
	ctx context.Context, pool *pgxpool.Pool, debit func(context.Context, pgx.Tx, int, int) error, amount int,
) error {
	locks, err := fencelock.ForCorrectness(postgres.New(pool, nil), nil) // pool is your *pgxpool.Pool
	if err != nil {
		return err
	}
	guard, err := pgxguard.New(pool, nil)
	if err != nil {
		return err
	}
	return locks.Do(ctx, "accounts/42", func(ctx context.Context, lease *fencelock.Lease) error {
		return guard.Tx(ctx, lease.Claim("accounts/42"), func(ctx context.Context, tx pgx.Tx) error {
			return debit(ctx, tx, 42, amount)
		})
	})
}

func TestDocumentsShowCodeThatCompiles(t *testing.T) {
	source, err := os.ReadFile("tasks_test.go")
	if err != nil {
		t.Fatal(err)
	}
	code := unindented(string(source))
	pages, err := filepath.Glob("../../docs/tasks/*.md")
	if err != nil {
		t.Fatal(err)
	}
	if len(pages) == 0 {
		t.Fatal("docs/tasks has no page")
	}
	for _, page := range append(pages, "../../README.md", "../../docs/GUIDE.md", "../../docs/DRIVERS.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		blocks := strings.Split(string(text), "```go\n")[1:]
		if len(blocks) == 0 {
			t.Errorf("%s has no Go code", page)
		}
		for _, block := range blocks {
			block, _, _ = strings.Cut(block, "```")
			if strings.HasPrefix(block, "package main\n") {
				continue // the guide's program: examples/first compares and runs it
			}
			if !strings.Contains(code, unindented(block)) {
				t.Errorf("%s shows code that is not in this file:\n%s", page, block)
			}
		}
	}
}

// unindented returns the text without the indentation of its lines.
func unindented(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		b.WriteString(strings.TrimSpace(line) + "\n")
	}
	return b.String()
}
