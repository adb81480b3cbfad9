package builtin_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/conformance/fault"
)

func sharedOf(name string) backend.Request {
	r := request(name, time.Minute)
	r.Kind = backend.KindShared
	return r
}

func permitsOf(name string, n, limit int) backend.Request {
	r := request(name, time.Minute)
	r.Kind, r.Permits, r.Limit = backend.KindPermits, n, limit
	return r
}

func below(name string) backend.Request {
	r := request(name, time.Minute)
	r.Hierarchical = true
	return r
}

// pending is an acquire that waits.
type pending struct {
	done  chan struct{}
	grant backend.Grant
	err   error
}

// wait begins to wait for r, and returns when the name has the given number of waiters.
func wait(t *testing.T, d *builtin.Driver, r backend.Request, waiters int) *pending {
	t.Helper()
	p := begin(t, d, r)
	eventually(t, fmt.Sprintf("%d wait for %s", waiters, r.Name), func() bool { return waitersOf(t, d, r.Name) == waiters })
	return p
}

// begin begins to wait for r.
func begin(t *testing.T, d *builtin.Driver, r backend.Request) *pending {
	t.Helper()
	r.Wait = true
	p := &pending{done: make(chan struct{})}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	go func() {
		defer cancel()
		defer close(p.done)
		p.grant, p.err = d.Acquire(ctx, r)
	}()
	t.Cleanup(func() { <-p.done })
	return p
}

