package conformance

import (
	"errors"
	"strings"
	"time"

	"github.com/fencelock/fencelock/internal/stallmeter"
)

// fairly runs attempt with stallmeter.FairlyAfter. A clause that never had a fair attempt is inconclusive.
func fairly(slack time.Duration, before func(), attempt func() (r Result, verdict bool)) (r Result) {
	excused, err := stallmeter.FairlyAfter(slack, before, func() error {
		var verdict bool
		if r, verdict = attempt(); r.Outcome != Failed {
			return nil
		}
		err := errors.New(r.Messages[0])
		if verdict {
			return stallmeter.Conclusive(err)
		}
		return err
	})
	if len(excused) > 0 {
		r.Messages = append(r.Messages,
			"attempts that failed while the machine stood still: "+strings.Join(excused, "; "))
	}
	if errors.As(err, new(*stallmeter.InconclusiveError)) {
		r.Outcome = Inconclusive
	}
	return r
}
