// Package statement is the check of the guards in SQL: one table, and the statements of each dialect.
// docs/FENCING-SPEC.md specifies both for writers in other languages.
//
// The row of a resource is locked first, and created if it is not there; the caller's transaction keeps that lock until
// it ends, so writers of one resource come one after the other. Then the guard's terms are read from the row of the
// empty name, the claim is judged by fencing.Judge, and the new memory is written into the resource's row, as one
// text in one column.
package statement

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/memory"
)

// Set has the statements of one guard.
type Set struct {
	Table  string
	Memory *memory.Pin // the ID of the table's memory; nil: any
	Schema []string    // create the table unless it exists, and its terms if it has no row

	Lock     string // resource: locks its row, and creates it if it is not there
	Seen     string // resource → state, checks: as committed, or as this transaction wrote it
	View     string // resource → checks, as the transaction's reads see it; empty if the view is the same or is refused
	Remember string // state, resource
	Terms    string // → state: as Seen; in PostgreSQL also the client's encoding, and a schema with another such table
	Pin      string // new state, state: sets the terms if they are still the latter

	// The end of a section; see Section.
	Savepoint string // is there as long as the transaction of the check; empty: see Written
	Release   string // fails if the savepoint is gone
	Written   string // resource → 1 if this transaction has written the row; empty where there are savepoints
	Stale     string // deletes the marks of sections that have ended; empty where there are no marks
	Mark      string // resource: leaves the mark of a section
	Unmark    string // resource: deletes it
	End       string // revokes the session's rights from the claims; empty where it ends with the transaction

	Alone    string // keeps checks out until the operator's transaction ends; empty where Terms does
	SetTerms string // state
	Clean    string // epoch, floor

	home *home  // PostgreSQL, and Table has been named without a schema
	find string // → how many tables of the name there are, and the schema of one

	// From format 1 to 2; see Steps.
	Add   string   // adds the column of format 2
	Older string   // → epoch, token and space of the terms of format 1, as text
	Fill  string   // sets the column from the columns of format 1, except for the terms
	Taint string   // makes the columns of format 1 unreadable for its writers; empty where they are dropped in the same step
	Drop  []string // drop the columns of format 1
}

// DefaultTable is the table of guards without a table name.
const DefaultTable = "fencing_tokens"

var identifier = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,62}(\.[A-Za-z_][A-Za-z0-9_]{0,62})?$`)

// Table returns the name of the table to use for the name that the user gave.
func Table(name string) (string, error) {
	if name == "" {
		return DefaultTable, nil
	}
	if !identifier.MatchString(name) {
		return "", &fencing.InvalidError{
			What: "table", Value: name,
			Why: "want letters, digits and _, at most 63 of them, and one dot after a schema",
		}
	}
	return name, nil
}

// PostgreSQL is the dialect of version 9.5 and later. It takes parameters by number.
//
// A table without a schema is the only one of its name in the database, wherever it is; see found.
func PostgreSQL(table string) Set {
	var h *home
	if !strings.Contains(table, ".") {
		h = new(home)
	}
	return postgreSQL(table, h)
}

func postgreSQL(table string, h *home) Set {
	s := common(table)
	s.home = h
	s.Schema = []string{
		s.fill(`CREATE TABLE IF NOT EXISTS {table} (
	resource text   PRIMARY KEY,         -- '' holds the guard's terms
	state    text   NOT NULL DEFAULT '', -- see docs/FENCING-SPEC.md
	checks   bigint NOT NULL DEFAULT 0
)`),
		s.fill(`INSERT INTO {table} (resource, state)
SELECT '', '2 ' || md5(random()::text || clock_timestamp()::text || txid_current()::text) || ' 0 0 -'
WHERE NOT EXISTS (SELECT 1 FROM {table}) ON CONFLICT (resource) DO NOTHING`),
	}
	s.oneMemory()
	s.Lock = s.fill(`INSERT INTO {table} AS seen (resource) VALUES (?)
ON CONFLICT (resource) DO UPDATE SET checks = seen.checks + 1`)
	s.Alone = s.fill(`LOCK TABLE {table} IN EXCLUSIVE MODE`)
	s.SetTerms = s.fill(`INSERT INTO {table} (resource, state) VALUES ('', ?)
