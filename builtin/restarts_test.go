package builtin_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/testtier"
)

// After any number of members are killed and restarted, one of them leads.
func TestRestartsAreNeverLeaderless(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	for _, c := range []struct{ killed, members int }{{1, 3}, {2, 3}, {3, 3}, {1, 1}} {
		t.Run(fmt.Sprintf("%d of %d", c.killed, c.members), func(t *testing.T) {
			t.Parallel()
			p := startProcesses(t, c.members)
			longest := time.Duration(0)
			rounds := testtier.Rounds(3, 50)
			for range rounds {
				p.mu.Lock()
				before := p.term
				p.mu.Unlock()
				killed := rand.Perm(c.members)[:c.killed]
				for _, i := range killed {
					if err := p.kill(t.Context(), i); err != nil {
						t.Fatal(err)
					}
					_ = p.child(i).Wait() // the error is that it was killed
				}
				begin := time.Now()
				within(t, func(ctx context.Context) error {
					for _, i := range killed {
						if err := p.start(ctx, i); err != nil {
							return err
						}
					}
					if c.killed < c.members { // the leader may be among the others and continue
						before = 0
					}
					_, _, err := p.lead(ctx, before)
					return err
				})
				longest = max(longest, time.Since(begin))
			}
			t.Logf("%d rounds, a leader after %v at most", rounds, longest)
		})
	}
}
