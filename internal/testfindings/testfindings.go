// Package testfindings passes the results of tests to programs: as JSON in the attributes of `go test -json`. The report,
// internal/reliability, reads them.
package testfindings

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
)

// Clauses is the result of one run of the conformance suite.
type Clauses struct{ Passed, Failed, Inconclusive, Skipped, NotApplicable int }

// ClusterFault has the results of the rounds of a directed fault.
type ClusterFault struct {
	Slug                                          string
	Rounds, Grants, Losses, Confirmed, Violations int
	// Margin is the shortest time from a loss to the rival; nil if no rival followed.
	Margin                          *time.Duration
	Overlap                         time.Duration
	Recoveries                      int // of leaders' faults, until the locks went on
	MedianRecovery, LongestRecovery time.Duration
}

// Failover has the results of killing the primary under load and promoting its standby.
type Failover struct {
	Standby string // what was promised of it
	// Disorder counts tokens out of order, Doubled counts holders beside which a rival was granted.
	Rounds, Grants, Losses, Disorder, Doubled int
	Overrun                                   time.Duration // the longest of the latter
}

// Soak has the results of a run with drawn faults.
type Soak struct {
	Driver                                         string
	Reported                                       bool // faults that no driver promises to survive
	Seed                                           uint64
	Took                                           time.Duration
	Faults, Operations, Grants, Losses, Violations int
	// Margin is from the end of a lost holder's belief to its rival's grant.
	Margin                   *time.Duration
	Overlap, LongestRecovery time.Duration
	Kinds                    []SoakKind
	Found                    []Count // of violations
}

// ServerSoak has the results of a run of package internal/soak, by its own checker.
type ServerSoak struct {
	Seed                              uint64
	Took                              time.Duration
	Faults, Kinds, Grants, Violations int
	Longest                           time.Duration // without a grant
}

// SoakKind has the results of the faults of one kind.
type SoakKind struct {
	Slug            string
	Count, Violated int
	LongestRecovery time.Duration
}

// Count is the number of times that an event was found.
type Count struct {
	What  string
	Times int
}

// Mutant is a broken driver that was caught.
type Mutant struct{ What, Killers string }

// Simulation is a run in simulated time.
type Simulation struct {
	What  string
	Hours float64
	Text  string // the rest
}

// Rate is the number of times that two clients held one lock.
type Rate struct {
	Fault         string
	Times, Rounds int
}

const prefix = "fencelock."

// kinds are the types of facts, by name.
var kinds = map[string]reflect.Type{}

func init() {
	for _, fact := range []any{Clauses{}, ClusterFault{}, Failover{}, Soak{}, ServerSoak{}, Mutant{}, Simulation{}, Rate{}} {
		kinds[reflect.TypeOf(fact).Name()] = reflect.TypeOf(fact)
	}
}

// Write makes fact, one of the types above, an attribute of the test.
func Write(t testing.TB, fact any) {
	t.Helper()
	name := reflect.TypeOf(fact).Name()
	if kinds[name] != reflect.TypeOf(fact) {
		t.Fatalf("facts: %T is no fact", fact)
	}
	text, err := json.Marshal(fact)
	if err != nil {
		t.Fatalf("facts: %v", err)
	}
	t.Attr(prefix+name, string(text))
}

// Read returns the fact of an attribute, and nil if it is not a fact.
func Read(key, value string) (any, error) {
	name, ours := strings.CutPrefix(key, prefix)
	if !ours {
		return nil, nil
	}
	kind, ok := kinds[name]
	if !ok {
		return nil, fmt.Errorf("facts: %q is no fact", name)
	}
	fact := reflect.New(kind)
	d := json.NewDecoder(strings.NewReader(value))
	d.DisallowUnknownFields()
	if err := d.Decode(fact.Interface()); err != nil {
		return nil, fmt.Errorf("facts: %s: %w", name, err)
	}
	return fact.Elem().Interface(), nil
}
