// Package metrics exports the counts of a member of the bundled server and of a gateway, with client_golang. The table
// All names each metric: the documentation and the dashboard are generated from it, and the tests of the alerts compare
// with it. Only cmd/fencelock links this package.
package metrics

import (
	"maps"
	"slices"

	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/lead"
)

// Type is the type of a metric.
type Type string

// The types of a metric.
const (
	Histogram Type = "histogram"
	Counter   Type = "counter"
	Gauge     Type = "gauge"
)

// Where is which process exports a metric.
type Where string

// The places.
const (
	// Leader: gauges by the leading member; counters and histograms by every member, of its decisions as the leader.
	// Its ID is in the label leader, so that no event is counted twice.
	Leader Where = "leader"
	// Member: every member.
	Member Where = "member"
	// Everywhere: every server and gateway.
	Everywhere Where = "server, gateway"
	// Audited: every process with --audit.
	Audited Where = "with --audit"
)

// Metric is one metric.
type Metric struct {
	Name string
	Type Type
	Where
	// Labels are the names of the labels, and Values all values of one, where they are known.
	Labels []string
	Values map[string][]string
	Help   string
	// Buckets are the upper bounds of a histogram, in seconds.
	Buckets []float64
}

// Kinds are the values of the label kind, by machine.Kind.
var Kinds = []string{"exclusive", "shared", "permits"}

var (
	brief = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300}
	long  = []float64{.001, .01, .1, 1, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600, 24 * 3600}

	outcomes = []string{
		lead.OutcomeGranted, lead.OutcomeHeld, lead.OutcomeCancelled, lead.OutcomeDeadlock, lead.OutcomeLimit,
		lead.OutcomeRefused,
	}
	ends = []string{lead.EndReleased, lead.EndExpired, lead.EndForced}
)

const prefix = "fencelock_server_"

// The metrics.
var (
	acquires = Metric{
		Name: prefix + "acquire_duration_seconds", Type: Histogram, Where: Leader, Buckets: brief,
		Labels: []string{"kind", "outcome", "waited"},
		Values: map[string][]string{"kind": Kinds, "outcome": outcomes, "waited": {"yes", "no"}},
		Help:   "Time from receiving an acquire to its outcome; waited=yes if it was queued.",
	}
	holds = Metric{
		Name: prefix + "hold_duration_seconds", Type: Histogram, Where: Leader, Buckets: long,
		Labels: []string{"kind", "end"}, Values: map[string][]string{"kind": Kinds, "end": ends},
		Help: "Time from the grant to the end of a hold that this leader granted.",
	}
	ended = Metric{
		Name: prefix + "holds_ended_total", Type: Counter, Where: Leader,
		Labels: []string{"kind", "end"}, Values: map[string][]string{"kind": Kinds, "end": ends},
		Help: "Holds that ended: released, expired with their session, or force-released.",
	}
	limited = Metric{
		Name: prefix + "limit_refusals_total", Type: Counter, Where: Leader, Labels: []string{"limit"},
		Values: map[string][]string{"limit": limitFields()},
		Help:   "Commands refused because a limit was reached.",
	}
	stale = Metric{
		Name: prefix + "stale_releases_total", Type: Counter, Where: Leader,
		Help: "Releases with a token that is no longer held.",
	}
	held = Metric{
		Name: prefix + "holds", Type: Gauge, Where: Leader, Labels: []string{"kind"},
		Values: map[string][]string{"kind": Kinds}, Help: "Current holds.",
	}
	waiters = Metric{
		Name: prefix + "waiters", Type: Gauge, Where: Leader, Labels: []string{"kind"},
		Values: map[string][]string{"kind": Kinds}, Help: "Acquires waiting in queues.",
	}
	oldestHold = Metric{
		Name: prefix + "oldest_hold_seconds", Type: Gauge, Where: Leader, Labels: []string{"kind"},
		Values: map[string][]string{"kind": Kinds}, Help: "Age of the oldest hold; 0 without holds.",
	}
	oldestWait = Metric{
		Name: prefix + "oldest_wait_seconds", Type: Gauge, Where: Leader, Labels: []string{"kind"},
		Values: map[string][]string{"kind": Kinds}, Help: "Age of the oldest wait; 0 without waits.",
	}
	longest = Metric{
		Name: prefix + "longest_queue", Type: Gauge, Where: Leader, Help: "Length of the longest queue.",
	}
	sessions = Metric{
		Name: prefix + "sessions", Type: Gauge, Where: Leader, Help: "Open sessions.",
	}
	limits = Metric{
		Name: prefix + "limit", Type: Gauge, Where: Leader, Labels: []string{"limit"},
		Values: map[string][]string{"limit": {"sessions", "holds", "waits"}}, Help: "Limits of the cluster.",
	}
	appends = Metric{
		Name: "fencelock_member_log_append_seconds", Type: Histogram, Where: Member, Buckets: brief,
		Help: "Duration of an append to the log, including its fsync.",
	}
	requests = Metric{
		Name: "fencelock_http_request_duration_seconds", Type: Histogram, Where: Everywhere, Buckets: brief,
		Labels: []string{"method", "route", "code"}, Help: "Duration of an HTTP request, by route.",
	}
	certificate = Metric{
		Name: "fencelock_certificate_expiry_timestamp_seconds", Type: Gauge, Where: Everywhere, Labels: []string{"use"},
		Values: map[string][]string{"use": {"clients", "members"}},
		Help:   "Unix time at which a certificate of the process expires.",
	}
	auditDropped = Metric{
		Name: "fencelock_audit_dropped_events_total", Type: Counter, Where: Audited,
		Help: "Audit events dropped because the disk was full or too slow.",
	}
	build = Metric{
		Name: "fencelock_build_info", Type: Gauge, Where: Everywhere, Labels: []string{"version", "go_version"},
		Help: "Always 1; the labels are the versions.",
	}
)

