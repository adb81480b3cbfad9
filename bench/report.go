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

// sample is the result of one round, by the keys of the scenario's columns. NaN or absent: not measured; +Inf: never.
type sample map[string]float64

// MarshalJSON implements json.Marshaler.
func (s sample) MarshalJSON() ([]byte, error) {
	all := map[string]number{}
	for k, v := range s {
		all[k] = number(v)
	}
	return json.Marshal(all)
}

func us(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }

// latencies adds p50, p95 and p99 of durations, in µs. It sorts them.
func (s sample) latencies(all []time.Duration) {
	if len(all) == 0 {
		return
	}
	slices.Sort(all)
	at := func(p float64) float64 { return us(all[int(p*float64(len(all)))]) }
	s["p50"], s["p95"], s["p99"] = at(0.50), at(0.95), at(0.99)
}

// pick selects one of the figures of all rounds.
type pick uint8

const (
	median pick = iota
	highest
	lowest
)

// of returns the picked value, or NaN for an empty list. It modifies values.
func (p pick) of(values []float64) float64 {
	values = slices.DeleteFunc(values, math.IsNaN)
	n := len(values)
	if n == 0 {
		return math.NaN()
	}
	slices.Sort(values)
	switch p {
	case highest:
		return values[n-1]
	case lowest:
		return values[0]
	}
	return (values[(n-1)/2] + values[n/2]) / 2
}

// table is one scenario on one system, measured.
type table struct {
	System   string    `json:"system"`
	Scenario string    `json:"scenario"`
	About    string    `json:"about"`
	Seconds  number    `json:"seconds"`
	Foreign  number    `json:"foreignCores"` // the highest load by other processes in any round
	Columns  []string  `json:"columns"`
	Rows     []row     `json:"rows"`
	Targets  []verdict `json:"targets"`
	Curve    string    `json:"curve,omitempty"`
	Point    number    `json:"point"` // on the curve

	keys, along []string // of the columns, and of the columns shown along the curve
}

// row is a row of a table: one peer, or one size.
type row struct {
	Name   string   `json:"name"`
	Role   role     `json:"role"`
	Values []number `json:"values"` // in the order of the columns
	Rounds []sample `json:"rounds"` // all figures, round by round
	Error  string   `json:"error,omitempty"`
}

func (r row) figure(c column) float64 {
	var values []float64
	for _, s := range r.Rounds {
		if v, ok := s[c.key]; ok {
			values = append(values, v)
		}
	}
	return c.pick.of(values)
}

// verdict is a target beside the figure of one row of ours.
type verdict struct {
	Row      string `json:"row"`
	Text     string `json:"text"`
	Target   string `json:"target"`
	Measured number `json:"measured"`
	Verdict  string `json:"verdict"`
	Reached  bool   `json:"reached"`
}

// number is a figure. It is written as null if it was not measured, and as "never" if the event did not happen.
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
	text := strconv.FormatFloat(v, 'f', 0, 64)
	for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
		text = text[:i] + " " + text[i:]
	}
	return text
}

func newTable(s *system, sc scenario, rows []row, took time.Duration) table {
	t := table{
		System: s.name, Scenario: sc.name, About: sc.about, Rows: rows,
		Seconds: number(took.Seconds()), Foreign: number(foreign(rows)),
		Curve: sc.grows, Point: number(sc.size), along: strings.Fields(sc.along),
	}
	all := columns(sc.columns)
	for _, c := range all {
		measured := func(r row) bool { return !math.IsNaN(r.figure(c)) }
		if !slices.ContainsFunc(rows, measured) {
			continue
		}
		t.Columns, t.keys = append(t.Columns, c.title), append(t.keys, c.key)
		for i := range rows {
			rows[i].Values = append(rows[i].Values, number(rows[i].figure(c)))
		}
	}
	for _, r := range rows {
		for _, g := range sc.targets(s) {
			if r.Role == roleOurs {
				t.Targets = append(t.Targets, g.judge(r, all))
			}
		}
	}
	return t
}

