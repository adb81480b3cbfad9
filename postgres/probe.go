// This file asks the server for its properties. Before the first grant, after each promotion and every probeEvery, a
// probe reads the settings on which the driver's guarantees rest, the standbys, and the identity of the database;
// judge refuses servers that cannot keep acknowledged commits; learn compares the other facts with the last probe, and
// publishes them for Describe.
//
// Settings can change while a driver lives, and the declaration changes with them: the core calls Describe with
// each grant of the correctness tier.

package postgres

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/backend"
)

// facts are the result of a probe.
type facts struct {
	// False before the first probe; TokenSpace is then empty.
	probed bool

	// A standby cannot grant.
	recovery bool
	version  int

	// Without both on, a crash loses acknowledged commits, or tears a page.
	fsync, fullPages string
	readOnly         string

	// It may differ from read committed on a connection that a pooler made without our settings.
	isolation string

	// The basis of Exclusion: the standbys that receive the server's log and may be promoted, and the setting that makes
	// commits wait for standbys. A role without access to the states of other roles' connections counts backups as
	// standbys.
	standbys    int
	synchronous string // synchronous_standby_names

	// The previous exclusion still counts: the warning comes one probe before the tier refuses a client in use.
	spared bool
	before backend.Exclusion

	// The identity of the history: the identifier drawn by initdb, the database, and the tables. Replicas share all of
	// it.
	system      string // drawn by initdb
	database    uint32
	schema      int    // the highest migration; 0 without one
	least       int    // the version that a program must know, if the schema is later than this one
	incarnation string // of the tables: another one after a dump was restored; empty: not drawn yet

	// The parts of a position that a token must be able to hold.
	timeline  int64
	overflown bool // the log position needs more bits than a token has for it
}

// probe asks the server for its facts and judges them. An unfit server is refused from then on, until a later probe
// finds it fit; without an answer the state does not change. The timeline is read from the name of the current file of
// the log, because the control file has the old timeline until the first checkpoint after a promotion.
func (s *service) probe(ctx context.Context) error {
	var f facts
	sent, clock := s.clock.Now(), int64(0)
	s.looked.Store(int64(sent))
	ctx = context.WithValue(context.WithValue(ctx, once{}, true), probing{}, true)
	// One statement, for a consistent result. On a standby the functions of the log would fail.
	err := s.query(ctx, func(rows pgx.Rows) error {
		return rows.Scan(&f.isolation, &f.recovery, &f.version, &f.fsync, &f.fullPages, &f.readOnly, &f.standbys, &f.synchronous,
			&f.system, &f.database, &f.timeline, &f.overflown, &clock)
	}, `select current_setting('transaction_isolation'), pg_is_in_recovery(), current_setting('server_version_num')::int, current_setting('fsync'),
		current_setting('full_page_writes'), current_setting('transaction_read_only'),
		(select count(*)::int from pg_stat_replication r
			where coalesce(r.state, '') <> 'backup' and coalesce(r.application_name, '') <> all ($1::text[])
				and not exists (select from pg_replication_slots where active_pid = r.pid and slot_type = 'logical')),
		current_setting('synchronous_standby_names'),
		(select system_identifier::text from pg_control_system()),
		(select oid from pg_database where datname = current_database()),
		case when pg_is_in_recovery() then 0 else
			('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint end,
		case when pg_is_in_recovery() then false else pg_current_wal_insert_lsn() >= '20000/0'::pg_lsn end, `+clockField,
		s.ignored)
	if err != nil {
		return err
	}
	s.clockWas(sent, clock)
	// Calls are refused from here on, until a probe succeeds.
	if err := s.judge(&f); err != nil {
		s.fit.Store(false)
		return err
	}
	// The schema comes second: without it this statement fails, and an unfit server should be reported first. A restored
	// row of cluster has no incarnation until the next call that writes draws one.
	err = s.query(ctx, func(rows pgx.Rows) error { return rows.Scan(&f.schema, &f.incarnation) },
		inSchema(`select coalesce(max(version), 0)::int,
			coalesce((select incarnation::text from fencelock.cluster where xmin::text::bigint = written), '')
			from fencelock.migrations`, s.sql.schema))
	if strings.HasPrefix(sqlState(err), "42") { // an earlier schema, which lacks a column
		read := s.query(ctx, func(rows pgx.Rows) error { return rows.Scan(&f.schema) },
			inSchema(`select coalesce(max(version), 0)::int from fencelock.migrations`, s.sql.schema))
		if older := checkVersion(s.sql.schema, f.schema, 0); read == nil && older != nil {
			err = older
		}
	}
	if err == nil && f.schema > len(migrations()) {
		err = s.query(ctx, func(rows pgx.Rows) error { return rows.Scan(&f.least) }, leastOf(s.sql.schema), len(migrations()))
	}
	if err == nil {
		err = checkVersion(s.sql.schema, f.schema, f.least)
	}
	if err != nil {
		s.fit.Store(false)
		return err
	}
	// From here on it is certain that the server keeps acknowledged commits.
	f.probed = true
	return s.learn(f)
}

