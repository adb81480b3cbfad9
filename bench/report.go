package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"
)

// table is one scenario on one system, measured.
type table struct {
	System   string    `json:"system"`
	Scenario string    `json:"scenario"`
	About    string    `json:"about"`
	Seconds  number    `json:"seconds"`
	Foreign  number    `json:"foreignCores"` // highest load by others in any round
	Columns  []string  `json:"columns"`
	Rows     []line    `json:"rows"`
	Targets  []verdict `json:"targets"`
	Point    *point    `json:"point,omitempty"` // of a curve

	keys []string // of the columns
}

// line is one row of a table.
type line struct {
	Name   string              `json:"name"`
	Role   role                `json:"role"`
	Values []number            `json:"values"` // in the order of the columns
	Rounds []map[string]number `json:"rounds"` // everything that was measured, round by round
	Error  string              `json:"error,omitempty"`
}

// verdict is a target beside what was measured for one row of ours.
type verdict struct {
	Row      string `json:"row"`
	Text     string `json:"text"`
	Target   string `json:"target"`
	Measured number `json:"measured"`
	Verdict  string `json:"verdict"`
	Reached  bool   `json:"reached"`
}

// number writes itself as null if it was not measured, and as "never" if it did not come.
type number float64

// MarshalJSON implements json.Marshaler.
func (n number) MarshalJSON() ([]byte, error) {
	switch v := float64(n); {
	case math.IsNaN(v):
		return []byte("null"), nil
	case math.IsInf(v, 0):
		return []byte(`"never"`), nil
	default:
		return json.Marshal(v)
	}
}

// String rounds to about three digits and groups thousands.
func (n number) String() string {
	v := float64(n)
	switch size := math.Abs(v); {
	case math.IsNaN(v):
		return "-"
	case math.IsInf(v, 0):
		return "never"
	case v == math.Trunc(v) && size < 1000, size >= 100 && size < 1000:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case size < 10:
		return strconv.FormatFloat(v, 'f', 2, 64)
	case size < 100:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	digits := strconv.FormatFloat(v, 'f', 0, 64)
	sign := ""
	if digits[0] == '-' {
		sign, digits = "-", digits[1:]
	}
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + " " + digits[i:]
	}
	return sign + digits
}

func newTable(s system, sc scenario, rows []row, took time.Duration) table {
	t := table{
		System: s.name(), Scenario: sc.name, About: sc.about,
		Seconds: number(took.Seconds()), Foreign: number(foreign(rows)),
	}
	if c := sc.curve; c != nil {
		t.Point = &point{Of: c.name, At: c.at, keys: c.keys}
	}
	measured := slices.DeleteFunc(slices.Clone(sc.columns), func(c column) bool {
		return !slices.ContainsFunc(rows, func(r row) bool { return !math.IsNaN(r.figure(c)) })
	})
	for _, c := range measured {
		t.Columns, t.keys = append(t.Columns, c.title), append(t.keys, c.key)
	}
	for _, r := range rows {
		l := line{Name: r.name, Role: r.role}
		for _, c := range measured {
			l.Values = append(l.Values, number(r.figure(c)))
		}
		for _, s := range r.samples {
			round := map[string]number{}
			for k, v := range s {
				round[k] = number(v)
			}
			l.Rounds = append(l.Rounds, round)
		}
		if r.err != nil {
			l.Error = r.err.Error()
		}
		t.Rows = append(t.Rows, l)
		if r.role == roleOurs {
			for _, g := range sc.targets[s.name()] {
				t.Targets = append(t.Targets, g.judge(r, sc.columns))
			}
		}
	}
	return t
}

