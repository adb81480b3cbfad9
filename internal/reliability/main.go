// Command reliability breaks every driver, checks what its clients saw, and writes down what came of it.
//
//	go run ./internal/reliability -o docs/RELIABILITY.md    # make report: runs everything, about half an hour
//	go run ./internal/reliability -o … -from DIR            # writes the page from an earlier run's figures in DIR
//
// Each figure of the page is one that a test has written as JSON (package internal/facts); a run that does not write
// what it should is an error, and so is a test that fails. The list of bugs found is kept by hand, in bugs.md; a test
// here sees that every command in it names a test that is there.
package main

import (
	"flag"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"time"
)

func main() {
	log.SetFlags(log.Ltime)
	out := flag.String("o", "docs/RELIABILITY.md", "file to write")
	readme := flag.String("readme", "README.md", "file whose head of the report is replaced; empty: none")
	from := flag.String("from", "", "folder with the output of an earlier run, instead of running anything")
	keep := flag.String("keep", "",
		"folder that keeps the output, and of which a run that was broken off goes on; default: a temporary one")
	soak := flag.Duration("soak", time.Minute, "time of each run with drawn faults")
	rounds := flag.Int("rounds", 3, "rounds of each directed cluster fault")
	flag.Parse()
	if flag.NArg() > 0 || *soak <= 0 || *rounds <= 0 {
		flag.Usage()
		os.Exit(2)
	}
	if err := run(*out, *readme, *from, *keep, settings{soak: *soak, rounds: *rounds}); err != nil {
		log.Fatal(err)
	}
}

// settings are how long it takes.
type settings struct {
	soak   time.Duration
	rounds int
}

func run(out, readme, from, keep string, s settings) error {
	steps := stepsOf(s)
	if from == "" {
		var err error
		if keep == "" {
			if keep, err = os.MkdirTemp("", "fencelock-report-"); err != nil {
				return err
			}
		} else if err = os.MkdirAll(keep, 0o755); err != nil {
			return err
		}
		log.Printf("the output is kept in %s", keep)
		for _, st := range steps {
			if err := st.run(keep); err != nil {
				return err
			}
		}
		if err := os.WriteFile(filepath.Join(keep, machineFile), []byte(machine()), 0o644); err != nil {
			return err
		}
		from = keep
	}
	var f findings
	for _, st := range steps {
		if err := st.read(from, &f); err != nil {
			return err
		}
	}
	about, err := os.ReadFile(filepath.Join(from, machineFile))
	if err != nil {
		return err
	}
	f.about = string(about)
	if err := os.WriteFile(out, []byte(page(f, steps)), 0o644); err != nil {
		return fmt.Errorf("write %s: %w", out, err)
	}
	if readme == "" {
		return nil
	}
	return rewrite(readme, head(f))
}
