package main

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// need skips the test without the program, or fails it where everything is required.
func need(t *testing.T, program string) {
	t.Helper()
	if _, err := exec.LookPath(program); err != nil {
		if os.Getenv("FENCELOCK_REQUIRE") == "all" {
			t.Fatalf("%s is required and not installed", program)
		}
		t.Skipf("SKIP: install %s", program)
	}
}

// measured is the JSON output of a run.
type measured struct {
	Tables []struct {
		System, Scenario string
		Rows             []struct {
			Name, Error string
			Rounds      []map[string]any
		}
	}
}

// quickRun runs scenarios once, and fails if a row has an error.
func quickRun(t *testing.T, backend, only string) (r measured, printed string) {
	t.Helper()
	var out bytes.Buffer
	file := filepath.Join(t.TempDir(), "out.json")
	if err := run(t.Context(), &out, options{backend: backend, only: only, quick: true, json: file}); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range r.Tables {
		for _, row := range table.Rows {
			if row.Error != "" {
				t.Errorf("%s/%s: %s: %s", table.System, table.Scenario, row.Name, row.Error)
			}
		}
	}
	return r, out.String()
}

// The bundled server is measured beside etcd, in three settings, also when its leader is killed.
func TestQuickRunOfServers(t *testing.T) {
	need(t, "etcd")
	r, printed := quickRun(t, "builtin", "seq,tput16,renew256,watch1,failover")
	rows := map[string][]string{}
	for _, table := range r.Tables {
		for _, row := range table.Rows {
			rows[table.Scenario] = append(rows[table.Scenario], row.Name)
			if rate, ok := row.Rounds[0]["ops"].(float64); table.Scenario != "failover" && (!ok || rate <= 0) {
				t.Errorf("%s: %s: no rate", table.Scenario, row.Name)
			}
		}
	}
	all := []string{"etcd raw", "etcd concurrency.Mutex", "fencelock", "fencelock, one node", "fencelock, in memory"}
	for scenario, want := range map[string][]string{
		"seq": all, "tput16": all, "renew256": slices.Delete(slices.Clone(all), 1, 2), "failover": all[1:3],
	} {
		if !slices.Equal(rows[scenario], want) {
			t.Errorf("%s has the rows %q, want %q", scenario, rows[scenario], want)
		}
	}
	if !strings.Contains(printed, "builtin, by callers: cycles/s") {
		t.Errorf("there is no curve:\n%s", printed)
	}
}

// A quick run of a costly and of a contended scenario measures every peer without an error.
func TestQuickRun(t *testing.T) {
	need(t, "redis-server")
	r, _ := quickRun(t, "redis,memory,core", "seq,handoff16s,core")
	var names []string
	for _, table := range r.Tables {
		names = append(names, table.System+"/"+table.Scenario)
		for _, row := range table.Rows {
			if overlaps, _ := row.Rounds[0]["overlaps"].(float64); overlaps != 0 {
				t.Errorf("%s/%s: %s: two holders at once", table.System, table.Scenario, row.Name)
			}
			if rate, measured := row.Rounds[0]["ops"].(float64); table.Scenario == "seq" && (!measured || rate <= 0) {
				t.Errorf("%s/%s: %s: no rate", table.System, table.Scenario, row.Name)
			}
		}
	}
	want := []string{"redis/seq", "redis/handoff16s", "memory/seq", "memory/handoff16s", "in process/core"}
	if !slices.Equal(names, want) {
		t.Errorf("tables %v, want %v", names, want)
	}
}

// The server's counters do not include their own reads: otherwise all figures per operation would be a little too
// high.
func TestCountersLeaveOutThemselves(t *testing.T) {
	need(t, "redis-server")
	life := &scope{ctx: t.Context()}
	defer life.end()
	var s *system
	if err := life.try(func() { s = startRedis(life) }); err != nil {
		t.Fatal(err)
	}
	c := dialRedis(life, clientOptions{addr: s.addr()}, 1)
	ping := func(times int) usage {
		t.Helper()
		for range times {
			if err := c.Ping(t.Context()).Err(); err != nil {
				t.Fatal(err)
			}
		}
		var u usage
		if err := life.try(func() { u = s.used(life) }); err != nil {
			t.Fatal(err)
		}
		return u
	}
	before := ping(1) // includes the requests that open the connection
	d := ping(3).since(before)
	if d.commands != 3 {
		t.Errorf("3 commands are counted as %v", d.commands)
	}
	if d.trips != 3 {
		t.Errorf("3 round trips are counted as %v", d.trips)
	}
}

