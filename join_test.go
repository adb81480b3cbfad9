package fencelock_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/fencing"
)

// again acquires "x" a second time, as another lease of the same hold.
type again func(first *fencelock.Lease, opts ...fencelock.AcquireOption) (*fencelock.Lease, error)

// eachSecondLease runs f for the two ways to get a second lease of a hold: the same id, and Reentrant.
func eachSecondLease(t *testing.T, f func(t *testing.T, b *bed, c *fencelock.Client, again again)) {
	t.Run("RequestID", func(t *testing.T) {
		simulate(t, func(t *testing.T, b *bed) {
			c, _ := b.client(fencelock.Options{})
			f(t, b, c, func(_ *fencelock.Lease, opts ...fencelock.AcquireOption) (*fencelock.Lease, error) {
				return c.Acquire(t.Context(), "x", append(opts, fencelock.RequestID(requestID))...)
			})
		})
	})
	t.Run("Reentrant", func(t *testing.T) {
		simulate(t, func(t *testing.T, b *bed) {
			c, _ := b.client(fencelock.Options{})
			f(t, b, c, func(first *fencelock.Lease, opts ...fencelock.AcquireOption) (*fencelock.Lease, error) {
				return c.Acquire(context.WithoutCancel(first.Context()), "x", append(opts, fencelock.Reentrant())...)
			})
		})
	})
}

// A second lease of a hold is sealed like the first; a refusal changes nothing.
func TestASecondLeaseIsSealed(t *testing.T) {
	refused := errors.New("refused")
	eachSecondLease(t, func(t *testing.T, b *bed, c *fencelock.Client, again again) {
		first := mustAcquire(t, c, "x", fencelock.RequestID(requestID))
		_, err := again(first, fencelock.Seal(func(context.Context, fencing.Claim) error { return refused }))
		wantErr(t, err, refused)
		if err := first.Err(); err != nil {
			t.Errorf("the first lease, after the second was refused: %v", err)
		}
		var shown fencing.Claim
		second, err := again(first, fencelock.Seal(func(_ context.Context, claim fencing.Claim) error {
			shown = claim
			return nil
		}))
		if err != nil || shown.Token != first.Token() {
			t.Errorf("shown %v, want token %v; %v", shown, first.Token(), err)
		}
		_ = first.Release(t.Context())
		release(t, second)
		if n := b.store.Names(); n != 0 {
			t.Errorf("%d names are in use", n)
		}
	})
}

// A second lease lasts according to its own options.
func TestASecondLeaseLastsAsItAsks(t *testing.T) {
	eachSecondLease(t, func(t *testing.T, b *bed, c *fencelock.Client, again again) {
		first := mustAcquire(t, c, "x", fencelock.RequestID(requestID), fencelock.TTL(2*time.Second), fencelock.NoRenew())
		second, err := again(first, fencelock.TTL(time.Hour))
		if err != nil {
			t.Fatal(err)
		}
		if left := time.Until(second.Deadline()); left < 50*time.Minute {
			t.Errorf("the second lease has %v, want an hour", left)
		}
		time.Sleep(10 * time.Hour)
		if err := second.Err(); err != nil {
			t.Errorf("the second lease is not renewed: %v", err)
		}
		_ = first.Release(t.Context())
		release(t, second)
	})
}

// When the renewed lease has ended, the lease with NoRenew ends at its deadline.
func TestNoRenewCountsAgainAfterASecondLease(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{TTL: 10 * time.Second})
		first := mustAcquire(t, c, "x", fencelock.NoRenew())
		second, err := c.Acquire(first.Context(), "x", fencelock.Reentrant())
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		release(t, second)
		if err := first.Err(); err != nil {
			t.Errorf("after the second lease was released: %v", err)
		}
		time.Sleep(10 * time.Second)
		wantErr(t, first.Err(), fencelock.ErrLost)
	})
}

// An option that another lease of a hold cannot have is refused by its name, and the first lease continues.
func TestASecondLeaseIsRefusedByName(t *testing.T) {
	cases := []struct {
		option string
		kind   error
		opt    fencelock.AcquireOption
	}{
		{"HoldAtLeast", fencelock.ErrInvalidOption, fencelock.HoldAtLeast(10 * time.Minute)},
		{"Metadata", fencelock.ErrInvalidOption, fencelock.Metadata(map[string]string{"v": "2"})},
		{"Hierarchical", fencelock.ErrLimitMismatch, fencelock.Hierarchical()},
		{"", fencelock.ErrLimitMismatch, fencelock.Permits(1, 2)},
	}
	for _, x := range cases {
		eachSecondLease(t, func(t *testing.T, b *bed, c *fencelock.Client, again again) {
			first := mustAcquire(t, c, "x", fencelock.RequestID(requestID), fencelock.HoldAtLeast(time.Millisecond),
				fencelock.Metadata(map[string]string{"v": "1"}))
			_, err := again(first, x.opt)
			wantErr(t, err, x.kind)
			if err != nil && !strings.Contains(err.Error(), x.option) {
				t.Errorf("%v does not name %s", err, x.option)
			}
			if err := first.Err(); err != nil {
				t.Errorf("%s: the first lease: %v", x.option, err)
			}
			same, err := again(first, fencelock.HoldAtLeast(time.Millisecond),
				fencelock.Metadata(map[string]string{"v": "1"}))
			if err != nil {
				t.Errorf("the same options again: %v", err)
			}
			_ = first.Release(t.Context())
			release(t, same)
		})
	}
}