// judge compares a target with what was measured: the figure of the column, picked against us where the columns show
// the worst round.
func (g target) judge(r row, columns []column) verdict {
	c := column{key: g.key}
	for _, other := range columns {
		if other.key == g.key && other.pick != median && (other.pick == lowest) == g.least {
			c.pick = other.pick
		}
	}
	v := verdict{Row: r.name, Text: g.text, Measured: number(r.figure(c))}
	sign := "<="
	if g.least {
		sign = ">="
	}
	v.Target = sign + " " + number(g.value).String()
	m := float64(v.Measured)
	switch {
	case math.IsNaN(m):
		v.Verdict = "not measured"
	case g.least && m >= g.value, !g.least && m <= g.value:
		v.Verdict, v.Reached = "reached", true
	case g.value == 0 || math.IsInf(m, 0):
		v.Verdict = "MISSED"
	default:
		v.Verdict = fmt.Sprintf("MISSED by %.0f %%", 100*math.Abs(m-g.value)/g.value)
	}
	return v
}

// write prints a table, its targets below it.
func (t table) write(w io.Writer) {
	fmt.Fprintf(w, "\n%s / %s: %s\n", t.System, t.Scenario, t.About)
	lines := [][]string{append([]string{""}, t.Columns...)}
	for _, l := range t.Rows {
		cells := []string{l.Name}
		for _, v := range l.Values {
			cells = append(cells, v.String())
		}
		lines = append(lines, cells)
	}
	// A title of several words takes several lines: figures are what needs the width.
	writeColumns(w, append(wrap(lines[0]), lines[1:]...))
	for _, l := range t.Rows {
		if l.Error != "" {
			fmt.Fprintf(w, "  ERROR %s: %s\n", l.Name, l.Error)
		}
	}
	tab := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, v := range t.Targets {
		row := ""
		if v.Row != ours {
			row = strings.TrimPrefix(v.Row, ours+", ") + ": "
		}
		fmt.Fprintf(tab, "  target\t%s%s\t%s\tmeasured %s\t%s\n", row, v.Text, v.Target, v.Measured, v.Verdict)
	}
	tab.Flush()
	note := ""
	if f := float64(t.Foreign); f > loud {
		note = "; others used up to " + t.Foreign.String() + " cores meanwhile: do not trust single figures"
	}
	fmt.Fprintf(w, "  (%.0f s%s)\n", float64(t.Seconds), note)
}

// writeColumns prints lines of cells: the first one to the left, figures to the right.
func writeColumns(w io.Writer, lines [][]string) {
	widths := make([]int, len(lines[0]))
	for _, cells := range lines {
		for i, c := range cells {
			widths[i] = max(widths[i], utf8.RuneCountInString(c))
		}
	}
	for _, cells := range lines {
		for i, c := range cells {
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c))
			if i == 0 {
				fmt.Fprint(w, "  ", c, pad)
			} else {
				fmt.Fprint(w, "  ", pad, c)
			}
		}
		fmt.Fprintln(w)
	}
}

// wrap breaks titles at blanks into lines, set at the bottom.
func wrap(titles []string) [][]string {
	words := make([][]string, len(titles))
	high := 1
	for i, t := range titles {
		words[i] = strings.Fields(t)
		high = max(high, len(words[i]))
	}
	lines := make([][]string, high)
	for n := range lines {
		lines[n] = make([]string, len(titles))
		for i := range titles {
			if at := n - (high - len(words[i])); at >= 0 {
				lines[n][i] = words[i][at]
			}
		}
	}
	return lines
}

// report is everything that one run measured.
type report struct {
	Date    time.Time `json:"date"`
	Command string    `json:"command"`
	Machine string    `json:"machine"`
	Systems []string  `json:"systems"`
	Tables  []table   `json:"tables"`
}

// summary prints how many targets were reached, and which were not.
func (r report) summary(w io.Writer) {
	var all, reached int
	var missed []string
	for _, t := range r.Tables {
		for _, v := range t.Targets {
			all++
			if v.Reached {
				reached++
				continue
			}
			missed = append(missed, fmt.Sprintf("  %s / %s: %s: %s %s, measured %v: %s", t.System, t.Scenario, v.Row, v.Text,
				v.Target, v.Measured, v.Verdict))
		}
	}
	fmt.Fprintf(w, "\n%d of %d targets reached.\n", reached, all)
	for _, line := range missed {
		fmt.Fprintln(w, line)
	}
}