// judge compares a target with the measurement: the figure of the column, picked against us where the columns show
// the worst round.
func (g target) judge(r row, columns []column) verdict {
	c, least := column{key: g.key}, g.relation == ">="
	for _, other := range columns {
		if other.key == g.key && other.pick != median && (other.pick == lowest) == least {
			c.pick = other.pick
		}
	}
	m := r.figure(c)
	v := verdict{Row: r.Name, Text: g.text, Measured: number(m), Target: g.relation + " " + number(g.value).String()}
	switch {
	case math.IsNaN(m):
		v.Verdict = "not measured"
	case least && m >= g.value, !least && m <= g.value:
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
	// A title of several words takes several lines, aligned at the bottom: the figures need the width.
	var lines [][]string
	for i, title := range t.Columns {
		words := strings.Fields(title)
		for len(lines) < len(words) {
			lines = slices.Insert(lines, 0, make([]string, 1+len(t.Columns)))
		}
		for n, word := range words {
			lines[len(lines)-len(words)+n][1+i] = word
		}
	}
	for _, r := range t.Rows {
		cells := []string{r.Name}
		for _, v := range r.Values {
			cells = append(cells, v.String())
		}
		lines = append(lines, cells)
	}
	writeColumns(w, lines)
	for _, r := range t.Rows {
		if r.Error != "" {
			fmt.Fprintf(w, "  ERROR %s: %s\n", r.Name, r.Error)
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
	_ = tab.Flush() // a failed output cannot be reported
	note := ""
	if float64(t.Foreign) > loud {
		note = "; others used up to " + t.Foreign.String() + " cores meanwhile: do not trust single figures"
	}
	fmt.Fprintf(w, "  (%.0f s%s)\n", float64(t.Seconds), note)
}

// writeColumns prints lines of cells: the first one to the left, figures to the right.
func writeColumns(w io.Writer, lines [][]string) {
	width := 0
	for _, cells := range lines {
		width = max(width, utf8.RuneCountInString(cells[0]))
	}
	tab := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, cells := range lines {
		fmt.Fprintf(tab, "%-*s\t%s\t\n", width, cells[0], strings.Join(cells[1:], "\t"))
	}
	_ = tab.Flush() // a failed output cannot be reported
}

// report has all results of one run.
type report struct {
	Date    time.Time `json:"date"`
	Command string    `json:"command"`
	Machine string    `json:"machine"`
	Systems []string  `json:"systems"`
	Tables  []table   `json:"tables"`
}

// curves prints, for every curve of every system, one table per key: a row for each peer, a column for each point.
func (r report) curves(w io.Writer) {
	for i, first := range r.Tables {
		same := func(t table) bool { return t.System == first.System && t.Curve == first.Curve }
		if first.Curve == "" || slices.ContainsFunc(r.Tables[:i], same) {
			continue // it has no curve, or was printed already
		}
		points := slices.DeleteFunc(slices.Clone(r.Tables), func(t table) bool { return !same(t) })
		for _, key := range first.along {
			if lines, title := alongCurve(points, key); len(points) > 1 && len(lines) > 1 {
				fmt.Fprintf(w, "\n%s, by %s: %s\n", first.System, first.Curve, title)
				writeColumns(w, lines)
			}
		}
	}
}

// alongCurve returns the lines of one key: the points of the curve, then the figures of each peer that has any.
func alongCurve(points []table, key string) (lines [][]string, title string) {
	lines = [][]string{{""}}
	for n, t := range points {
		lines[0] = append(lines[0], t.Point.String())
		column := slices.Index(t.keys, key)
		for _, r := range t.Rows {
			if column < 0 || math.IsNaN(float64(r.Values[column])) {
				continue
			}
			at := slices.IndexFunc(lines, func(line []string) bool { return line[0] == r.Name })
			if at < 0 {
				at = len(lines)
				lines = append(lines, append([]string{r.Name}, slices.Repeat([]string{"-"}, len(points))...))
			}
			lines[at][1+n], title = r.Values[column].String(), t.Columns[column]
		}
	}
	return lines, title
}

// summary prints how many targets were reached, and which were not. It returns how many rows of ours have an error.
func (r report) summary(w io.Writer) (failed int) {
	var all, reached int
	missed := ""
	for _, t := range r.Tables {
		for _, line := range t.Rows {
			if line.Role == roleOurs && line.Error != "" {
				failed++
			}
		}
		for _, v := range t.Targets {
			if all++; v.Reached {
				reached++
				continue
			}
			missed += fmt.Sprintf("  %s / %s: %s: %s %s, measured %v: %s\n",
				t.System, t.Scenario, v.Row, v.Text, v.Target, v.Measured, v.Verdict)
		}
	}
	fmt.Fprintf(w, "\n%d of %d targets reached.\n%s", reached, all, missed)
	return failed
}
