package sqlguard

import (
	"context"
	"database/sql"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/statement"
)

// Coverage describes the coverage of one table by the triggers of Enforce.
type Coverage struct {
	Table string   // with its schema in PostgreSQL
	Holes []string // the ways of a write without a claim past them; empty: every write is seen
}

// Querier is a *sql.DB, *sql.Conn or *sql.Tx.
type Querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// Covered returns the coverage of the tables by the triggers of Enforce. Without tables it covers all tables of the
// database, in MySQL and MariaDB the current one. guard is the guard's table, "" for fencing_tokens; it and the
// tables of package postgres are left out.
//
// It lists tables without triggers, partitions and tables that inherit from others, tables that were swapped for others
// after the triggers were installed, triggers that are disabled, of an earlier version, or ask another guard, and,
// per database, writes without triggers: TRUNCATE of a partition and a subscription in PostgreSQL; foreign keys and
// engines without transactions in MySQL and MariaDB. It cannot detect settings of a session: session_replication_role
// in PostgreSQL, PRAGMA recursive_triggers in SQLite. The role needs the privilege TRIGGER in MySQL and MariaDB.
func Covered(ctx context.Context, db Querier, d Dialect, guard string, tables ...string) ([]Coverage, error) {
	fail := func(err error) ([]Coverage, error) { return nil, fmt.Errorf("sqlguard: covered: %w", err) }
	name, err := statement.Table(guard)
	if err != nil {
		return fail(err)
	}
	s := &survey{db: db, guard: name, tables: map[string]*table{}}
	switch d {
	case PostgreSQL:
		err = s.postgreSQL(ctx)
	case MySQL:
		err = s.mySQL(ctx)
	case SQLite:
		err = s.sqLite(ctx)
	default:
		err = &fencing.InvalidError{What: "dialect", Value: d.String(), Why: "want PostgreSQL, MySQL or SQLite"}
	}
	if err != nil {
		return fail(err)
	}
	return s.report(tables), nil
}

// survey describes the tables of the database and their triggers.
type survey struct {
	db     Querier
	guard  string
	tables map[string]*table // by Coverage.Table
	// swapped are tables with triggers named for other tables, by the others' names.
	swapped map[string]string
}

type table struct {
	bare     string // without the schema
	of       string // "a partition of X", "it inherits from X", or empty
	seen     map[string]bool
	triggers int
	holes    []string
}

// events are the statements that triggers have to see.
var events = []string{"INSERT", "UPDATE", "DELETE"}

func (s *survey) add(name, bare string) *table {
	t := &table{bare: bare, seen: map[string]bool{}}
	s.tables[name] = t
	return t
}

func (t *table) hole(format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(t.holes, text) {
		t.holes = append(t.holes, text)
	}
}

// swap notes that the trigger named for the table owner is on another one.
func (s *survey) swap(owner, on string) {
	if s.swapped == nil {
		s.swapped = map[string]string{}
	}
	s.swapped[owner] = on
}

func (s *survey) report(wanted []string) []Coverage {
	var all []Coverage
	found := map[string]bool{}
	for name, t := range s.tables {
		if len(wanted) > 0 && !slices.Contains(wanted, name) && !slices.Contains(wanted, t.bare) {
			continue
		}
		found[name], found[t.bare] = true, true
		all = append(all, Coverage{Table: name, Holes: append(s.unseen(t), t.holes...)})
	}
	for _, name := range wanted {
		if !found[name] {
			all = append(all, Coverage{Table: name, Holes: []string{"there is no such table"}})
		}
	}
	slices.SortFunc(all, func(a, b Coverage) int { return strings.Compare(a.Table, b.Table) })
	return all
}

// unseen returns the holes that missing triggers make.
func (s *survey) unseen(t *table) []string {
	var missing []string
	for _, event := range events {
		if !t.seen[event] {
			missing = append(missing, event)
		}
	}
	switch on := s.swapped[t.bare]; {
	case len(missing) == 0:
		return nil
	case t.triggers > 0:
		return []string{"no trigger sees " + strings.Join(missing, ", ")}
	case on != "":
		return []string{"it has no trigger: that of its name is on " + on + ", so the tables were swapped"}
	case t.of != "":
		return []string{"it has no trigger, and " + t.of}
	}
	return []string{"it has no trigger"}
}

