package check

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/fencelock/fencelock/backend"
)

// The limits of Dump: the time for each search, the number of pictures, and the number of violations with the events
// around them.
const (
	pictureTime = 5 * time.Second
	pictures    = 3
	told        = 20
	around      = 30 // events before and after a violation
)

// Dump writes the data about a failure into dir, which it creates if necessary: history.jsonl, which ReadHistory
// reads; report.txt for people, with the seed; and for up to three names with violations a picture of the search,
// search-1.html and so on. It takes seconds.
func (p Report) Dump(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("dump: %w", err)
	}
	if err := writeFile(filepath.Join(dir, "history.jsonl"), p.History.Write); err != nil {
		return err
	}
	if err := writeFile(filepath.Join(dir, "report.txt"), p.tell); err != nil {
		return err
	}
	return p.picture(dir)
}

func writeFile(path string, write func(io.Writer) error) error {
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("dump: %w", err)
	}
	defer f.Close()
	out := bufio.NewWriter(f)
	if err := write(out); err != nil {
		return fmt.Errorf("dump: %w", err)
	}
	if err := out.Flush(); err != nil {
		return fmt.Errorf("dump: %w", err)
	}
	return nil
}

// tell writes the report as text.
func (p Report) tell(w io.Writer) error {
	if p.Rules.Seed != "" {
		fmt.Fprintf(w, "seed: %s\n", p.Rules.Seed)
	}
	fmt.Fprintf(w, "%v\nfigures: %+v\nTimes count from the first event.\n\n", p, p.Figures)
	for _, v := range p.Violations {
		fmt.Fprintf(w, "%s\n", v)
	}
	var start backend.Instant
	if len(p.History.Events) > 0 {
		start = p.History.Events[0].At
	}
	for i, v := range p.Violations[:min(len(p.Violations), told)] {
		if v.At == 0 {
			continue
		}
		fmt.Fprintf(w, "\n%d. %s\n", i+1, v)
		for _, e := range p.near(v) {
			fmt.Fprintf(w, "    %s\n", e.since(start))
		}
	}
	return nil
}

// near returns the events of the name around a violation, and the faults among them.
func (p Report) near(v Violation) []Event {
	var all []Event
	at := 0
	for _, e := range p.History.Events {
		if e.Name != v.Name && e.Name != "" {
			continue
		}
		all = append(all, e)
		if e.At <= v.At {
			at = len(all)
		}
	}
	return all[max(0, at-around):min(len(all), at+around)]
}

// picture draws the parts of the history with violations.
func (p Report) picture(dir string) error {
	r := gather(p.History, p.Rules)
	drawn := 0
	for _, n := range r.names {
		wrong := slices.IndexFunc(p.Violations, func(v Violation) bool { return v.Name == n.name })
		if wrong < 0 || drawn == pictures {
			continue
		}
		q, info := r.worst(n, p.Violations[wrong])
		if q == nil {
			continue
		}
		drawn++
		path := filepath.Join(dir, fmt.Sprintf("search-%d.html", drawn))
		if err := porcupine.VisualizePath(q.model(), info, path); err != nil {
			return fmt.Errorf("dump: %w", err)
		}
	}
	return nil
}

// worst returns the first illegal part of a name's history, or else the part with the violation.
func (r *run) worst(n *name, v Violation) (*part, porcupine.LinearizationInfo) {
	end := time.Now().Add(pictureTime)
	var there *part
	for _, q := range r.parts(n) {
		if there == nil || q.ops[0].Call <= int64(v.At) {
			there = q
		}
		if left := time.Until(end); left > 0 && len(q.ops) > 1 {
			if verdict, info := porcupine.CheckOperationsVerbose(q.model(), q.ops, left); verdict != porcupine.Ok {
				return q, info
			}
		}
	}
	if there == nil {
		return nil, porcupine.LinearizationInfo{}
	}
	_, info := porcupine.CheckOperationsVerbose(there.model(), there.ops, pictureTime)
	return there, info
}

// Text returns the first violations, one per line, for a test's failure message.
func (p Report) Text() string {
	var lines []string
	for _, v := range p.Violations[:min(len(p.Violations), told)] {
		lines = append(lines, v.String())
	}
	if more := len(p.Violations) - told; more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(lines, "\n")
}
