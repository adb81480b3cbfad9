package guardtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// Older is a store in the format of an earlier version of its guard, which contains only the guard's terms, if that
// version made them. Its functions may be called from many goroutines.
type Older struct {
	// Old checks the claim as the earlier version does, and writes value in the same step.
	Old func(ctx context.Context, c fencing.Claim, value string) error
	// Keep writes the earlier version's entries for the terms, and for the resource of the claims.
	Keep func(ctx context.Context, t fencing.Terms, s fencing.Seen) error
	// New is Old by the tested guard, with its own client.
	New func(ctx context.Context, c fencing.Claim, value string) error
	// Keeper is the operator's side of the tested guard, with its own client.
	Keeper fencing.Keeper
	// Read returns the last value written to the resource of the claims.
	Read func(ctx context.Context) (string, error)
}

// RunOlder lets writers of an earlier version of a guard and of the present one write to one resource, before, during
// and after the migration of the store, in rounds of a store each, for that long. No writer may be admitted with a
// token below an earlier admitted one, whichever version admitted it; before the migration the guard answers
// fencing.ErrGuardVersion, and after it the earlier version admits no claim.
func RunOlder(t *testing.T, space string, d time.Duration, open func(t testing.TB, round int) *Older) {
	t.Helper()
	var counted olderCount
	rounds := 0
	for _, c := range kept(space) {
		o := &olderRound{t: t, s: open(t, rounds), space: space, count: &counted}
		o.keeps(c)
		rounds++
	}
	for begin := time.Now(); !t.Failed() && (counted.new.Load() == 0 || time.Since(begin) < d); rounds++ {
		o := &olderRound{t: t, s: open(t, rounds), space: space, count: &counted}
		o.run()
	}
	t.Logf("%d rounds: %d writes by the earlier version, %d by the present one, %d not admitted", rounds,
		counted.old.Load(), counted.new.Load(), counted.not.Load())
	if counted.not.Load() == 0 {
		t.Error("every write was admitted, want stale ones among them")
	}
}

type olderCount struct{ old, new, not atomic.Int64 }

type olderRound struct {
	t     *testing.T
	s     *Older
	space string
	count *olderCount
	known atomic.Uint64 // the highest token with a returned admission
}

func (o *olderRound) claim(token uint64) fencing.Claim {
	return fencing.Claim{Resource: "older", Token: fencing.Token(token), Space: o.space}
}

// write writes with the token, and reports an error of the test if a stale one is admitted.
func (o *olderRound) write(who string, by func(context.Context, fencing.Claim, string) error, n *atomic.Int64,
	token uint64,
) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	floor := o.known.Load()
	err := by(ctx, o.claim(token), fmt.Sprint(token))
	if err != nil {
		o.count.not.Add(1)
		return err
	}
	n.Add(1)
	if token < floor {
		o.t.Errorf("%s admits the token %d after %d", who, token, floor)
	}
	raise(&o.known, token)
	return nil
}

func (o *olderRound) old(token uint64) error {
	return o.write("the earlier version", o.s.Old, &o.count.old, token)
}

func (o *olderRound) new(token uint64) error {
	return o.write("the guard", o.s.New, &o.count.new, token)
}

func (o *olderRound) run() {
	ctx, cancel := context.WithTimeout(context.Background(), 4*patience)
	defer cancel()
	for _, token := range []uint64{5, 7} {
		if err := o.old(token); err != nil {
			o.t.Errorf("the earlier version does not admit the token %d: %v", token, err)
			return
		}
	}
	if err := o.old(6); err == nil {
		return
	}
	if err := o.new(8); !errors.Is(err, fencing.ErrGuardVersion) {
		o.t.Errorf("check of a store that is not migrated = %v, want ErrGuardVersion", err)
	}
	if err := o.s.Keeper.Raise(ctx, 1); !errors.Is(err, fencing.ErrGuardVersion) {
		o.t.Errorf("Raise in a store that is not migrated = %v, want ErrGuardVersion", err)
	}
	o.together(ctx)
	highest := o.known.Load()
	if err := o.old(highest + 1); err == nil {
		o.t.Errorf("after the migration the earlier version admits the token %d", highest+1)
	}
	if err := o.new(highest - 1); !errors.Is(err, fencing.ErrStale) {
		o.t.Errorf("after the migration the guard answers %v to the token %d after %d, want ErrStale", err, highest-1, highest)
	}
	if value, err := o.s.Read(ctx); err != nil || value != fmt.Sprint(highest) {
		o.t.Errorf("the value is %q (%v), the highest token that was admitted %d", value, err, highest)
	}
	if err := o.new(highest + 1); err != nil {
		o.t.Errorf("after the migration the guard does not admit the token %d after %d: %v", highest+1, highest, err)
	}
	if err := o.s.Keeper.Migrate(ctx); err != nil {
		o.t.Errorf("a second migration = %v", err)
	}
	if err := o.new(highest); !errors.Is(err, fencing.ErrStale) {
		o.t.Errorf("after a second migration the guard answers %v to the token %d after %d, want ErrStale", err, highest,
			highest+1)
	}
}

