package cluster

import (
	"context"
	"fmt"
	"maps"

	"github.com/fencelock/fencelock/conformance/check"
)

// Found is the kind of violation that the rivals find without check: a refused write of a holder, an admitted late
// write, or an error that no fault explains.
const Found check.Kind = "found"

// report is the result of a run.
type report struct {
	check.Report
	refused, confirmed int
	failures           map[string]int
}

// verify checks the whole history. All calls have ended.
func (r *rivals) verify(ctx context.Context) report {
	g := r.register
	g.mu.Lock()
	defer g.mu.Unlock()
	var found []check.Violation
	for _, text := range g.found {
		found = append(found, check.Violation{Kind: Found, Text: text})
	}
	return report{
		Report: check.Verify(ctx, r.recorder.History(), check.Rules{
			Fencing: true, TTL: r.ttl, Patience: patience, Recovery: patience, Found: found,
		}),
		refused: g.refused, confirmed: g.confirmed, failures: maps.Clone(g.failures),
	}
}

func (p report) String() string {
	margin := "no loss was followed by a rival"
	if p.Margins > 0 {
		margin = fmt.Sprintf("shortest time from a loss to the rival %.1f ms", p.Margin.Seconds()*1000)
	}
	return fmt.Sprintf("%d grants, %d lost, %d confirmed by the service, %s, %d late writes refused, "+
		"contexts up to %.1f ms after the deadline, %v failed, overlap %.1f ms, %d violations",
		p.Grants, p.Losses, p.confirmed, margin, p.refused,
		p.LateContext.Seconds()*1000, p.failures,
		p.Overlapped.Seconds()*1000, len(p.Violations))
}
