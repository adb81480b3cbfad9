package main

import (
	"fmt"
	"path"
	"strings"

	"github.com/fencelock/fencelock/internal/testfindings"
)

// findings are all facts that tests have written.
type findings struct {
	about       string
	clauses     map[string][]testfindings.Clauses // by driver
	faults      map[string][]testfindings.ClusterFault
	failovers   []testfindings.Failover
	soaks       []testfindings.Soak
	server      *testfindings.ServerSoak
	reported    []testfindings.Soak
	mutants     []mutant
	simulations []testfindings.Simulation
	rates       []testfindings.Rate
	peers       []string
}

type mutant struct {
	suite string
	testfindings.Mutant
}

// attribute takes in an attribute of a test of pkg.
func (f *findings) attribute(pkg, key, value string) error {
	fact, err := testfindings.Read(key, value)
	if err != nil {
		return err
	}
	driver, _, _ := strings.Cut(pkg, "/")
	switch fact := fact.(type) {
	case nil:
	case testfindings.Clauses:
		if f.clauses == nil {
			f.clauses = map[string][]testfindings.Clauses{}
		}
		f.clauses[driver] = append(f.clauses[driver], fact)
	case testfindings.ClusterFault:
		if f.faults == nil {
			f.faults = map[string][]testfindings.ClusterFault{}
		}
		f.faults[driver] = append(f.faults[driver], fact)
	case testfindings.Failover:
		f.failovers = append(f.failovers, fact)
	case testfindings.Soak:
		if fact.Reported {
			f.reported = append(f.reported, fact)
		} else {
			f.soaks = append(f.soaks, fact)
		}
	case testfindings.ServerSoak:
		f.server = &fact
	case testfindings.Mutant:
		f.mutants = append(f.mutants, mutant{path.Base(pkg), fact})
	case testfindings.Simulation:
		f.simulations = append(f.simulations, fact)
	case testfindings.Rate:
		f.rates = append(f.rates, fact)
	default:
		return fmt.Errorf("the report has no place for %T", fact)
	}
	return nil
}
