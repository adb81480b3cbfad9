package main

import (
	"encoding/json"
	"fmt"
	"strings"
)

// panel is one panel of the dashboard. Each query has the legend beside it.
type panel struct {
	title, unit, about string
	queries            [][2]string
}

// rate returns the rate of a counter, summed up by labels.
func rate(by, series string) string {
	return fmt.Sprintf("sum by (%s) (rate(%s[$__rate_interval]))", by, series)
}

// quantile returns a quantile of a histogram.
func quantile(q float64, by, name, labels string) string {
	return fmt.Sprintf("histogram_quantile(%g, sum by (%sle) (rate(%s_bucket{%s}[$__rate_interval])))", q, by, name, labels)
}

// quantiles returns the three that the dashboard shows of a histogram.
func quantiles(name, labels string) (all [][2]string) {
	for _, q := range []float64{.5, .95, .99} {
		all = append(all, [2]string{quantile(q, "", name, labels), fmt.Sprintf("p%g", q*100)})
	}
	return all
}

const of = `job="$job"`

// rows are the rows of the dashboard.
var rows = []struct {
	title  string
	panels []panel
}{
	{"Locks", []panel{
		{
			"Acquire latency, granted without a wait", "s", "From receiving a request to the leader's reply.",
			quantiles("fencelock_server_acquire_duration_seconds", of+`,outcome="granted",waited="no"`),
		},
		{
			"Wait for a lock", "s", "For acquires that were queued and granted.",
			quantiles("fencelock_server_acquire_duration_seconds", of+`,outcome="granted",waited="yes"`),
		},
		{
			"Hold time", "s", "From the grant to the end.",
			quantiles("fencelock_server_hold_duration_seconds", of),
		},
		{
			"Acquires by outcome", "ops", "Deadlocks are an outcome.",
			[][2]string{{rate("outcome", "fencelock_server_acquire_duration_seconds_count{"+of+"}"), "{{outcome}}"}},
		},
		{
			"Readers and writers", "short", "Current holds by kind: shared holds are readers, exclusive holds are writers.",
			[][2]string{{"max by (kind) (fencelock_server_holds{" + of + "})", "{{kind}}"}},
		},
		{
			"Contention", "short", "Waiting acquires, and the longest queue of one name.",
			[][2]string{
				{"max by (kind) (fencelock_server_waiters{" + of + "})", "waiters, {{kind}}"},
				{"max(fencelock_server_longest_queue{" + of + "})", "longest queue"},
			},
		},
		{
			"Oldest hold and wait", "s", "",
			[][2]string{
				{"max by (kind) (fencelock_server_oldest_hold_seconds{" + of + "})", "hold, {{kind}}"},
				{"max by (kind) (fencelock_server_oldest_wait_seconds{" + of + "})", "wait, {{kind}}"},
			},
		},
		{
			"Ends of holds", "ops", "Released, expired with their session, or force-released.",
			[][2]string{{rate("end", "fencelock_server_holds_ended_total{"+of+"}"), "{{end}}"}},
		},
		{
			"Refusals", "ops", "Requests beyond a limit, and releases with a token that is no longer held.",
			[][2]string{
				{rate("limit", "fencelock_server_limit_refusals_total{"+of+"}"), "{{limit}}"},
				{rate("job", "fencelock_server_stale_releases_total{"+of+"}"), "stale releases"},
			},
		},
		{
			"Sessions", "short", "",
			[][2]string{
				{"max(fencelock_server_sessions{" + of + "})", "sessions"},
				{"max by (limit) (fencelock_server_limit{" + of + "})", "limit of {{limit}}"},
			},
		},
	}},
	{"Members", []panel{
		{
			"Leader", "short", "1 for the member that serves.",
			[][2]string{
				{"fencelock_member_leader{" + of + "}", "{{instance}}"}, {"fencelock_member_cluster_well{" + of + "}", "well, {{instance}}"},
			},
		},
		{"Term", "short", "Every election starts a greater one.", [][2]string{{"max(fencelock_member_term{" + of + "})", "term"}}},
		{
			"Lag of members", "short", "Log entries that a member has not applied.",
			[][2]string{{
				"scalar(max(fencelock_member_commit_index{" + of + "})) - fencelock_member_applied_index{" + of + "}", "{{instance}}",
			}},
		},
		{
			"Append to the log, p99", "s", "Including its fsync.",
			[][2]string{{quantile(.99, "instance, ", "fencelock_member_log_append_seconds", of), "{{instance}}"}},
		},
		{
			"Log and snapshot", "bytes", "",
			[][2]string{
				{"fencelock_member_log_bytes{" + of + "}", "log, {{instance}}"},
				{"fencelock_member_snapshot_bytes{" + of + "}", "snapshot, {{instance}}"},
			},
		},
		{
			"Age of snapshot and backup", "s", "",
			[][2]string{
				{"time() - (fencelock_member_snapshot_timestamp_seconds{" + of + "} > 0)", "snapshot, {{instance}}"},
				{"time() - max(fencelock_member_backup_timestamp_seconds{" + of + "} > 0)", "backup"},
			},
		},
		{
			"Connections", "short", "",
			[][2]string{
				{"fencelock_member_connections{" + of + "}", "{{instance}}"},
				{"fencelock_member_unread_bytes{" + of + "}", "unread bytes, {{instance}}"},
			},
		},
		{
			"Process", "bytes", "",
			[][2]string{
				{"process_resident_memory_bytes{" + of + "}", "memory, {{instance}}"},
			},
		},
	}},
	{"HTTP and clients", []panel{
		{
			"HTTP requests", "reqps", "By route and status.",
			[][2]string{{rate("route, code", "fencelock_http_request_duration_seconds_count{"+of+"}"), "{{code}} {{route}}"}},
		},
		{
			"Losses of clients", "ops", "Leases that ended before they were released; from observe/prom in the programs.",
			[][2]string{{rate("driver, reason", "fencelock_client_losses_total"), "{{driver}}: {{reason}}"}},
		},
		{
			"Certificates", "s", "Time until they expire.",
			[][2]string{{
				"fencelock_certificate_expiry_timestamp_seconds{" + of + "} - time()", "{{use}}, {{instance}}",
			}},
		},
	}},
}

