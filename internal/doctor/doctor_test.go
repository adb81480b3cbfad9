package doctor_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/internal/doctor"
)

// An address that does not answer leaves time for questions to the others.
func TestAskLeavesTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		members := doctor.Ask(ctx, []string{"dead", "well"}, func(ctx context.Context, i int) (doctor.Member, error) {
			if i == 0 {
				<-ctx.Done()
			}
			return doctor.Member{}, ctx.Err()
		})
		if !errors.Is(members[0].Err, context.DeadlineExceeded) || members[1].Err != nil {
			t.Errorf("Ask = %+v", members)
		}
		if deadline, _ := ctx.Deadline(); time.Until(deadline) < time.Second {
			t.Errorf("%v are left for other questions", time.Until(deadline))
		}
	})
}
