package check

import (
	"fmt"
	"time"
)

// Figures are the counts and times of a history. Times that were not measured are zero.
type Figures struct {
	Operations int           `json:"operations"` // calls
	Grants     int           `json:"grants"`     // holds
	Refusals   int           `json:"refusals"`   // refused calls
	Unknowns   int           `json:"unknowns"`   // calls of unknown outcome
	Renewals   int           `json:"renewals"`   // recorded renewals
	Losses     int           `json:"losses"`     // holds that ended without a release, notified or not
	Faults     int           `json:"faults"`     // marks
	Duration   time.Duration `json:"duration"`   // from the first event to the last

	// Of losses that a rival followed: the numbers of notifications before the rival's grant, after it, and of missing
	// ones.
	NotifiedBefore int `json:"notified_before"`
	NotifiedAfter  int `json:"notified_after"`
	NeverNotified  int `json:"never_notified"`
	// Margin is the shortest time from the end of a lost hold's validity to the rival's grant, negative in an overlap.
	// It is defined if Margins, the number of such pairs, is not zero.
	Margin  time.Duration `json:"margin"`
	Margins int           `json:"margins"`
	// Overlapped is the longest time for which conflicting holds were valid, Overlaps the number of such times.
	Overlapped time.Duration `json:"overlapped"`
	Overlaps   int           `json:"overlaps"`
	// Doubled is the number of holds that were still valid when a conflicting hold began, Overrun the longest time from
	// that until the earlier hold's end.
	Doubled int           `json:"doubled"`
	Overrun time.Duration `json:"overrun"`
	// LateContext is the longest time from a deadline until the holder's notification.
	LateContext time.Duration `json:"late_context"`
	// Recovery is the longest time from Healed to the next grant of any name, Recoveries their number.
	Recovery   time.Duration `json:"recovery"`
	Recoveries int           `json:"recoveries"`
	// Idle is the longest wait for a free name without a fault.
	Idle time.Duration `json:"idle"`

	// The times of the scans and of the search, and the number of searched operations.
	Scans    time.Duration `json:"scans"`
	Search   time.Duration `json:"search"`
	Searched int           `json:"searched"`
}

// Report is the result of Verify.
type Report struct {
	Violations []Violation
	Figures
	History History
	Rules   Rules
}

// String returns the figures in one line.
func (p Report) String() string {
	margin := "no loss was followed by a rival"
	if p.Margins > 0 {
		margin = fmt.Sprintf("worst margin from a loss to the rival %.1f ms", p.Margin.Seconds()*1000)
	}
	return fmt.Sprintf("%d operations, %d grants, %d losses, %d of unknown outcome, %s, overlap %.1f ms, "+
		"contexts up to %.1f ms late, %d violations",
		p.Operations, p.Grants, p.Losses, p.Unknowns, margin, p.Overlapped.Seconds()*1000, p.LateContext.Seconds()*1000,
		len(p.Violations))
}

// Count returns the number of violations of a kind.
func (p Report) Count(kind Kind) int {
	n := 0
	for _, v := range p.Violations {
		if v.Kind == kind {
			n++
		}
	}
	return n
}