// each calls f with every row of a query, scanned into the values.
func (s *survey) each(ctx context.Context, query string, args []any, f func(), into ...any) error {
	rows, err := s.db.QueryContext(ctx, query, args...)
	if err != nil {
		return err
	}
	defer rows.Close() //nolint:errcheck // Err has returned the error
	for rows.Next() {
		if err := rows.Scan(into...); err != nil {
			return err
		}
		f()
	}
	return rows.Err()
}

// The bits of pg_trigger.tgtype.
const (
	forEachRow = 1 << iota
	before
	onInsert
	onDelete
	onUpdate
	onTruncate
)

func (s *survey) postgreSQL(ctx context.Context) error {
	_, guard, found := strings.Cut(strings.ToLower(s.guard), ".")
	if !found {
		guard = strings.ToLower(s.guard)
	}
	var name, bare, parent string
	var partition, subscribed bool
	err := s.each(ctx, `SELECT format('%I.%I', n.nspname, c.relname), c.relname, c.relispartition,
	coalesce((SELECT min(i.inhparent::regclass::text) FROM pg_inherits i WHERE i.inhrelid = c.oid), ''),
	EXISTS (SELECT 1 FROM pg_subscription_rel s WHERE s.srrelid = c.oid)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND c.relpersistence <> 't' AND n.nspname <> 'information_schema' AND n.nspname !~ '^pg_'
	AND c.relname <> $1 AND NOT EXISTS (SELECT 1 FROM pg_proc p WHERE p.proname = 'require_guard' AND p.pronamespace = n.oid)`,
		[]any{guard}, func() {
			t := s.add(name, bare)
			switch {
			case partition:
				t.of = "is a partition of " + parent
			case parent != "":
				t.of = "inherits from " + parent
			}
			if subscribed {
				t.hole("a subscription writes to it without its triggers")
			}
		}, &name, &bare, &partition, &parent, &subscribed)
	if err != nil {
		return err
	}
	var trigger, function, text, enabled, memory string
	var kind int
	var narrowed, same bool
	// The function of a table is named for it, except in a partition.
	err = s.each(ctx, `SELECT format('%I.%I', n.nspname, c.relname), c.relispartition, t.tgname, p.proname, p.prosrc,
	t.tgenabled::text, t.tgtype::int, t.tgqual IS NOT NULL OR t.tgattr::text <> '', coalesce(m.asked, ''),
	m.asked IS NULL OR coalesce(to_regclass(m.asked) = w.oid, false)
FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_proc p ON p.oid = t.tgfoid
CROSS JOIN LATERAL (SELECT substring(p.prosrc FROM 'FROM (\S+) AS seen') AS asked) m
LEFT JOIN LATERAL (SELECT k.oid FROM pg_class k WHERE k.relname = $1 AND k.relkind IN ('r', 'p') AND k.relpersistence <> 't'
	AND ($2 = '' OR k.oid = to_regclass($2)) LIMIT 1) w ON true
WHERE NOT t.tgisinternal OR t.tgparentid <> 0`, []any{guard, qualified(s.guard)}, func() {
		t := s.tables[name]
		if t == nil || function != "require_guard" && !strings.Contains(text, "has shown no claim for") {
			return
		}
		if owner, ok := strings.CutSuffix(function, "_fencing"); ok && owner != t.bare && !partition {
			s.swap(owner, name)
		}
		t.row(trigger, enabled, kind, narrowed)
		if !same {
			t.hole("its trigger %s asks %s, where the guard does not remember", trigger, memory)
		}
	}, &name, &partition, &trigger, &function, &text, &enabled, &kind, &narrowed, &memory, &same)
	if err != nil {
		return err
	}
	for _, t := range s.tables {
		if t.triggers > 0 && !t.seen["TRUNCATE"] {
			t.hole("TRUNCATE is not refused")
		}
	}
	return nil
}

