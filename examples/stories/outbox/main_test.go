package main

import (
	"context"
	"crypto/rand"
	"testing"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/examples/stories/internal/story/storytest"
	"github.com/fencelock/fencelock/fencing"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func expect(t *testing.T, o *story.Options, intents, sales, next int) {
	t.Helper()
	for query, want := range map[string]int{
		`SELECT count(*) FROM outbox WHERE sent`: intents, `SELECT count(*) FROM outbox`: intents,
		`SELECT sum(amount) FROM sales`: sales, `SELECT next FROM offsets`: next,
	} {
		if got := storytest.Query(t, o, query); got != want {
			t.Errorf("%s: %d; want %d", query, got, want)
		}
	}
}

func TestEverythingIsDoneOnce(t *testing.T) {
	for name, backend := range map[string]string{"builtin": "", "memory": "memory://" + rand.Text()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := &story.Options{Backend: backend}
			storytest.ExpectInOrder(t, storytest.Tell(t, o, tell),
				"worker 0 wakes up, and is refused", "relay 0 wakes up, and is refused",
				"consumer 0 wakes up, and is refused", "mails sent: 1, events in the topic: 2, sales: 50")
			expect(t, o, 1, 50, 2)
		})
	}
}

func TestUnsafeDoesItAgain(t *testing.T) {
	t.Parallel()
	o := &story.Options{Unsafe: true}
	storytest.ExpectInOrder(t, storytest.Tell(t, o, tell),
		"worker 0 wakes up, and does it", "mails sent: 4, events in the topic: 4, sales: 400")
	expect(t, o, 2, 400, 4)
}

// Each part is killed before or after its commit, and the next holder does it again.
func TestAKillAfterEachStep(t *testing.T) {
	t.Parallel()
	for _, committed := range []bool{false, true} {
		for killed := range 3 {
			o := &story.Options{}
			storytest.Tell(t, o, func(ctx context.Context, s *story.Story) error {
				sh, err := open(ctx, s)
				if err != nil {
					return err
				}
				for i, part := range []struct {
					lock    string
					prepare func(context.Context, fencing.Claim) (func(context.Context) error, error)
				}{{"orders/7", sh.pay}, {"outbox", sh.relay}, {"sales/0", sh.consume}} {
					do := func(commit bool) error {
						return sh.second.Do(ctx, part.lock, func(ctx context.Context, lease *fencelock.Lease) error {
							finish, err := part.prepare(ctx, lease.Claim(part.lock))
							if err != nil || !commit {
								return err
							}
							return finish(ctx)
						})
					}
					if i == killed {
						if err := do(committed); err != nil {
							return err
						}
					}
					if err := do(true); err != nil {
						return err
					}
				}
				if len(sh.mail.sent) != 1 {
					t.Errorf("part %d was killed, committed: %v; %d mails were sent", killed, committed, len(sh.mail.sent))
				}
				return nil
			})
			for query, want := range map[string]int{
				`SELECT sum(amount) FROM sales`: 50, `SELECT count(*) FROM outbox`: 1, `SELECT count(*) FROM sales`: 1,
			} {
				if got := storytest.Query(t, o, query); got != want {
					t.Errorf("part %d was killed, committed: %v; %s: %d, want %d", killed, committed, query, got, want)
				}
			}
		}
	}
}