// keptCase is the memory of an earlier version, and the highest token refused after the migration.
type keptCase struct {
	terms fencing.Terms
	seen  fencing.Seen
	stale fencing.Token
}

func kept(space string) []keptCase {
	terms := func(epoch uint64, floor fencing.Token) fencing.Terms {
		return fencing.Terms{Epoch: epoch, Floor: floor, Pinned: true, Space: space}
	}
	return []keptCase{
		{terms(3, 100), fencing.Seen{Epoch: 3, Token: 150, Sequence: 7}, 149},
		{terms(3, 100), fencing.Seen{Epoch: 2, Token: 900, Sequence: 7}, 99},
		{terms(0, 2000), fencing.Seen{Epoch: 0, Token: 150}, 1999},
		{terms(0, 0), fencing.Seen{Epoch: 0, Token: fencing.MaxToken}, fencing.MaxToken - 1},
	}
}

// keeps checks that the migration keeps the earlier version's memory.
func (o *olderRound) keeps(c keptCase) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := errors.Join(o.s.Keep(ctx, c.terms, c.seen), o.s.Keeper.Migrate(ctx)); err != nil {
		o.t.Errorf("the migration of %+v and %+v = %v", c.terms, c.seen, err)
		return
	}
	terms, err := o.s.Keeper.Terms(ctx)
	c.terms.ID = terms.ID
	if err != nil || terms != c.terms || terms.ID == (fencing.Nonce{}) {
		o.t.Errorf("after the migration the terms are %+v, %v, want %+v with an ID", terms, err, c.terms)
	}
	if seen, err := o.s.Keeper.Seen(ctx, "older"); err != nil || seen != c.seen {
		o.t.Errorf("after the migration the resource is %+v, %v, want %+v", seen, err, c.seen)
	}
	show := func(token fencing.Token, sequence uint64) error {
		return o.s.New(ctx, o.claim(uint64(token)).At(sequence), "new")
	}
	if err := show(c.stale, 0); !errors.Is(err, fencing.ErrStale) {
		o.t.Errorf("after the migration of %+v and %+v the token %v = %v, want ErrStale", c.terms, c.seen, c.stale, err)
	}
	if c.seen.Token == c.stale+1 && c.seen.Sequence > 1 {
		if err := show(c.seen.Token, c.seen.Sequence-1); !errors.Is(err, fencing.ErrReordered) {
			o.t.Errorf("after the migration of %+v write %d = %v, want ErrReordered", c.seen, c.seen.Sequence-1, err)
		}
	}
	if err := show(c.stale+1, 0); err != nil {
		o.t.Errorf("after the migration of %+v and %+v the token %v = %v", c.terms, c.seen, c.stale+1, err)
	}
}

// together writes with both versions while the store is migrated.
func (o *olderRound) together(ctx context.Context) {
	var writers sync.WaitGroup
	var migrated atomic.Bool
	for i := range 4 {
		write := map[bool]func(uint64) error{true: o.old, false: o.new}[i%2 == 0]
		writers.Go(func() {
			for after := 0; after < 4 && !o.t.Failed(); {
				floor := o.known.Load()
				_ = write(max(1, floor+rand.Uint64N(4)-min(floor, 2)))
				if migrated.Load() {
					after++
				}
			}
		})
	}
	time.Sleep(rand.N(20 * time.Millisecond)) // so that it meets the writers at any step of theirs
	for {
		err := o.s.Keeper.Migrate(ctx)
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			o.t.Errorf("Migrate = %v", err)
			break
		}
	}
	migrated.Store(true)
	writers.Wait()
}
