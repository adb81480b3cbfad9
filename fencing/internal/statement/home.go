package statement

// One fencing memory for each PostgreSQL database. The name of a table alone is ambiguous: search_path does, and
// differs between sessions, and package postgres has the table in the schema of its locks. So a guard that names no
// schema uses the only table of the name that the database has, and refuses if there are two. A schema that package
// postgres has made is recognized by its function require_guard; the table in it is the memory of the database, and a
// guard refuses to use another one beside it, also where its schema is named.

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/fencelock/fencelock/fencing"
)

// home is where the table is that was named without a schema: nil until it has been found.
type home struct{ set atomic.Pointer[Set] }

// others selects the tables of the name, c.
const others = `pg_catalog.pg_class c
WHERE c.relname = '{name}' AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't'`

// apart selects the tables that cannot be beside one in the schema {schema}.
func (s Set) apart(schema string) string {
	if s.home != nil {
		return ""
	}
	made := `EXISTS (SELECT 1 FROM pg_catalog.pg_proc p WHERE p.proname = 'require_guard' AND p.pronamespace = `
	return "\nAND " + made + "c.relnamespace) <> " + made + schema + ")"
}

// oneMemory completes the statements of PostgreSQL.
func (s *Set) oneMemory() {
	schema, name, found := strings.Cut(s.Table, ".")
	here := "'" + strings.ToLower(schema) + "'"
	if !found {
		name, here = s.Table, "current_schema()"
	}
	fill := strings.NewReplacer("{table}", s.Table, "{name}", strings.ToLower(name), "{here}", "(SELECT h.oid FROM pg_catalog.pg_namespace h WHERE h.nspname = "+here+")")
	s.find = fill.Replace(`SELECT count(*), coalesce(min(c.relnamespace::regnamespace::text), '') FROM ` + others)
	s.Terms = fill.Replace(`SELECT state, current_setting('client_encoding'), coalesce((
SELECT min(c.relnamespace::regnamespace::text) FROM pg_catalog.pg_class k, ` + others + `
AND k.oid = m.tableoid AND c.oid <> k.oid` + s.apart("k.relnamespace") + `
), '') FROM {table} AS m WHERE resource = ''`)
	alone := fill.Replace(`DO $fencing$
DECLARE other text;
BEGIN
	PERFORM pg_advisory_xact_lock(hashtext('fencing_tokens'));
	SELECT min(c.relnamespace::regnamespace::text) INTO other FROM ` + others + `
AND c.relnamespace IS DISTINCT FROM {here}` + s.apart("{here}") + `;
	IF other IS NOT NULL THEN
		RAISE EXCEPTION 'fencing: the schema % has a table {name}, and a second one would be a second memory', other
			USING ERRCODE = 'duplicate_table';
	END IF;
END $fencing$`)
	s.Schema = append([]string{alone}, s.Schema...)
}

// errTwo: the database has two tables where one is to remember.
func (s Set) errTwo(schemas string) error {
	return &fencing.InvalidError{
		What: "table", Value: s.Table,
		Why: "there is one in the schema " + schemas + ", which would be a second memory: " +
			"docs/UPGRADE.md says how to make one of both",
	}
}

// found returns the set with the schema of its table.
func (s Set) found(ctx context.Context, db Conn) (Set, error) {
	if s.home == nil {
		return s, nil
	}
	if known := s.home.set.Load(); known != nil {
		return *known, nil
	}
	var tables int64
	var schema string
	if _, err := db.Row(ctx, s.find, nil, &tables, &schema); err != nil || tables == 0 {
		return s, err
	}
	if tables > 1 {
		return s, s.errTwo(schema)
	}
	there := postgreSQL(schema+"."+s.Table, s.home)
	there.Memory = s.Memory
	s.home.set.Store(&there)
	return there, nil
}

// lost makes the next call look for the table if err reports it as missing.
func (s Set) lost(err error) {
	if s.home != nil && errors.Is(err, fencing.ErrTermsLost) {
		s.home.set.Store(nil)
	}
}

// readable refuses a resource that the server would take for another text than other clients mean. pgx sends
// UTF-8, whatever the encoding of the connection.
func readable(encoding string, claims []fencing.Claim) error {
	for _, c := range claims {
		if encoding == "" || encoding == "UTF8" || encoding == "SQL_ASCII" || ascii(c.Resource) {
			continue
		}
		return &fencing.InvalidError{
			What: "connection", Value: c.Resource,
			Why: "its client_encoding is " + encoding + ": set it to UTF8",
		}
	}
	return nil
}

func ascii(text string) bool {
	for i := range len(text) {
		if text[i] >= 0x80 {
			return false
		}
	}
	return true
}

// created returns the error of Create for one of its statements.
func (s Set) created(err error) error {
	if s.find != "" && says(err, "42P07", 0) {
		return fmt.Errorf("%w: %w", &fencing.InvalidError{What: "table", Value: s.Table, Why: "it would be a second memory"}, err)
	}
	return fault(err)
}