// Under its own lease an id returns the same hold, and both leases live.
func TestARepeatUnderItsOwnLease(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		first := mustAcquire(t, c, "x", fencelock.RequestID(requestID))
		second, err := c.Acquire(first.Context(), "x", fencelock.RequestID(requestID), fencelock.WaitAtMost(time.Second))
		if err != nil {
			t.Fatal(err)
		}
		if second.Token() != first.Token() || first.Err() != nil {
			t.Errorf("token %v, want %v; the first lease: %v", second.Token(), first.Token(), first.Err())
		}
		release(t, second, first)
	})
}

// Only one of the calls of Lead with one name leads at a time, so no call may take the hold of another by its id.
func TestLeadRefusesRequestID(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		err := c.Lead(t.Context(), "x", func(context.Context, *fencelock.Lease) error { return nil },
			fencelock.RequestID(requestID))
		wantErr(t, err, fencelock.ErrInvalidOption)
	})
}

// A request that would wait for its own line of work is ErrDeadlock immediately, even if the service finds no cycles.
func TestSelfDeadlocksAreFoundOnEveryDriver(t *testing.T) {
	type try func(ctx context.Context, c *fencelock.Client) error
	acquire := func(name string, opts ...fencelock.AcquireOption) try {
		return func(ctx context.Context, c *fencelock.Client) error {
			_, err := c.Acquire(ctx, name, opts...)
			return err
		}
	}
	paths := fencelock.Hierarchical()
	permits := acquire("a", fencelock.Permits(2, 3))
	pair := func(one, two string, opts ...fencelock.AcquireOption) try {
		return func(ctx context.Context, c *fencelock.Client) error {
			_, err := c.AcquireAll(ctx, []string{one, two}, opts...)
			return err
		}
	}
	cases := map[string]struct {
		first []fencelock.AcquireOption
		then  try
	}{
		"exclusively again":         {nil, acquire("a")},
		"a path below":              {[]fencelock.AcquireOption{paths}, acquire("a/b", paths)},
		"a shared path below":       {[]fencelock.AcquireOption{paths}, acquire("a/b", paths, fencelock.Shared())},
		"too many permits":          {[]fencelock.AcquireOption{fencelock.Permits(2, 3)}, permits},
		"a writer inside a reader":  {[]fencelock.AcquireOption{fencelock.Shared()}, acquire("a")},
		"a reader behind a writer":  {[]fencelock.AcquireOption{fencelock.Shared()}, acquire("a", fencelock.Shared())},
		"a set of paths that nest":  {nil, pair("p/q/r", "p", paths)},
		"a set with the own name":   {nil, pair("b", "a")},
		"the client beside, shared": {nil, acquire("a", fencelock.Shared())},
	}
	for what, x := range cases {
		t.Run(what, func(t *testing.T) {
			simulate(t, func(t *testing.T, b *bed) {
				d := loneScripted{&scripted{Driver: b.store.Driver()}}
				c, beside := b.over(d, fencelock.Options{}), b.over(d, fencelock.Options{})
				writer, _ := b.client(fencelock.Options{})
				first := mustAcquire(t, c, "a", x.first...)
				waiting := make(chan struct{})
				go func() {
					defer close(waiting)
					if l, err := writer.Acquire(t.Context(), "a", fencelock.WaitAtMost(time.Hour)); err == nil {
						release(t, l)
					}
				}()
				time.Sleep(time.Second)
				for _, c := range []*fencelock.Client{c, beside} {
					began := time.Now()
					ctx, cancel := context.WithTimeout(first.Context(), 10*time.Second)
					wantErr(t, x.then(ctx, c), fencelock.ErrDeadlock)
					cancel()
					if took := time.Since(began); took > time.Second {
						t.Errorf("answered after %v", took)
					}
				}
				release(t, first)
				<-waiting
			})
		})
	}
}

// A reader inside a reader gets its own hold if no writer waits, and permits inside permits are granted if enough are
// free.
func TestFreeNameIsNoDeadlock(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c := b.over(loneScripted{&scripted{Driver: b.store.Driver()}}, fencelock.Options{})
		for _, opt := range []fencelock.AcquireOption{fencelock.Shared(), fencelock.Permits(1, 2)} {
			outer := mustAcquire(t, c, "x", opt)
			inner, err := c.Acquire(outer.Context(), "x", opt)
			if err != nil {
				t.Fatal(err)
			}
			release(t, inner, outer)
		}
	})
}

// Seal runs under the lease that it seals: to acquire the same lock in it is a deadlock, found immediately.
func TestSealRunsUnderItsLease(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c := b.over(loneScripted{&scripted{Driver: b.store.Driver()}}, fencelock.Options{})
		_, err := c.Acquire(t.Context(), "x", fencelock.WaitAtMost(time.Minute),
			fencelock.Seal(func(ctx context.Context, _ fencing.Claim) error {
				_, err := c.Acquire(ctx, "x")
				return err
			}))
		wantErr(t, err, fencelock.ErrDeadlock)
	})
}
