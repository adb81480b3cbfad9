package check

import (
	"fmt"
	"time"
)

// Figures are the counts and times of a history. Times that were not measured are zero.
type Figures struct {
	Operations int           `json:"operations"` // calls
	Grants     int           `json:"grants"`     // holds
	Refusals   int           `json:"refusals"`   // calls that were refused
	Unknowns   int           `json:"unknowns"`   // calls of unknown outcome
	Renewals   int           `json:"renewals"`   // that were recorded
	Losses     int           `json:"losses"`     // holds that ended otherwise than by their release, told or not
	Faults     int           `json:"faults"`     // marks
	Duration   time.Duration `json:"duration"`   // from the first event to the last

	// Of losses that a rival followed: how many were told before the rival was granted, at or after that, and never.
	ToldBefore int `json:"told_before"`
	ToldAfter  int `json:"told_after"`
	NeverTold  int `json:"never_told"`
	// Margin is the shortest time from the end of a lost hold's belief to the rival's grant, negative in an overlap.
	// It counts only if Margins, the number of such pairs, is not zero.
	Margin  time.Duration `json:"margin"`
	Margins int           `json:"margins"`
	// Overlapped is the longest time for which two believed at once, Overlaps how often.
	Overlapped time.Duration `json:"overlapped"`
	Overlaps   int           `json:"overlaps"`
	// Doubled is the number of holds still believed in when somebody else's began, Overrun the longest time from that
	// until the earlier holder's belief ended, however many held meanwhile.
	Doubled int           `json:"doubled"`
	Overrun time.Duration `json:"overrun"`
	// LateContext is the longest time from a deadline until the holder was told.
	LateContext time.Duration `json:"late_context"`
	// Recovery is the longest time from Healed to the next grant of any name, Recoveries how many there were.
	Recovery   time.Duration `json:"recovery"`
	Recoveries int           `json:"recoveries"`
	// Idle is the longest time for which a free name was waited for while there was no fault.
	Idle time.Duration `json:"idle"`

	// How long the scans and the search took, and how many operations were in the search.
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

// Count returns how many violations there are of a kind.
func (p Report) Count(kind Kind) int {
	n := 0
	for _, v := range p.Violations {
		if v.Kind == kind {
			n++
		}
	}
	return n
}
