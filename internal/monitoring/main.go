// Command monitoring writes the table of internal/metrics into the documentation and the dashboard:
//
//	go run ./internal/monitoring
//
// A test fails while they differ from the table.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/fencelock/fencelock/internal/metrics"
)

// The tables stand in the page between such lines.
const (
	begin = "<!-- %s: go run ./internal/monitoring -->\n"
	end   = "<!-- end of %s -->\n"
)

const (
	page  = "docs/OBSERVABILITY.md"
	board = "deploy/monitoring/dashboard.json"
)

func main() {
	for file, text := range files(".") {
		if err := os.WriteFile(file, text, 0o644); err != nil { //nolint:gosec // it is public
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

// files returns the generated files of a tree by their path below root.
func files(root string) map[string][]byte {
	return map[string][]byte{page: document(filepath.Join(root, page)), board: dashboard()}
}

// document returns a page with the tables.
func document(file string) []byte {
	text, err := os.ReadFile(file)
	if err != nil {
		panic(err)
	}
	page := string(text)
	for what, table := range map[string]string{"metrics": table(), "panels": panelTable()} {
		from, to := fmt.Sprintf(begin, what), fmt.Sprintf(end, what)
		before, rest, found := strings.Cut(page, from)
		_, after, closed := strings.Cut(rest, to)
		if !found || !closed {
			panic(file + " has no place for the " + what)
		}
		page = before + from + table + to + after
	}
	return []byte(page)
}

// table lists the metrics in Markdown.
func table() string {
	var b strings.Builder
	b.WriteString("\n| metric | type | from | labels | meaning |\n|---|---|---|---|---|\n")
	for _, m := range metrics.All() {
		var labels []string
		for _, l := range m.Labels {
			text := l
			if values := m.Values[l]; values != nil && len(values) <= 6 {
				text += ": `" + strings.Join(values, "`, `") + "`"
			}
			labels = append(labels, text)
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s |\n", m.Name, m.Type, m.Where, strings.Join(labels, "; "), m.Help)
	}
	b.WriteString("\n")
	return b.String()
}