// judge refuses servers that cannot keep acknowledged commits, each with the setting, its value, and the required
// value.
func (s *service) judge(f *facts) error {
	refuse := func(setting, value, want, why string) error {
		return &backend.ConfigError{Setting: setting, Value: value, Want: want, Why: why}
	}
	switch {
	case f.version < 130000:
		return refuse("server_version_num", fmt.Sprint(f.version), "130000 or more",
			"earlier versions lack functions of the schema")
	case f.recovery:
		return refuse("pg_is_in_recovery()", "true", "false",
			"a standby grants nothing; name the primary, or several hosts with target_session_attrs=read-write")
	case f.isolation == "repeatable read":
		return refuse("default_transaction_isolation", f.isolation, "read committed or serializable",
			"waiting calls would fail; set it for the role, or let the pooler pass it on (ignore_startup_parameters)")
	case f.readOnly != "off":
		return refuse("transaction_read_only", f.readOnly, "off", "a lock is written")
	case f.fsync != "on":
		return refuse("fsync", f.fsync, "on", "a crash would forget locks that were granted, and tokens")
	case f.fullPages != "on":
		return refuse("full_page_writes", f.fullPages, "on", "a crash may tear a page that holds locks")
	case f.timeline >= 1<<10:
		// A token has 53 bits for a position: 10 of the timeline, and 43 of the log in units of 64 bytes.
		return refuse("timeline", fmt.Sprint(f.timeline), "less than 1024", "a token has 10 bits for it")
	case f.overflown:
		return refuse("pg_current_wal_insert_lsn()", "20000/0 or more", "less", "a token has 43 bits for 64 bytes each")
	}
	return nil
}

// learn publishes the facts. Another system, database or incarnation of the tables is another history: every
// session ends, and the driver refuses all calls: the next exchange reports it to the engine.
func (s *service) learn(f facts) error {
	next := s.describe(f)
	// Probes may overlap, and the first probe that gets here sets the reference for the others.
	s.mu.Lock()
	last := s.described.Load()
	if last.TokenSpace != "" && last.Exclusion != next.Exclusion && next.Exclusion == backend.ExclusionAsyncReplica &&
		!s.found.spared {
		f.spared, f.before = true, last.Exclusion
		next = s.describe(f)
	}
	if last.TokenSpace != "" && last.TokenSpace != next.TokenSpace && s.lost == nil {
		s.lost = &backend.HistoryError{
			What: "system identifier and database", Was: last.TokenSpace, Now: next.TokenSpace,
		}
	}
	if was := s.found.incarnation; was != "" && was != f.incarnation && s.lost == nil {
		s.lost = &backend.HistoryError{
			What: "incarnation of schema " + s.sql.schema, Was: was, Now: cmp.Or(f.incarnation, "none"),
		}
	}
	// A driver that has lost its history keeps its last description.
	lost := s.lost
	if lost == nil {
		s.found = f
	}
	s.mu.Unlock()
	if lost != nil {
		return lost
	}
	if f.spared {
		s.log.Warn("fencelock: a PostgreSQL standby replicates asynchronously; "+
			"the correctness tier refuses this server from the next probe on",
			"remedy", "synchronous_standby_names, Options.IgnoreStandbys or Options.AcceptAsyncReplica")
	}
	// Operators need this after a failover or a new standby.
	if last.Exclusion != next.Exclusion {
		s.log.Info("fencelock: PostgreSQL probed", "exclusion", next.Exclusion.String(), "tokenSpace", next.TokenSpace)
	}
	s.described.Store(next)
	s.fit.Store(true)
	return nil
}

// facts returns the result of the last probe.
func (s *service) facts() facts {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.found
}

// describe returns the description for a server with the facts f, with or without notifications.
func (s *service) describe(f facts) *backend.Description {
	desc := &backend.Description{
		Name: driverName, Clock: s.clock, Exclusion: exclusionOf(f), KeepsHolds: true,
		Capabilities: backend.CapFencing | backend.CapFair | backend.CapShared | backend.CapPermits |
			backend.CapMinHold | backend.CapMetadata | backend.CapInspect | backend.CapList | backend.CapWatch |
			backend.CapWatchReplay | backend.CapForceRelease | backend.CapMultiAcquire |
			backend.CapDeadlock,
		MinTTL: minTTL, MaxTTL: maxTTL, TTLGranularity: 1e6,
		Shows: backend.Shows{
			Look:       backend.StateFields{Since: true, ExpiresIn: true, Limit: true, Waiters: true, Queue: true},
			List:       backend.StateFields{Since: true, ExpiresIn: true, Limit: true, Waiters: true},
			RetryAfter: true, ChangeAuthor: true,
		},
	}
	// The conformance suite's clauses depend on the interval at which waiters look.
	if s.deaf() {
		desc.Polling = pollEvery
	} else {
		desc.Capabilities |= backend.CapPushLoss
	}
	if f.probed {
		desc.TokenSpace = fmt.Sprintf("postgres-%s-%d-%s", f.system, f.database, s.sql.schema)
	}
	return desc
}

// exclusionOf returns the exclusion when the server fails. Before a probe it returns the exclusion of any PostgreSQL
// with fsync; the probe precedes the first grant. A standby that receives the log, but that no commit waits for, may
// be promoted, and then has lost the last commits: the correctness tier refuses this weaker claim by default.
func exclusionOf(f facts) backend.Exclusion {
	switch {
	case f.spared:
		return f.before
	case strings.TrimSpace(f.synchronous) != "":
		return backend.ExclusionQuorum
	case f.standbys > 0:
		return backend.ExclusionAsyncReplica
	}
	return backend.ExclusionDurableServer
}
