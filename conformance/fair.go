package conformance

import (
	"errors"
	"strings"
	"time"

	"github.com/fencelock/fencelock/internal/stall"
)

// fairly runs attempt as stall.Fairly says. A clause that never had a fair attempt is inconclusive.
func fairly(slack time.Duration, attempt func() (r Result, violated bool)) (r Result) {
	excused, err := stall.Fairly(slack, func() error {
		var violated bool
		if r, violated = attempt(); r.Outcome != Failed {
			return nil
		}
		err := errors.New(r.Messages[0])
		if violated {
			return stall.Conclusive(err)
		}
		return err
	})
	if len(excused) > 0 {
		r.Messages = append(r.Messages,
			"attempts that failed while the machine stood still: "+strings.Join(excused, "; "))
	}
	if errors.As(err, new(*stall.InconclusiveError)) {
		r.Outcome = Inconclusive
	}
	return r
}