// qualified returns the name of a table that has a schema, or "".
func qualified(table string) string {
	if strings.Contains(table, ".") {
		return table
	}
	return ""
}

// row notes one trigger of PostgreSQL.
func (t *table) row(trigger, enabled string, kind int, narrowed bool) {
	t.triggers++
	switch {
	case enabled != "O" && enabled != "A":
		t.hole("its trigger %s is disabled", trigger)
		return
	case narrowed:
		t.hole("its trigger %s has a condition", trigger)
		return
	case kind&forEachRow != 0 && kind&before != 0:
		t.hole("its trigger %s runs before others that may change the row", trigger)
	}
	for event, bit := range map[string]int{"INSERT": onInsert, "UPDATE": onUpdate, "DELETE": onDelete} {
		t.seen[event] = t.seen[event] || kind&forEachRow != 0 && kind&bit != 0
	}
	t.seen["TRUNCATE"] = t.seen["TRUNCATE"] || kind&onTruncate != 0
}

func (s *survey) mySQL(ctx context.Context) error {
	var name, engine string
	err := s.each(ctx, `SELECT table_name, coalesce(engine, '') FROM information_schema.tables
WHERE table_schema = database() AND table_type = 'BASE TABLE' AND table_name NOT IN (?, ?)`,
		[]any{s.guard, s.guard + "_shown"}, func() {
			if t := s.add(name, name); engine != "InnoDB" {
				t.hole("its engine, %s, does not undo what a trigger refuses", engine)
			}
		}, &name, &engine)
	if err != nil {
		return err
	}
	var trigger, event, timing, text string
	err = s.each(ctx, `SELECT event_object_table, trigger_name, event_manipulation, action_timing, action_statement
FROM information_schema.triggers WHERE event_object_schema = database()`, nil, func() {
		if t := s.tables[name]; t != nil && strings.Contains(text, s.guard+"_require(") {
			s.named(t, name, trigger, event, timing)
		}
	}, &name, &trigger, &event, &timing, &text)
	if err != nil {
		return err
	}
	var key, parent string
	return s.each(ctx, `SELECT table_name, constraint_name, referenced_table_name
FROM information_schema.referential_constraints WHERE constraint_schema = database()
	AND NOT (delete_rule IN ('RESTRICT', 'NO ACTION') AND update_rule IN ('RESTRICT', 'NO ACTION'))`, nil, func() {
		if t := s.tables[name]; t != nil && t.triggers > 0 {
			t.hole("its foreign key %s changes rows without triggers when %s changes", key, parent)
		}
	}, &name, &key, &parent)
}

// named notes a trigger for one event. The name of the trigger names the table for which it was made.
func (s *survey) named(t *table, name, trigger, event, timing string) {
	t.triggers++
	t.seen[event] = t.seen[event] || timing == "AFTER"
	owner, ok := strings.CutSuffix(trigger, "_fencing_"+strings.ToLower(event))
	if ok && owner != name {
		s.swap(owner, name)
	}
}

// made finds the event in the text of a trigger in SQLite.
var made = regexp.MustCompile(`AFTER (INSERT|UPDATE|DELETE) ON`)

func (s *survey) sqLite(ctx context.Context) error {
	var name, trigger, text string
	err := s.each(ctx, `SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\_%' ESCAPE '\'
AND name <> ?`, []any{s.guard}, func() { s.add(name, name) }, &name)
	if err != nil {
		return err
	}
	return s.each(ctx, `SELECT tbl_name, name, sql FROM sqlite_master WHERE type = 'trigger'`, nil, func() {
		t, event := s.tables[name], made.FindStringSubmatch(text)
		if t == nil || event == nil || !strings.Contains(text, "has shown no claim") {
			return
		}
		if !regexp.MustCompile(`FROM "?` + s.guard + `"? WHERE`).MatchString(text) {
			t.hole("its trigger %s asks a table where the guard does not remember", trigger)
		}
		s.named(t, name, trigger, event[1], "AFTER")
	}, &name, &trigger, &text)
}