func waitersOf(t *testing.T, d *builtin.Driver, name string) int {
	t.Helper()
	info, err := d.Look(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	return info.Waiters
}

// granted waits for the grant.
func (p *pending) granted(t *testing.T) backend.Grant {
	t.Helper()
	<-p.done
	if p.err != nil {
		t.Fatal(p.err)
	}
	return p.grant
}

// stillWaiting checks the number of waiters for a name.
func stillWaiting(t *testing.T, d *builtin.Driver, name string, waiters int) {
	t.Helper()
	if n := waitersOf(t, d, name); n != waiters {
		t.Fatalf("%d wait for %s, want %d", n, name, waiters)
	}
}

func giveBack(t *testing.T, d *builtin.Driver, grants ...backend.Grant) {
	t.Helper()
	for _, g := range grants {
		if err := d.Release(t.Context(), g); err != nil {
			t.Fatal(err)
		}
	}
}

// refused makes one attempt, which must fail with the error why.
func refused(t *testing.T, d *builtin.Driver, r backend.Request, why error) error {
	t.Helper()
	g, err := d.Acquire(t.Context(), r)
	if !errors.Is(err, why) {
		t.Fatalf("acquire of %s as %v: %+v, %v; want %v", r.Name, r.Kind, g, err, why)
	}
	return err
}

// holdersOf returns the holders of a name.
func holdersOf(t *testing.T, d *builtin.Driver, name string) []backend.Holder {
	t.Helper()
	info, err := d.Look(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	return info.Holders
}

func TestWaitingWriterStopsReaders(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	a, b := attached(t, n), attached(t, n)
	first, second := take(t, a, sharedOf("x")), take(t, b, sharedOf("x"))
	if first.Token.Exclusive() || second.Token.Order() <= first.Token.Order() {
		t.Errorf("tokens %v and %v, want marked ones that increase", first.Token, second.Token)
	}
	if all := holdersOf(t, a, "x"); len(all) != 2 || all[0].Kind != backend.KindShared || all[0].Token != first.Token {
		t.Errorf("holders %+v", all)
	}
	refused(t, b, request("x", time.Minute), backend.ErrHeld)
	writer := wait(t, b, request("x", time.Minute), 1)
	refused(t, a, sharedOf("x"), backend.ErrHeld)
	reader := wait(t, a, sharedOf("x"), 2)
	giveBack(t, a, first)
	stillWaiting(t, a, "x", 2)
	giveBack(t, b, second)
	w := writer.granted(t)
	if !w.Token.Exclusive() || w.Token.Order() <= second.Token.Order() {
		t.Errorf("the writer's token is %v after %v", w.Token, second.Token)
	}
	stillWaiting(t, a, "x", 1)
	giveBack(t, b, w)
	if r := reader.granted(t); !r.Queued || r.Kind != backend.KindShared {
		t.Errorf("the reader has %+v", r)
	}
}

func TestSharedHoldIsRenewedAndMoved(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	d, other := attached(t, n), attached(t, n)
	g := take(t, d, sharedOf("x"))
	longer := g
	longer.TTL = time.Hour
	for _, r := range d.Renew(t.Context(), []backend.Grant{longer, longer}) {
		if r.Err != nil || r.TTL != time.Hour {
			t.Fatalf("renewal: %+v", r)
		}
	}
	if all := holdersOf(t, other, "x"); len(all) != 1 || all[0].Token != g.Token || all[0].ExpiresIn < 30*time.Minute {
		t.Errorf("holders %+v", all)
	}
	giveBack(t, d, longer)
	take(t, other, request("x", time.Minute))
}

func TestPermits(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	d := attached(t, n)
	two, three := take(t, d, permitsOf("pool", 2, 8)), take(t, d, permitsOf("pool", 3, 8))
	if two.Token.Exclusive() || two.Permits != 2 || two.Limit != 8 {
		t.Errorf("granted %+v", two)
	}
	if all := holdersOf(t, d, "pool"); len(all) != 2 || all[1].Kind != backend.KindPermits || all[1].Permits != 3 {
		t.Errorf("holders %+v", all)
	}
	refused(t, d, permitsOf("pool", 4, 8), backend.ErrHeld)
	many := wait(t, d, permitsOf("pool", 6, 8), 1)
	refused(t, d, permitsOf("pool", 1, 8), backend.ErrHeld) // three permits are free, but the waiter is first
	few := wait(t, d, permitsOf("pool", 2, 8), 2)
	giveBack(t, d, two)
	stillWaiting(t, d, "pool", 2)
	giveBack(t, d, three)
	many.granted(t)
	few.granted(t)
	refused(t, d, permitsOf("pool", 1, 8), backend.ErrHeld)
}

// Permits and shared holds of a dead client become free when its session ends.
func TestHoldsOfAClientThatIsGoneComeBack(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	victim, link := linked(t, n.addr())
	defer victim.Close(context.Background())
	defer link.Pass()
	d := attached(t, n)
	const ttl = time.Second
	permits, read := permitsOf("pool", 3, 4), sharedOf("x")
	permits.TTL, read.TTL = ttl, ttl
	take(t, victim, permits)
	take(t, victim, read)
	one := take(t, d, permitsOf("pool", 1, 4))
	link.Hold(fault.Requests)
	three, writer := begin(t, d, permitsOf("pool", 3, 4)), begin(t, d, request("x", time.Minute))
	giveBack(t, d, one, three.granted(t), writer.granted(t))
	take(t, d, permitsOf("pool", 5, 5)) // no hold limits it
}

func TestKindsThatDoNotMix(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	d := attached(t, n)
	permits := take(t, d, permitsOf("pool", 1, 8))
	flat := take(t, d, request("flat", time.Minute))
	tree := take(t, d, below("tree/leaf"))
	for _, r := range []backend.Request{
		permitsOf("pool", 1, 9), request("pool", time.Minute), sharedOf("pool"), below("pool"), below("pool/below"),
		permitsOf("flat", 1, 8), below("flat"), below("flat/below"),
		permitsOf("tree/leaf", 1, 8), request("tree/leaf", time.Minute), request("tree", time.Minute), sharedOf("tree"),
	} {
		refused(t, d, r, backend.ErrLimitMismatch)
		r.Wait = true
		refused(t, d, r, backend.ErrLimitMismatch)
	}
	_, err := d.AcquireAll(t.Context(), []backend.Request{request("free", time.Minute), permitsOf("pool", 1, 9)})
	if !errors.Is(err, backend.ErrLimitMismatch) || len(holdersOf(t, d, "free")) != 0 {
		t.Errorf("a set with the wrong limit: %v, and the other name is held by %v", err, holdersOf(t, d, "free"))
	}
	// Holds below or beside a hierarchical name do not count as its use.
	take(t, d, request("tree/leaf/below", time.Minute))
	take(t, d, request("flat/below", time.Minute))
	giveBack(t, d, permits, flat, tree)
	take(t, d, permitsOf("pool", 1, 9))
	take(t, d, sharedOf("flat"))
	take(t, d, request("tree", time.Minute))
}

func TestHierarchy(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	a, b := attached(t, n), attached(t, n)
	readBelow := func(name string) backend.Request {
		r := below(name)
		r.Kind = backend.KindShared
		return r
	}
	hold := take(t, a, below("shop/eu/7"))
	if !hold.Hierarchical || !hold.Token.Exclusive() {
		t.Errorf("granted %+v", hold)
	}
	for _, name := range []string{"shop", "shop/eu", "shop/eu/7", "shop/eu/7/line"} {
		err := refused(t, b, below(name), backend.ErrHeld)
		refused(t, b, readBelow(name), backend.ErrHeld)
		var held *backend.HeldError
		if !errors.As(err, &held) || held.Holder != "test" || held.Name == "" {
			t.Errorf("%s: %v, want the holder and the name", name, err)
		}
	}
	beside := take(t, b, below("shop/eu/8"))
	take(t, b, readBelow("shop/us"))
	whole := wait(t, b, below("shop/eu"), 1)
	refused(t, a, below("shop/eu/9"), backend.ErrHeld) // it would overtake the waiter
	giveBack(t, b, beside)
	stillWaiting(t, a, "shop/eu", 1)
	giveBack(t, a, hold)
	if g := whole.granted(t); g.Token <= hold.Token {
		t.Errorf("token %v after %v", g.Token, hold.Token)
	}
}

// A forced release notifies all holders of the name.
func TestForceReleaseOfSharedHolds(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	a, b := attached(t, n), attached(t, n)
	told := make(chan backend.Reason, 8)
	for _, d := range []*builtin.Driver{a, a, b} {
		r := sharedOf("x")
		r.Lost = func(loss backend.Loss) { told <- loss.Reason }
		take(t, d, r)
	}
	if err := b.ForceRelease(t.Context(), backend.ForceRequest{Name: "x", Reason: "maintenance"}); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		select {
		case reason := <-told:
			if reason != backend.ReasonForceReleased {
				t.Errorf("reason %q", reason)
			}
		case <-time.After(patience):
			t.Fatal("a holder was not notified")
		}
	}
	take(t, b, request("x", time.Minute))
}

// Watch, List and Look report the kinds of the holds.
func TestKindsAreShown(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	d := attached(t, n)
	before := take(t, d, request("before", time.Minute))
	read, permits := take(t, d, sharedOf("k/read")), take(t, d, permitsOf("k/pool", 2, 3))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for e, err := range d.Watch(ctx, "k/pool", before.Token.Order()) {
		if err != nil || e.Type != backend.ChangeAcquired || e.Token != permits.Token || e.Token.Exclusive() {
			t.Errorf("event %+v, %v", e, err)
		}
		break
	}
	got := map[string]string{}
	for info, err := range d.List(ctx, "k/") {
		if err != nil {
			t.Fatal(err)
		}
		h := info.Holders[0]
		got[info.Name] = fmt.Sprintf("%v %d %v", h.Kind, h.Permits, h.Token)
	}
	want := map[string]string{
		"k/read": fmt.Sprintf("shared 0 %v", read.Token), "k/pool": fmt.Sprintf("permits 2 %v", permits.Token),
	}
	if !maps.Equal(got, want) {
		t.Errorf("listed %v", got)
	}
}

func TestDeadlockIsRefusedWithItsCycle(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	a, b, c := attached(t, n), attached(t, n), attached(t, n)
	as := func(who, name string) backend.Request {
		r := request(name, time.Minute)
		r.Owner = who
		return r
	}
	x := take(t, a, as("anna", "x"))
	y := take(t, b, as("bert", "y"))
	third := take(t, c, as("carl", "z"))
	first, second := wait(t, a, under(as("anna", "y"), x), 1), wait(t, b, under(as("bert", "z"), y), 1)
	closing := under(as("carl", "x"), third)
	closing.Wait, closing.TTL = true, time.Hour // on another session
	err := refused(t, c, closing, backend.ErrDeadlock)
	var deadlock *backend.DeadlockError
	if !errors.As(err, &deadlock) {
		t.Fatalf("%v has no cycle", err)
	}
	want := []backend.DeadlockEdge{
		{Owner: "carl", Holds: "z", Wants: "x"}, {Owner: "anna", Holds: "x", Wants: "y"}, {Owner: "bert", Holds: "y", Wants: "z"},
	}
	if !slices.Equal(deadlock.Cycle, want) {
		t.Errorf("cycle %v, want %v", deadlock.Cycle, want)
	}
	stillWaiting(t, c, "x", 0) // the refused request left no waiter
	// The same is true for a set. A request that does not wait, or names no holds, is in no cycle.
	free, other := under(as("carl", "free"), third), under(as("carl", "x"), third)
	free.Wait, other.Wait = true, true
	if _, err := c.AcquireAll(t.Context(), []backend.Request{free, other}); !errors.Is(err, backend.ErrDeadlock) {
		t.Errorf("a set: %v, want ErrDeadlock", err)
	}
	take(t, c, request("free", time.Minute))
	refused(t, c, under(as("carl", "x"), third), backend.ErrHeld)
	stranger := wait(t, c, request("x", time.Minute), 1)
	giveBack(t, c, third)
	giveBack(t, b, second.granted(t), y)
	giveBack(t, a, first.granted(t), x)
	stranger.granted(t)
}

// Callers of one program wait for each other like callers of two programs, unless one acquires under the hold of the
// other.
func TestDeadlocksOfOneClient(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	d := attached(t, n)
	waiting := func(name string, holds ...backend.Grant) backend.Request {
		r := under(request(name, time.Minute), holds...)
		r.Wait = true
		return r
	}
	one := take(t, d, waiting("x"))
	two := wait(t, d, waiting("x"), 1)
	refused(t, d, waiting("x", one), backend.ErrDeadlock) // the request would wait for its own hold
	child := take(t, d, waiting("y", one))
	sibling := wait(t, d, waiting("y", one), 1)
	giveBack(t, d, child)
	giveBack(t, d, sibling.granted(t))
	giveBack(t, d, one)
	two.granted(t)
}

// under returns r, made under holds.
func under(r backend.Request, holds ...backend.Grant) backend.Request {
	for _, g := range holds {
		r.Under = append(r.Under, g.RequestID)
	}
	return r
}
