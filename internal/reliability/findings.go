package main

import (
	"fmt"
	"path"
	"strings"

	"github.com/fencelock/fencelock/internal/facts"
)

// findings are all facts that tests have written.
type findings struct {
	about       string
	clauses     map[string][]facts.Clauses // by driver
	faults      map[string][]facts.ClusterFault
	failovers   []facts.Failover
	soaks       []facts.Soak
	server      *facts.ServerSoak
	reported    []facts.Soak
	mutants     []mutant
	simulations []facts.Simulation
	rates       []facts.Rate
	peers       []string
}

type mutant struct {
	suite string
	facts.Mutant
}

// attribute takes in an attribute of a test of pkg.
func (f *findings) attribute(pkg, key, value string) error {
	fact, err := facts.Read(key, value)
	if err != nil {
		return err
	}
	driver, _, _ := strings.Cut(pkg, "/")
	switch fact := fact.(type) {
	case nil:
	case facts.Clauses:
		if f.clauses == nil {
			f.clauses = map[string][]facts.Clauses{}
		}
		f.clauses[driver] = append(f.clauses[driver], fact)
	case facts.ClusterFault:
		if f.faults == nil {
			f.faults = map[string][]facts.ClusterFault{}
		}
		f.faults[driver] = append(f.faults[driver], fact)
	case facts.Failover:
		f.failovers = append(f.failovers, fact)
	case facts.Soak:
		if fact.Reported {
			f.reported = append(f.reported, fact)
		} else {
			f.soaks = append(f.soaks, fact)
		}
	case facts.ServerSoak:
		f.server = &fact
	case facts.Mutant:
		f.mutants = append(f.mutants, mutant{path.Base(pkg), fact})
	case facts.Simulation:
		f.simulations = append(f.simulations, fact)
	case facts.Rate:
		f.rates = append(f.rates, fact)
	default:
		return fmt.Errorf("the report has no place for %T", fact)
	}
	return nil
}
