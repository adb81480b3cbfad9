package main

import (
	"fmt"
	"io"
	"math"
	"slices"
)

// curve says that a scenario is one point of how cost grows with something.
type curve struct {
	name string   // what grows: callers, locks held
	at   int      // how much of it
	keys []string // of the columns that are shown along the curve
}

// point is one scenario of a curve, in the report.
type point struct {
	Of string `json:"of"`
	At int    `json:"at"`

	keys []string
}

// curves prints, for every curve of every system, one table per key: a row for each peer, a column for each point.
func (r report) curves(w io.Writer) {
	type family struct{ system, of string }
	var families []family
	points := map[family][]table{}
	for _, t := range r.Tables {
		if t.Point == nil {
			continue
		}
		f := family{t.System, t.Point.Of}
		if points[f] == nil {
			families = append(families, f)
		}
		points[f] = append(points[f], t)
	}
	for _, f := range families {
		all := points[f]
		if len(all) < 2 {
			continue
		}
		for _, key := range all[0].Point.keys {
			if lines := alongCurve(all, key); len(lines) > 1 {
				fmt.Fprintf(w, "\n%s, by %s: %s\n", f.system, f.of, all[0].title(key))
				writeColumns(w, lines)
			}
		}
	}
}

// alongCurve returns the lines of one key: what grows, then the figures of each peer that has any.
func alongCurve(all []table, key string) [][]string {
	head := []string{""}
	var names []string
	for _, t := range all {
		head = append(head, number(t.Point.At).String())
		for _, l := range t.Rows {
			if !slices.Contains(names, l.Name) {
				names = append(names, l.Name)
			}
		}
	}
	lines := [][]string{head}
	for _, name := range names {
		line, any := []string{name}, false
		for _, t := range all {
			v := t.figure(name, key)
			any = any || !math.IsNaN(float64(v))
			line = append(line, v.String())
		}
		if any {
			lines = append(lines, line)
		}
	}
	return lines
}

// title is that of the first column of key.
func (t table) title(key string) string {
	if i := slices.Index(t.keys, key); i >= 0 {
		return t.Columns[i]
	}
	return key
}

// figure is what the row shows in the first column of key; NaN if nothing.
func (t table) figure(row, key string) number {
	column := slices.Index(t.keys, key)
	for _, l := range t.Rows {
		if l.Name == row && column >= 0 {
			return l.Values[column]
		}
	}
	return number(math.NaN())
}