// dashboard returns the Grafana dashboard.
func dashboard() []byte {
	type object = map[string]any
	var panels []object
	id, y := 0, 0
	next := func() int { id++; return id }
	for _, r := range rows {
		panels = append(panels, object{
			"id": next(), "type": "row", "title": r.title, "collapsed": false,
			"gridPos": object{"x": 0, "y": y, "w": 24, "h": 1},
		})
		y++
		for i, p := range r.panels {
			var targets []object
			for j, q := range p.queries {
				targets = append(targets, object{"refId": string(rune('A' + j)), "expr": q[0], "legendFormat": q[1]})
			}
			panels = append(panels, object{
				"id": next(), "type": "timeseries", "title": p.title, "description": p.about,
				"datasource":  object{"type": "prometheus", "uid": "${datasource}"},
				"fieldConfig": object{"defaults": object{"unit": p.unit, "min": 0}, "overrides": []any{}},
				"gridPos":     object{"x": i % 3 * 8, "y": y + i/3*8, "w": 8, "h": 8}, "targets": targets,
			})
		}
		y += (len(r.panels) + 2) / 3 * 8
	}
	text, err := json.MarshalIndent(object{
		"title": "Fencelock", "uid": "fencelock", "schemaVersion": 39, "editable": true, "refresh": "30s",
		"time": object{"from": "now-1h", "to": "now"},
		"templating": object{"list": []object{
			{"name": "datasource", "type": "datasource", "query": "prometheus"},
			{
				"name": "job", "type": "query", "query": "label_values(fencelock_build_info, job)",
				"datasource": object{"type": "prometheus", "uid": "${datasource}"},
			},
		}},
		"panels": panels,
	}, "", " ")
	if err != nil {
		panic(err) // there are only texts and numbers
	}
	return append(text, '\n')
}

// panelTable lists the panels in Markdown.
func panelTable() string {
	var b strings.Builder
	b.WriteString("\n| row | panels |\n|---|---|\n")
	for _, r := range rows {
		var titles []string
		for _, p := range r.panels {
			titles = append(titles, p.title)
		}
		fmt.Fprintf(&b, "| %s | %s |\n", r.title, strings.Join(titles, "; "))
	}
	b.WriteString("\n")
	return b.String()
}
