package guardtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// patience bounds steps that are fast except on a busy machine.
const patience = 30 * time.Second

// trial is the context of a running clause. Its methods may be called from any goroutine, except for methods that end
// the clause (fatal, and others so documented), which belong to the clause's goroutine.
type trial struct {
	tb    testing.TB
	h     Harness
	ctx   context.Context
	run   string // random, so that no name was used before
	named int

	mu       sync.Mutex // protects the following fields
	messages []string
	notes    []string
	cleanups []func()
}

// try runs one clause.
func try(tb testing.TB, h Harness, c Clause) Result {
	tb.Helper()
	if h.Open == nil {
		tb.Fatal("guardtest: Harness.Open is nil")
	}
	if h.Checks == 0 {
		h.Checks = 2000
	}
	if text := os.Getenv("FENCELOCK_CHECKS"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 100 {
			tb.Fatalf("guardtest: FENCELOCK_CHECKS is %q, want a number of at least 100", text)
		}
		h.Checks = n
	}
	if h.Clients == 0 {
		h.Clients = 8
	}
	ctx, cancel := context.WithTimeout(context.Background(), 4*patience)
	defer cancel()
	t := &trial{tb: tb, h: h, ctx: ctx, run: rand.Text()[:10]}
	if outcome, why := t.applies(c); outcome != Passed {
		return Result{Clause: c, Outcome: outcome, Messages: []string{why}}
	}
	ended := make(chan struct{})
	go func() { // a separate goroutine, so that fatal ends the clause and not the test
		defer close(ended)
		defer t.cleanup()
		defer func() {
			if r := recover(); r != nil {
				t.errorf("panic: %v", r)
			}
		}()
		c.run(t)
	}()
	<-ended
	r := Result{Clause: c, Outcome: Passed, Messages: t.messages, Notes: t.notes}
	if len(t.messages) > 0 {
		r.Outcome = Failed
	}
	return r
}

// applies returns Passed if the clause can be tried.
func (t *trial) applies(clause Clause) (Outcome, string) {
	c, n := &Client{}, clause.needs
	if n&(needWrite|needUpdate|needHand|needSavepoint|needKeeper|needSetTerms|needWipe|needPinned) != 0 {
		var err error
		if c, err = t.h.Open(t.ctx, t.h.Address); err != nil {
			return Passed, "" // the clause itself will report that
		}
		t.close(c)
	}
	for _, each := range []struct {
		need    need
		there   bool
		outcome Outcome
		why     string
	}{
		{needSpace, t.h.Space != "", NotApplicable, "Harness.Space is empty: the guard trusts every space"},
		{needWrite, c.Write != nil && c.Read != nil, NotApplicable, "Client.Write is nil: the guard does not write"},
		{needUpdate, c.Update != nil, NotApplicable, "Client.Update is nil: the guard has no sections"},
		{needHand, c.Hand != nil, NotApplicable, "Client.Hand is nil: there are no transactions"},
		{needUpdate, clause.end == "" || c.Ends[clause.end] != nil, NotApplicable,
			"Client.Ends has no " + string(clause.end)},
		{needSavepoint, c.Savepoint != nil, NotApplicable,
			"Client.Savepoint is nil: there are none, or nobody sees them"},
		{needKeeper, c.Keeper != nil, NotApplicable, "Client.Keeper is nil: the guard has no operator's side"},
		{needSetTerms, c.SetTerms != nil, NotApplicable, "Client.SetTerms is nil: nobody can write the terms"},
		{needWipe, c.Wipe != nil, NotApplicable, "Client.Wipe is nil: the memory cannot be dropped"},
		{needPinned, c.Pinned != nil, NotApplicable, "Client.Pinned is nil: the guard takes no ID"},
		{needTogether, !t.h.Apart, NotApplicable, "Harness.Apart: claims are judged one after the other"},
		{needOrdered, t.h.Ordered, NotApplicable, "Harness.Ordered: sequences are remembered with the check"},
		{needDurable, !t.h.Volatile, NotApplicable, "Harness.Volatile: the guard remembers in memory"},
		{needChild, childReady(t.h.Name), Skipped, fmt.Sprintf("RunChild was not called with %q", t.h.Name)},
		{needRestart, t.h.Restart != nil, Skipped, "Harness.Restart is nil"},
	} {
		if n&each.need != 0 && !each.there {
			return each.outcome, each.why
		}
	}
	return Passed, ""
}