func TestVerdicts(t *testing.T) {
	columns := []column{{key: "a"}, {key: "b", pick: lowest}}
	r := row{Name: ours, Rounds: []sample{{"a": 1, "b": 5}, {"a": 3, "b": 9}, {"a": 2, "b": 7}, {}}}
	for _, c := range []struct {
		target   target
		measured float64
		verdict  string
	}{
		{target{"", "", "a", "<=", 2, "the median counts"}, 2, "reached"},
		{target{"", "", "a", "<=", 1, "too high"}, 2, "MISSED by 100 %"},
		{target{"", "", "a", ">=", 4, "too low"}, 2, "MISSED by 50 %"},
		{target{"", "", "b", ">=", 5, "the worst round counts"}, 5, "reached"},
		{target{"", "", "b", ">=", 6, "and misses"}, 5, "MISSED by 17 %"},
		{target{"", "", "c", "<=", 6, "nothing there"}, math.NaN(), "not measured"},
	} {
		v := c.target.judge(r, columns)
		same := float64(v.Measured) == c.measured || math.IsNaN(float64(v.Measured)) && math.IsNaN(c.measured)
		if !same || v.Verdict != c.verdict || v.Reached != (c.verdict == "reached") {
			t.Errorf("%s: measured %v, %s; want %v, %s", c.target.text, v.Measured, v.Verdict, c.measured, c.verdict)
		}
	}
}

func TestPicks(t *testing.T) {
	inf, nan := math.Inf(1), math.NaN()
	for _, c := range []struct {
		pick   pick
		values []float64
		want   float64
	}{
		{median, []float64{3, nan, 1, 2}, 2},
		{median, []float64{4, 1, 2, 3}, 2.5},
		{median, []float64{1, inf}, inf},
		{highest, []float64{1, inf, 2}, inf},
		{lowest, []float64{1, -inf, 2}, -inf},
		{median, []float64{nan}, nan},
	} {
		got := c.pick.of(c.values)
		if got != c.want && !(math.IsNaN(got) && math.IsNaN(c.want)) {
			t.Errorf("pick %d of %v is %v, want %v", c.pick, c.values, got, c.want)
		}
	}
}

func TestLatencies(t *testing.T) {
	all := make([]time.Duration, 100)
	for i := range all {
		all[99-i] = time.Duration(i+1) * time.Microsecond
	}
	s := sample{}
	s.latencies(all)
	if s["p50"] != 51 || s["p95"] != 96 || s["p99"] != 100 {
		t.Errorf("of 1 to 100 µs: p50 %v, p95 %v, p99 %v", s["p50"], s["p95"], s["p99"])
	}
}

// A curve shows every peer of any of its points.
func TestCurves(t *testing.T) {
	at := func(callers int, rows ...row) table {
		sc := scenario{
			name: "some", columns: "ops=cycles/s; p99=p99 us", grows: "callers", along: "ops p99", size: callers,
		}
		return newTable(&system{name: "memory"}, sc, rows, 0)
	}
	r := report{Tables: []table{
		at(1, row{Name: "a", Rounds: []sample{{"ops": 10}}}),
		at(16, row{Name: "a", Rounds: []sample{{"ops": 90}}}, row{Name: "b", Rounds: []sample{{"ops": 5}}}),
	}}
	var out bytes.Buffer
	r.curves(&out)
	want := "\nmemory, by callers: cycles/s\n" +
		"      1  16\n" +
		"  a  10  90\n" +
		"  b   -   5\n"
	if got := out.String(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestNumbersRead(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 7: "7", 0.304: "0.30", 12.34: "12.3", 123.4: "123", 1234: "1 234", -41783: "-41 783",
		math.Inf(1): "never",
	} {
		if got := number(v).String(); got != want {
			t.Errorf("%v reads %q, want %q", v, got, want)
		}
	}
	if got := number(math.NaN()).String(); got != "-" {
		t.Errorf("not measured reads %q", got)
	}
}
