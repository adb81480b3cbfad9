package main

import (
	"fmt"
	"path"
	"strings"

	"github.com/fencelock/fencelock/internal/testfacts"
)

// findings are all facts that tests have written.
type findings struct {
	about       string
	clauses     map[string][]testfacts.Clauses // by driver
	faults      map[string][]testfacts.ClusterFault
	failovers   []testfacts.Failover
	soaks       []testfacts.Soak
	server      *testfacts.ServerSoak
	reported    []testfacts.Soak
	mutants     []mutant
	simulations []testfacts.Simulation
	rates       []testfacts.Rate
	peers       []string
}

type mutant struct {
	suite string
	testfacts.Mutant
}

// attribute takes in an attribute of a test of pkg.
func (f *findings) attribute(pkg, key, value string) error {
	fact, err := testfacts.Read(key, value)
	if err != nil {
		return err
	}
	driver, _, _ := strings.Cut(pkg, "/")
	switch fact := fact.(type) {
	case nil:
	case testfacts.Clauses:
		if f.clauses == nil {
			f.clauses = map[string][]testfacts.Clauses{}
		}
		f.clauses[driver] = append(f.clauses[driver], fact)
	case testfacts.ClusterFault:
		if f.faults == nil {
			f.faults = map[string][]testfacts.ClusterFault{}
		}
		f.faults[driver] = append(f.faults[driver], fact)
	case testfacts.Failover:
		f.failovers = append(f.failovers, fact)
	case testfacts.Soak:
		if fact.Reported {
			f.reported = append(f.reported, fact)
		} else {
			f.soaks = append(f.soaks, fact)
		}
	case testfacts.ServerSoak:
		f.server = &fact
	case testfacts.Mutant:
		f.mutants = append(f.mutants, mutant{path.Base(pkg), fact})
	case testfacts.Simulation:
		f.simulations = append(f.simulations, fact)
	case testfacts.Rate:
		f.rates = append(f.rates, fact)
	default:
		return fmt.Errorf("the report has no place for %T", fact)
	}
	return nil
}
