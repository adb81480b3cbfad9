// Command reliability breaks every driver, checks the histories of its clients, and writes a report.
//
//	go run ./internal/reliability -o docs/RELIABILITY.md    # make report: runs everything, about two hours
//	go run ./internal/reliability -o … -from DIR            # writes the page from an earlier run's figures in DIR
//	go run ./internal/reliability -o … -only soak-server    # runs the soak of the server, and writes its section anew
//
// Each figure of the page comes from a test, as JSON (package internal/testfindings); a run without its expected figures
// is an error, and so is a failed test. The list of bugs found is kept by hand, in bugs.md; a test
// here sees that every command in it names an existing test.
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
	from := flag.String("from", "", "folder with the output of an earlier run, instead of running anything")
	keep := flag.String("keep", "",
		"folder that keeps the output, and of which a run that was broken off goes on; default: a temporary one")
	soak := flag.Duration("soak", time.Minute, "time of each run with drawn faults")
	rounds := flag.Int("rounds", 3, "rounds of each directed cluster fault")
	only := flag.String("only", "", "soak-server: run that step alone, and write its section of the page anew")
	flag.Parse()
	if flag.NArg() > 0 || *soak <= 0 || *rounds <= 0 || *only != "" && (*only != soakServer || *from != "") {
		flag.Usage()
		os.Exit(2)
	}
	s := settings{soak: *soak, rounds: *rounds}
	do := func() error { return run(*out, *from, *keep, s) }
	if *only != "" {
		do = func() error { return runServer(*out, *keep, s) }
	}
	if err := do(); err != nil {
		log.Fatal(err)
	}
}

// runServer rewrites the section about the soak of the bundled server.
func runServer(out, keep string, s settings) error {
	before, err := os.ReadFile(out)
	if err != nil {
		return err
	}
	if keep, err = folder(keep); err != nil {
		return err
	}
	var f findings
	for _, st := range stepsOf(s) {
		if st.name != soakServer {
			continue
		}
		if err := st.run(keep); err != nil {
			return err
		}
		if err := st.read(keep, &f); err != nil {
			return err
		}
	}
	text, err := withServer(string(before), serverSection(f.server, machine()))
	if err != nil {
		return err
	}
	return os.WriteFile(out, []byte(text), 0o644)
}

// folder returns the folder that keeps the output: a temporary one by default.
func folder(keep string) (string, error) {
	if keep == "" {
		return os.MkdirTemp("", "fencelock-report-")
	}
	return keep, os.MkdirAll(keep, 0o755)
}

// settings are how long it takes.
type settings struct {
	soak   time.Duration
	rounds int
}

func run(out, from, keep string, s settings) error {
	steps := stepsOf(s)
	if from == "" {
		var err error
		if keep, err = folder(keep); err != nil {
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
	return nil
}
