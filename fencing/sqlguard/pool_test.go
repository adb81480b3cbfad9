package sqlguard_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/sqlguard"
	"github.com/fencelock/fencelock/internal/testtier"
)

// failingEnd is a way in which a section does not end with its commit.
type failingEnd struct {
	// inside is what the function does after its first write. Nil: the function is not called.
	inside func(ctx context.Context, cancel func(), tx *sql.Tx) error
	// before is what happens to the context and the claim before the section.
	before func(cancel func(), claim *fencing.Claim)
	// lost is the text of the statement that reaches the server and is never answered.
	lost string
	// silent: the function panics or ends its goroutine, and the section returns nothing.
	silent bool
	want   error // what the section's error wraps; nil: any error
}

func (e failingEnd) wants(err error) failingEnd { e.want = err; return e }

func (e failingEnd) committed() bool { return e.lost == `autocommit = @fencing_autocommit` }

func says(query string) failingEnd {
	return failingEnd{inside: func(ctx context.Context, _ func(), tx *sql.Tx) error { return statement(query)(ctx, tx) }}
}

func dropping(query string) failingEnd {
	return failingEnd{inside: func(ctx context.Context, _ func(), tx *sql.Tx) error {
		if statement(query)(ctx, tx) == nil {
			return errors.New("the statement did not fail")
		}
		return nil
	}}
}

func does(f func(tx *sql.Tx) error) failingEnd {
	return failingEnd{inside: func(_ context.Context, _ func(), tx *sql.Tx) error { return f(tx) }}
}

func lost(text string) failingEnd {
	end := does(func(*sql.Tx) error { return nil })
	end.lost = text
	return end
}

// failingEnds are all of them. Table is that of plain statements.
func failingEnds(dsn, table string) map[string]failingEnd {
	silent := func(f func()) failingEnd {
		return failingEnd{silent: true, inside: func(context.Context, func(), *sql.Tx) error { f(); return nil }}
	}
	return map[string]failingEnd{
		"failed function":       does(func(*sql.Tx) error { return errors.New("the function failed") }),
		"panic":                 silent(func() { panic("the function panicked") }),
		"end of the goroutine":  silent(runtime.Goexit),
		"commit of the Tx":      does((*sql.Tx).Commit).wants(fencing.ErrUnfenced),
		"rollback of the Tx":    does((*sql.Tx).Rollback).wants(fencing.ErrUnfenced),
		"wrong statement":       says(`SELECT nothing`),
		"lost connection":       says(`KILL CONNECTION_ID()`),
		"implicit commit":       says(`START TRANSACTION`).wants(fencing.ErrUnfenced),
		"COMMIT in a statement": says(`COMMIT`).wants(fencing.ErrUnfenced),
		"COMMIT AND CHAIN":      says(`COMMIT AND CHAIN`).wants(fencing.ErrUnfenced),
		"ROLLBACK":              says(`ROLLBACK`).wants(fencing.ErrUnfenced),
		"locked tables": says(`LOCK TABLES ` + table + ` WRITE, guard_of_` + table + ` WRITE`).
			wants(fencing.ErrUnfenced),
		"its own autocommit": says(`SET autocommit = 1`).wants(fencing.ErrUnfenced),
		"lock wait timeout":  dropping(lockWaitTimeout).wants(fencing.ErrUnfenced),
		"deadlock": {want: fencing.ErrUnfenced, inside: func(ctx context.Context, _ func(), tx *sql.Tx) error {
			mariaDB.deadlock(ctx, dsn, tx)
			return nil
		}},
		"cancelled between": {inside: func(ctx context.Context, cancel func(), _ *sql.Tx) error {
			cancel()
			return ctx.Err()
		}},
		"cancelled in a statement": {inside: func(ctx context.Context, cancel func(), tx *sql.Tx) error {
			time.AfterFunc(time.Millisecond, cancel)
			err := statement(`SELECT SLEEP(0.05)`)(ctx, tx) // the server goes on with it
			<-ctx.Done()                                    // a busy machine cancels after the statement
			return errors.Join(err, ctx.Err())
		}},
		"cancelled before": {before: func(cancel func(), _ *fencing.Claim) { cancel() }},
		"refusal":          {before: func(_ func(), claim *fencing.Claim) { claim.Token-- }},
		// The statement was executed, or not.
		"lost answer of autocommit off":  lost(`@fencing_autocommit = @@autocommit`),
		"lost answer of the check":       lost(`INSERT INTO guard_of_`),
		"lost answer of the end":         lost(`RELEASE SAVEPOINT`),
		"lost answer of the commit":      lost("\x03COMMIT").wants(fencing.ErrUnknown),
		"lost answer of autocommit back": lost(`autocommit = @fencing_autocommit`),
	}
}