// gauges of a member are read at each scrape.
var gauges = []struct {
	Metric
	value func(*state) float64
}{
	{member("cluster_well", "1 if this member leads and all voting members follow it closely."),
		func(s *state) float64 { return flag(s.Well) }},
	{member("voters_behind", "If this member leads, the number of voting members that do not follow it closely."),
		func(s *state) float64 { return float64(s.VotersBehind) }},
	{member("closed_seconds", "If this member leads, the remaining time for which it refuses clients after a restore."),
		func(s *state) float64 { return s.ClosedFor.Seconds() }},
	{member("leader", "1 if this member leads and serves."), func(s *state) float64 { return flag(s.Leader) }},
	{member("knows_leader", "1 if this member knows the leader."),
		func(s *state) float64 { return flag(s.KnowsLeader) }},
	{member("maintenance", "1 if this member is in maintenance: it leads only if no other member does."),
		func(s *state) float64 { return flag(s.Maintenance) }},
	{member("term", "Raft term; every election starts a greater one."),
		func(s *state) float64 { return float64(s.Term) }},
	{member("last_index", "Index of the last log entry of this member."),
		func(s *state) float64 { return float64(s.LastIndex) }},
	{member("commit_index", "Index of the last log entry that this member knows to be committed."),
		func(s *state) float64 { return float64(s.CommitIndex) }},
	{member("applied_index", "Index of the last log entry that this member has applied."),
		func(s *state) float64 { return float64(s.AppliedIndex) }},
	{member("agreed_index", "Index of the last log entry at which this member's state equalled the leader's; 0 if not compared."),
		func(s *state) float64 { return float64(s.AgreedIndex) }},
	{member("differs_index", "Index of the last log entry at which this member's state differed from the leader's; 0 if never."),
		func(s *state) float64 { return float64(s.DiffersIndex) }},
	{member("unread_bytes", "Bytes of replies that clients have not read yet."),
		func(s *state) float64 { return float64(s.UnreadBytes) }},
	{member("connections", "Client connections."), func(s *state) float64 { return float64(s.Connected) }},
	{member("log_bytes", "Size of the log."), func(s *state) float64 { return float64(s.LogBytes) }},
	{member("snapshot_bytes", "Size of the last snapshot; 0 if there is none."),
		func(s *state) float64 { return float64(s.SnapshotBytes) }},
	{member("snapshot_timestamp_seconds", "Unix time of the last snapshot; 0 if there is none."),
		func(s *state) float64 { return unix(s.SnapshotAt) }},
	{member("backup_timestamp_seconds", "Unix time at which this process completed its last backup; 0 if never."),
		func(s *state) float64 { return unix(s.BackupAt) }},
}

func member(name, help string) Metric {
	return Metric{Name: "fencelock_member_" + name, Type: Gauge, Where: Member, Help: help}
}

// leaderLabel has the ID of the member that counted.
const leaderLabel = "leader"

// All returns all metrics but those of the Go runtime and the process.
func All() []Metric {
	all := []Metric{
		acquires, holds, ended, limited, stale, held, waiters, oldestHold, oldestWait, longest, sessions, limits,
	}
	for i := range all {
		all[i].Labels = append([]string{leaderLabel}, all[i].Labels...)
	}
	for i := range gauges {
		all = append(all, gauges[i].Metric)
	}
	return append(all, appends, requests, certificate, auditDropped, build)
}

// limitFields returns the fields of refusals by a limit.
func limitFields() []string {
	l := machine.DefaultLimits()
	fields := map[string]bool{"ClientSessions": true, "ClientHolds": true, "ClientWaits": true, "Revision": true}
	for _, x := range l.All() {
		fields[x.Field] = true
	}
	return slices.Sorted(maps.Keys(fields))
}