ON CONFLICT (resource) DO UPDATE SET state = excluded.state`)
	s.Clean = s.fill(`DELETE FROM {table} WHERE resource <> '' AND CASE WHEN state = '' THEN false
ELSE split_part(state, ' ', 1)::bigint < ?
	OR split_part(state, ' ', 2) = '0' AND split_part(state, ' ', 3)::bigint < ? END`)
	// Savepoints would give the rows that are written in them another xmin, and need subtransactions.
	s.Written = s.fill(`SELECT count(*) FROM {table}
WHERE resource = ? AND xmin::text = (txid_current() % 4294967296)::text`)
	s.Add = s.fill(`ALTER TABLE {table} ADD COLUMN state text NOT NULL DEFAULT ''`)
	s.Drop = []string{s.fill(`ALTER TABLE {table} DROP COLUMN epoch, DROP COLUMN token, DROP COLUMN sequence, DROP COLUMN space`)}
	for _, each := range []*string{
		&s.Lock, &s.Seen, &s.Remember, &s.Pin, &s.SetTerms, &s.Clean, &s.Written,
	} {
		*each = numbered(*each)
	}
	return s
}

// SQLite is the dialect of version 3.24, of 2018, and later.
//
// The mark of a section is a row for each of its resources, with a name that begins with U+0001, which no resource's
// does. There is one writer at a time, so marks that a check finds belong to sections with transactions that were
// committed before their end, and are deleted. Triggers require the mark; see sqlguard.Enforce.
func SQLite(table string) Set {
	s := common(table)
	s.Schema = []string{
		s.fill(`CREATE TABLE IF NOT EXISTS {table} (
	resource TEXT    NOT NULL PRIMARY KEY, -- '' holds the guard's terms
	state    TEXT    NOT NULL DEFAULT '',  -- see docs/FENCING-SPEC.md
	checks   INTEGER NOT NULL DEFAULT 0
)`),
		s.fill(`INSERT INTO {table} (resource, state)
SELECT '', '2 ' || lower(hex(randomblob(16))) || ' 0 0 -' WHERE NOT EXISTS (SELECT 1 FROM {table})`),
	}
	s.Lock = s.fill(`INSERT INTO {table} (resource) VALUES (?)
ON CONFLICT (resource) DO UPDATE SET checks = checks + 1`)
	s.SetTerms = s.fill(`INSERT INTO {table} (resource, state) VALUES ('', ?)
ON CONFLICT (resource) DO UPDATE SET state = excluded.state`)
	s.Clean = s.fill(`DELETE FROM {table} WHERE resource <> '' AND state <> '' AND (CAST(state AS INTEGER) < ?
OR substr(state, instr(state, ' '), 3) = ' 0 ' AND CAST(substr(state, instr(state, ' ') + 3) AS INTEGER) < ?)`)
	s.Add = s.fill(`ALTER TABLE {table} ADD COLUMN state TEXT NOT NULL DEFAULT ''`)
	for _, column := range []string{"epoch", "token", "sequence", "space"} {
		s.Drop = append(s.Drop, s.fill(`ALTER TABLE {table} DROP COLUMN `+column))
	}
	s.Savepoint, s.Release = savepoint, release
	s.Stale = s.fill(`DELETE FROM {table} WHERE resource >= char(1) AND resource < char(2)`)
	s.Mark = s.fill(`INSERT INTO {table} (resource) VALUES (char(1) || ?)`)
	s.Unmark = s.fill(`DELETE FROM {table} WHERE resource = char(1) || ?`)
	return s
}

const savepoint, release = `SAVEPOINT fencing_section`, `RELEASE SAVEPOINT fencing_section`

// MySQL is the dialect of MySQL 5.7 to 9 and MariaDB.
//
// Names are binary: with its own collation the table would take "a" and "A", or "a" and "a ", for one resource.
// The engine is named because one without transactions would remember rolled back claims.
//
// End takes back the mark by which triggers know a session that has shown a claim; see sqlguard.Enforce.
//
// Lock does not change an existing row. So View, read before Remember, shows the transaction's view of the data: in a
// view that is older than the last check the caller would read the past.
func MySQL(table string) Set {
	s := common(table)
	s.Schema = []string{
		s.fill(fmt.Sprintf(`CREATE TABLE IF NOT EXISTS {table} (
	resource VARBINARY(%d) NOT NULL PRIMARY KEY, -- '' holds the guard's terms
	state    VARBINARY(%d) NOT NULL DEFAULT '',  -- see docs/FENCING-SPEC.md
	checks   BIGINT UNSIGNED NOT NULL DEFAULT 0
) ENGINE=InnoDB`, fencing.MaxResourceBytes, maxState)),
		s.fill(`INSERT INTO {table} (resource, state)
