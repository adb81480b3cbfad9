package guardtest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/fencelock/fencelock/fencing"
)

var setClauses = []Clause{
	{
		ID: "S1", Group: "sets", Slug: "all-or-none", needs: needUpdate | needTogether, run: allOrNone,
		Rule: "if one claim of a set is refused, the guard remembers no claim of the set",
	},
	{
		ID: "S2", Group: "sets", Slug: "opposite-orders", needs: needUpdate | needWrite, run: oppositeOrders,
		Rule: "writers with the same resources in opposite orders never wait for each other",
	},
}

func allOrNone(t *trial) {
	c := t.client()
	for _, stale := range []int{0, 1} { // the first of the two in any order, and the second
		names := []string{t.resource(), t.resource()}
		tokens := []fencing.Token{7, 7}
		t.admit(c, names[stale], 6)
		tokens[stale] = 5
		set := fencing.Set{t.claim(names[0], tokens[0]), t.claim(names[1], tokens[1])}
		err := c.Update(t.ctx, set, names[0], func(context.Context, string) (string, error) { return "written", nil })
		if !errors.Is(err, fencing.ErrStale) {
			t.errorf("section with tokens %v, the %dth of them stale = %v, want ErrStale", tokens, stale, err)
		}
		t.admit(c, names[1-stale], 3)
	}
}

func oppositeOrders(t *trial) {
	const rounds = 10
	a, b := t.client(), t.client()
	for range rounds {
		x, y := t.claim(t.resource(), 5), t.claim(t.resource(), 5)
		var both sync.WaitGroup
		begin := make(chan struct{})
		for _, writer := range []struct {
			c   *Client
			set fencing.Set
		}{{a, fencing.Set{x, y}}, {b, fencing.Set{y, x}}} {
			both.Go(func() {
				<-begin
				ctx, cancel := context.WithTimeout(t.ctx, patience)
				defer cancel()
				err := writer.c.Update(ctx, writer.set, writer.set[0].Resource,
					func(context.Context, string) (string, error) { return "written", nil })
				if err != nil {
					t.errorf("section with two claims = %v", err)
				}
			})
		}
		close(begin)
		both.Wait()
		if t.failed() {
			return
		}
	}
}

var sequenceClauses = []Clause{
	{
		ID: "Q1", Group: "sequence", Slug: "repeated", needs: needUpdate | needWrite, run: repeated,
		Rule: "a write with the sequence of the last write succeeds without taking effect again",
	},
	{
		ID: "Q2", Group: "sequence", Slug: "reordered", needs: needUpdate | needWrite, run: reordered,
		Rule: "a write with a sequence below that of the last write returns ErrReordered; each hold has its own sequence",
	},
	{
		ID: "Q3", Group: "sequence", Slug: "failed-may-be-repeated", needs: needUpdate | needWrite | needOrdered,
		run: failedIsMadeAgain,
		Rule: "the guard remembers a sequence only when its write takes effect: " +
			"after a failed section or a check, the write still takes effect",
	},
	{
		ID: "Q4", Group: "sequence", Slug: "mixed-sets", needs: needUpdate | needWrite | needTogether | needOrdered, run: mixedSets,
		Rule: "a set whose sequences are all repeated succeeds without taking effect again; " +
			"a set with only some repeated returns ErrReordered",
	},
}

func repeated(t *trial) {
	c, name := t.client(), t.resource()
	add := func(sequence uint64) {
		err := t.repeat(func(ctx context.Context) error {
			return c.Update(ctx, t.claim(name, 7).At(sequence), name,
				func(_ context.Context, old string) (string, error) { return old + fmt.Sprint(sequence), nil })
		})
		if err != nil {
			t.fatalf("write %d of a hold = %v", sequence, err)
		}
	}
	for _, sequence := range []uint64{1, 1, 2, 2, 2, 5} {
		add(sequence)
	}
	if value := t.read(c, name); value != "125" {
		t.errorf("after writes 1, 1, 2, 2, 2 and 5 the value is %q, want 125", value)
	}
}

func reordered(t *trial) {
	c, name := t.client(), t.resource()
	t.update(c, t.claim(name, 7).At(2), name, "second")
	err := c.Update(t.ctx, t.claim(name, 7).At(1), name, func(context.Context, string) (string, error) {
		return "first", nil
	})
	if !errors.Is(err, fencing.ErrReordered) {
		t.errorf("write 1 of a hold after its write 2 = %v, want ErrReordered", err)
	}
	if value := t.read(c, name); value != "second" {
		t.errorf("the value is %q, want second", value)
	}
	t.update(c, t.claim(name, 7), name, "in no order")
	t.update(c, t.claim(name, 8).At(1), name, "of the next hold")
	t.update(c, t.claim(name, 9), name, "of the third hold")
	t.update(c, t.claim(name, 9).At(1), name, "the first write of the third hold")
	if value := t.read(c, name); value != "the first write of the third hold" {
		t.errorf("the value is %q: the third hold's first write was not made", value)
	}
}

func failedIsMadeAgain(t *trial) {
	c, name := t.client(), t.resource()
	failed := errors.New("the disk is full")
	write := t.claim(name, 7).At(1)
	err := c.Update(t.ctx, write, name, func(context.Context, string) (string, error) { return "", failed })
	if !errors.Is(err, failed) {
		t.errorf("section with a failing function = %v, want its error", err)
	}
	if err := t.check(c, write); err != nil {
		t.errorf("check of a write that was not made = %v, want it admitted", err)
	}
	t.update(c, write, name, "made")
	if value := t.read(c, name); value != "made" {
		t.errorf("after a failure, a check and the write the value is %q, want made: its sequence was remembered before",
			value)
	}
	if err := t.check(c, write); err != nil {
		t.errorf("check of the hold after its write = %v, want it admitted: a check makes no write", err)
	}
}

func mixedSets(t *trial) {
	c, a, b := t.client(), t.resource(), t.resource()
	n := 0
	write := func(first, second uint64) (written bool, err error) {
		n++
		value, set := fmt.Sprint(n), fencing.Set{t.claim(a, 7).At(first), t.claim(b, 7).At(second)}
		err = t.repeat(func(ctx context.Context) error {
			return c.Update(ctx, set, a, func(context.Context, string) (string, error) { return value, nil })
		})
		return t.read(c, a) == value, err
	}
	for _, step := range []struct {
		first, second uint64
		want          error
		written       bool
	}{
		{5, 5, nil, true}, {5, 5, nil, false}, {5, 9, fencing.ErrReordered, false}, {6, 5, fencing.ErrReordered, false},
		{5, 0, nil, false}, {0, 5, nil, false}, {6, 0, nil, true}, {7, 9, nil, true},
	} {
		written, err := write(step.first, step.second)
		if written != step.written || !errors.Is(err, step.want) || errors.Is(err, fencing.ErrRepeated) {
			t.errorf("a set with the sequences %d and %d = %v, written: %v; want %v and %v", step.first, step.second, err,
				written, step.want, step.written)
		}
	}
}
