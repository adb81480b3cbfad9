package builtin_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
)

// adminOf returns the administration of n.
func adminOf(t *testing.T, n *node) *builtin.Admin {
	t.Helper()
	admin, err := builtin.OpenAdmin("fencelock://" + n.addr())
	if err != nil {
		t.Fatal(err)
	}
	return admin
}

// policies sets the policies of the cluster of n.
func policies(t *testing.T, n *node, text string) {
	t.Helper()
	admin := adminOf(t, n)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	is, err := admin.SetPolicies(ctx, text)
	if err != nil || is.GetText() != text {
		t.Fatalf("%v, %v", is, err)
	}
	if got, err := admin.Policies(ctx); err != nil || got.GetText() != text {
		t.Errorf("%v, %v", got, err)
	}
}

// A lease that is renewed in time ends at its maximum hold time, with that reason and before the rival holds. The same
// is true for a grant after a wait.
func TestPolicyMaxHold(t *testing.T) {
	t.Parallel()
	const most = 15 * time.Second
	n := startNode(t)
	policies(t, n, "max-hold=15s a\n")
	client := func(ttl time.Duration) *fencelock.Client {
		c, err := fencelock.ForCorrectness(attached(t, n), &fencelock.Options{TTL: ttl})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close(context.Background()) })
		return c
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := client(2*most).Acquire(ctx, "a/1"); !errors.Is(err, fencelock.ErrInvalidTTL) {
		t.Errorf("a TTL above the maximum: %v", err)
	}
	clients := []*fencelock.Client{client(most), client(most), client(most)}
	began := time.Now()
	lease, err := clients[0].Acquire(ctx, "a/1")
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range clients[1:] {
		before := lease
		if lease, err = c.Acquire(ctx, "a/1"); err != nil {
			t.Fatal(err)
		}
		lost := (*fencelock.LostError)(nil)
		if err := before.Err(); !errors.As(err, &lost) || lost.Reason != fencelock.ReasonMaxHold {
			t.Errorf("hold %d when the next one is granted: %v", i, err)
		}
		if held := time.Since(began); i == 0 && held < most*98/100 {
			t.Errorf("hold %d ended after %v, want %v", i, held, most)
		}
	}
	if _, err := clients[0].Acquire(ctx, "b"); err != nil {
		t.Errorf("the session of a hold that was ended: %v", err)
	}
}

// A grant is not valid beyond the maximum hold time, even if the acquire is repeated.
func TestPolicyMaxHoldOfARepeatedAcquire(t *testing.T) {
	t.Parallel()
	const most = time.Minute
	n := startNode(t)
	policies(t, n, "max-hold=1m a\n")
	d, r := attached(t, n), request("a", most)
	first := take(t, d, r)
	last := d.Describe().Clock.Now().Add(most * 99 / 100)
	again := take(t, d, r)
	if again.Token != first.Token {
		t.Fatalf("another hold: token %v after %v", again.Token, first.Token)
	}
	for _, g := range []backend.Grant{first, again} {
		if until := g.SentAt.Add(g.TTL); until > last {
			t.Errorf("a grant is valid for %v beyond the maximum", until.Sub(last))
		}
	}
}

// A full queue is backend.ErrQueueFull, and permits in use get the limit of the policy.
func TestPolicyQueueAndPermits(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	policies(t, n, "max-queue=1 q\npermits=1 p\n")
	d, other := attached(t, n), attached(t, n)
	take(t, d, request("q", time.Minute))
	beginAll(t, other, []backend.Request{request("q", time.Minute)})
	wait := request("q", time.Minute)
	wait.Wait = true
	refused(t, other, wait, backend.ErrQueueFull)

	permits := func(some int) backend.Request {
		r := request("p", time.Minute)
		r.Kind, r.Permits, r.Limit = backend.KindPermits, some, 5
		return r
	}
	take(t, d, permits(1))
	refused(t, other, permits(1), backend.ErrHeld)
	refused(t, other, permits(2), backend.ErrInvalidOption)
	policies(t, n, "permits=3 p\n")
	take(t, other, permits(1))
	second, _ := beginAll(t, other, []backend.Request{permits(2)})
	policies(t, n, "permits=4 p\n")
	if len(<-second) != 1 {
		t.Error("a waiter is not granted when there are more permits")
	}
	tooMany := permits(3)
	tooMany.Wait = true
	failed := make(chan error, 1)
	go func() {
		_, err := d.Acquire(t.Context(), tooMany)
		failed <- err
	}()
	eventually(t, "a waiter waits for 3 permits", func() bool { return waitersOf(t, d, "p") == 1 })
	policies(t, n, "permits=2 p\n")
	select {
	case err := <-failed:
		if !errors.Is(err, backend.ErrInvalidOption) {
			t.Errorf("who wants more than there are: %v", err)
		}
	case <-time.After(patience):
		t.Error("who wants more than there are waits on")
	}
}