SELECT '', CONCAT('2 ', MD5(CONCAT(UUID(), RAND())), ' 0 0 -') FROM DUAL WHERE NOT EXISTS (SELECT 1 FROM {table})
ON DUPLICATE KEY UPDATE checks = {table}.checks`),
	}
	s.Lock = s.fill(`INSERT INTO {table} (resource) VALUES (?) ON DUPLICATE KEY UPDATE resource = resource`)
	s.View = s.fill(`SELECT checks FROM {table} WHERE resource = ?`)
	s.Seen += ` FOR UPDATE`
	s.Remember = s.fill(`UPDATE {table} SET state = ?, checks = checks + 1 WHERE resource = ?`)
	s.Alone = s.Terms + ` FOR UPDATE`
	s.Terms += ` LOCK IN SHARE MODE`
	s.Savepoint, s.Release = savepoint, release
	s.End = `SET @fencing_mark = NULL`
	s.SetTerms = s.fill(`INSERT INTO {table} (resource, state) VALUES ('', ?) ON DUPLICATE KEY UPDATE state = VALUES(state)`)
	s.Clean = s.fill(`DELETE FROM {table} WHERE resource <> '' AND state <> ''
AND (CAST(SUBSTRING_INDEX(state, ' ', 1) AS UNSIGNED) < ? OR SUBSTRING_INDEX(SUBSTRING_INDEX(state, ' ', 2), ' ', -1) = '0'
	AND CAST(SUBSTRING_INDEX(SUBSTRING_INDEX(state, ' ', 3), ' ', -1) AS UNSIGNED) < ?)`)
	s.Add = s.fill(fmt.Sprintf(`ALTER TABLE {table} ADD COLUMN state VARBINARY(%d) NOT NULL DEFAULT ''`, maxState))
	s.Older = s.fill(`SELECT CAST(epoch AS CHAR), CAST(token AS CHAR), space FROM {table} WHERE resource = '' FOR UPDATE`)
	s.Fill = s.fill(`UPDATE {table} SET state = CONCAT(epoch, ' 0 ', token, ' - ', sequence) WHERE resource <> '' AND token > 0`)
	// Writers of format 1 read both as signed numbers.
	s.Taint = s.fill(`UPDATE {table} SET epoch = 18446744073709551615, token = 18446744073709551615 WHERE resource = ''`)
	s.Drop = []string{s.fill(`ALTER TABLE {table} DROP COLUMN epoch, DROP COLUMN token, DROP COLUMN sequence, DROP COLUMN space`)}
	return s
}

// maxState bounds the text of the terms: the longest text that fencing.Terms.String returns is shorter.
const maxState = 512

func common(table string) Set {
	s := Set{Table: table}
	s.Seen = s.fill(`SELECT state, checks FROM {table} WHERE resource = ?`)
	s.Remember = s.fill(`UPDATE {table} SET state = ? WHERE resource = ?`)
	s.Terms = s.fill(`SELECT state FROM {table} WHERE resource = ''`)
	s.Pin = s.fill(`UPDATE {table} SET state = ? WHERE resource = '' AND state = ?`)
	s.Older = s.fill(`SELECT CAST(epoch AS text), CAST(token AS text), space FROM {table} WHERE resource = ''`)
	s.Fill = s.fill(`UPDATE {table} SET state = epoch || ' 0 ' || token || ' - ' || sequence WHERE resource <> '' AND token > 0`)
	return s
}

func (s Set) fill(text string) string { return strings.ReplaceAll(text, "{table}", s.Table) }

// numbered writes $1, $2 and so on for the question marks.
func numbered(query string) string {
	var b strings.Builder
	n := 0
	for part := range strings.SplitSeq(query, "?") {
		if n > 0 {
			fmt.Fprintf(&b, "$%d", n)
		}
		b.WriteString(part)
		n++
	}
	return b.String()
}