// Sections that end in each failing way leave the connections of a pool as they were, and no plain statement is lost.
func poolIsLeftAsItWas(t *testing.T, dsn string) {
	sections := 40
	if testtier.Wanted() {
		sections = 1000
	}
	mariaDB.busy(t, dsn)
	n := 0
	for name := range failingEnds("", "") {
		n++
		table := fmt.Sprintf("plain_%d", n)
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			t.Parallel()
			failingSections(t, dsn, table, failingEnds(dsn, table)[name], sections)
		})
	}
}

func failingSections(t *testing.T, dsn, table string, end failingEnd, sections int) {
	ctx := t.Context()
	plain := mariaDB.connect(t, dsn)
	guard := must(t, plain, sqlguard.MySQL, &sqlguard.Options{Table: "guard_of_" + table})
	if err := guard.Create(ctx); err != nil {
		t.Fatal(err)
	}
	if err := guard.Check(ctx, fencing.Claim{Resource: "refused", Token: 34, Space: space}); err != nil {
		t.Fatal(err)
	}
	if _, err := plain.ExecContext(ctx, `CREATE TABLE `+table+` (value int)`); err != nil {
		t.Fatal(err)
	}
	cut := new(atomic.Bool)
	db := cutting(t, dsn, end.lost, cut)
	db.SetMaxOpenConns(2)
	db.SetMaxIdleConns(2)
	guard = must(t, db, sqlguard.MySQL, &sqlguard.Options{Table: "guard_of_" + table})
	answers := map[string]int{}
	for i := range sections {
		cut.Store(true)
		err := end.section(ctx, guard, table, i)
		cut.Store(false)
		if (err == nil) != end.committed() || end.want != nil && !errors.Is(err, end.want) {
			t.Fatalf("the section %d = %v, want %v", i, err, end.want)
		}
		answers[strings.ReplaceAll(fmt.Sprint(err), strconv.Quote(strconv.Itoa(i)), "N")]++
		if _, err := db.ExecContext(ctx, `INSERT INTO `+table+` (value) VALUES (1)`); err != nil {
			t.Fatalf("a plain statement after section %d: %v", i, err)
		}
	}
	for range 2 { // both at once
		conn, err := db.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		var autocommit int
		if err := conn.QueryRowContext(ctx, `SELECT @@autocommit`).Scan(&autocommit); err != nil || autocommit != 1 {
			t.Errorf("after %d sections a connection has autocommit = %d (%v)", sections, autocommit, err)
		}
	}
	var written int
	err := plain.QueryRowContext(ctx, `SELECT count(*) FROM `+table+` WHERE value = 1`).Scan(&written)
	if err != nil || written != sections {
		t.Errorf("%d of %d plain statements are durable (%v)", written, sections, err)
	}
	t.Logf("%d sections: %v", sections, answers)
}

// section runs the nth section on its own goroutine.
func (e failingEnd) section(ctx context.Context, guard *sqlguard.Guard, table string, n int) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	claim := fencing.Claim{Resource: fmt.Sprint(n), Token: 34, Space: space}
	if e.inside == nil {
		claim.Resource = "refused"
		e.before(cancel, &claim)
	}
	result := make(chan error, 1)
	go func() {
		err := errors.New("the function did not return")
		defer func() {
			if e.silent {
				recover()
			}
			result <- err
		}()
		err = guard.Tx(ctx, claim, func(ctx context.Context, tx *sql.Tx) error {
			if e.inside == nil {
				return nil
			}
			if err := statement(`INSERT INTO `+table+` (value) VALUES (0)`)(ctx, tx); err != nil {
				return err
			}
			return e.inside(ctx, cancel, tx)
		})
	}()
	return <-result
}

// cutting returns a pool of connections that end after they have sent that text, while cut is set.
func cutting(t *testing.T, dsn, text string, cut *atomic.Bool) *sql.DB {
	t.Helper()
	config, err := mysql.ParseDSN(dsn)
	if err != nil {
		t.Fatal(err)
	}
	config.Logger = &mysql.NopLogger{}
	config.InterpolateParams = true // statements travel as text
	config.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, addr)
		if err != nil || text == "" {
			return conn, err
		}
		return &cutConn{conn, text, cut}, nil
	}
	connector, err := mysql.NewConnector(config)
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(connector)
	t.Cleanup(func() { db.Close() })
	return db
}

type cutConn struct {
	net.Conn
	text string
	cut  *atomic.Bool
}

func (c *cutConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if err == nil && c.cut.Load() && bytes.Contains(b, []byte(c.text)) {
		c.Conn.Close()
	}
	return n, err
}