func (t *trial) errorf(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	const most = 10 // one broken guard fails thousands of checks
	if len(t.messages) < most {
		t.messages = append(t.messages, fmt.Sprintf(format, args...))
	}
}

func (t *trial) fatalf(format string, args ...any) {
	t.errorf(format, args...)
	runtime.Goexit()
}

func (t *trial) notef(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.notes = append(t.notes, fmt.Sprintf(format, args...))
}

func (t *trial) failed() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.messages) > 0
}

func (t *trial) atEnd(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cleanups = append(t.cleanups, f)
}

func (t *trial) cleanup() {
	for len(t.cleanups) > 0 {
		last := len(t.cleanups) - 1
		f := t.cleanups[last]
		t.cleanups = t.cleanups[:last]
		f()
	}
}

// client opens one more client, or ends the clause. It is closed with the clause.
func (t *trial) client() *Client {
	c := t.open()
	t.atEnd(func() { t.close(c) })
	return c
}

// open is client without the closing.
func (t *trial) open() *Client {
	ctx, cancel := context.WithTimeout(t.ctx, patience)
	defer cancel()
	c, err := t.h.Open(ctx, t.h.Address)
	if err != nil {
		t.fatalf("open a client: %v", err)
	}
	if c.Check == nil {
		t.fatalf("Client.Check is nil")
	}
	return c
}

func (t *trial) close(c *Client) {
	if c.Close == nil {
		return
	}
	if err := c.Close(); err != nil {
		t.errorf("close a client: %v", err)
	}
}

// resource returns a unique name.
func (t *trial) resource() string {
	t.named++
	return fmt.Sprintf("guardtest/%s/%d", t.run, t.named)
}

// claim returns a claim that can be refused only for its token.
func (t *trial) claim(resource string, token fencing.Token) fencing.Claim {
	return fencing.Claim{Resource: resource, Token: token, Space: t.h.Space}
}

// check asks the guard, with retries if the database rolled back.
func (t *trial) check(c *Client, claim fencing.Claim) error {
	return t.repeat(func(ctx context.Context) error { return c.Check(ctx, claim) })
}

func (t *trial) write(c *Client, claim fencing.Claim, value string) error {
	return t.repeat(func(ctx context.Context) error { return c.Write(ctx, claim, value, func() {}) })
}

func (t *trial) read(c *Client, resource string) (value string) {
	err := t.repeat(func(ctx context.Context) (err error) {
		value, err = c.Read(ctx, resource)
		return err
	})
	if err != nil {
		t.fatalf("read %q: %v", resource, err)
	}
	return value
}

func (t *trial) repeat(f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(t.ctx, patience)
	defer cancel()
	for {
		err := f(ctx)
		if err == nil || t.h.Again == nil || !t.h.Again(err) || ctx.Err() != nil {
			return err
		}
	}
}

// admit ends the clause unless the guard admits the token.
func (t *trial) admit(c *Client, resource string, token fencing.Token) {
	if err := t.check(c, t.claim(resource, token)); err != nil {
		t.fatalf("check of token %v for %q = %v, want it admitted", token, resource, err)
	}
}

// refuse is an error of the clause unless the guard refuses for that reason.
func (t *trial) refuse(c *Client, claim fencing.Claim, want error, when string) {
	err := t.check(c, claim)
	if !errors.Is(err, want) {
		t.errorf("%s: check of token %v of space %q = %v, want an error that is %q", when, claim.Token, claim.Space,
			err, want)
	}
}

// highest asks for the guard's highest token, by a token below it. It ends the clause if there is no answer.
func (t *trial) highest(c *Client, resource string) fencing.Token {
	err := t.check(c, t.claim(resource, 1))
	var stale *fencing.StaleError
	switch {
	case err == nil:
		return 1
	case !errors.As(err, &stale):
		t.fatalf("check of token 1 for %q = %v, want it admitted or a *StaleError", resource, err)
	}
	return stale.Highest
}
