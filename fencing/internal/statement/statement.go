// Package statement is the check of the guards in SQL: one table, and what each dialect says to it.
// docs/FENCING-SPEC.md specifies both for writers in other languages.
//
// The row of a resource is locked first, and created if it is not there; the caller's transaction keeps that lock until
// it ends, so writers of one resource come one after the other. Then the guard's terms are read from the row of the
// empty name, the claim is judged by fencing.Judge, and what to remember is written into the resource's row.
package statement

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/fencelock/fencelock/fencing"
)

// Set is what one guard says to its database.
type Set struct {
	Table  string
	Schema string // creates the table unless it exists

	Lock     string // resource: locks its row, and creates it if it is not there
	Seen     string // resource → epoch, token, sequence, checks: as committed, or as this transaction wrote it
	View     string // resource → checks, as the transaction's reads see it; empty if that is the same or is refused
	Remember string // epoch, token, sequence, resource
	Terms    string // → epoch, space, token: as Seen
	Pin      string // space: sets the terms unless they are set
	End      string // before the commit: what the claims allowed ends here; empty where it ends with the transaction

	Alone    string // keeps checks out until the operator's transaction ends; empty where Terms does
	SetTerms string // epoch, space, token
	Clean    string // epoch, floor
}

// DefaultTable is the table of guards that name none.
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
func PostgreSQL(table string) Set {
	s := common(table)
	s.Schema = s.fill(`CREATE TABLE IF NOT EXISTS {table} (
	resource text   PRIMARY KEY,            -- '' holds the guard's terms: its epoch, space, and floor (token)
	epoch    bigint NOT NULL DEFAULT 0,
	token    bigint NOT NULL DEFAULT 0 CHECK (token >= 0),
	sequence bigint NOT NULL DEFAULT 0,
	checks   bigint NOT NULL DEFAULT 0,
	space    text   NOT NULL DEFAULT ''
)`)
	s.Lock = s.fill(`INSERT INTO {table} AS seen (resource) VALUES (?)
ON CONFLICT (resource) DO UPDATE SET checks = seen.checks + 1`)
	s.Pin = s.fill(`INSERT INTO {table} (resource, space) VALUES ('', ?) ON CONFLICT (resource) DO NOTHING`)
	s.Alone = s.fill(`LOCK TABLE {table} IN EXCLUSIVE MODE`)
	s.SetTerms = s.fill(`INSERT INTO {table} (resource, epoch, space, token) VALUES ('', ?, ?, ?)
ON CONFLICT (resource) DO UPDATE SET epoch = excluded.epoch, space = excluded.space, token = excluded.token`)
	for _, each := range []*string{
		&s.Lock, &s.Seen, &s.Remember, &s.Pin, &s.SetTerms, &s.Clean,
	} {
		*each = numbered(*each)
	}
	return s
}

// SQLite is the dialect of version 3.24, of 2018, and later.
func SQLite(table string) Set {
	s := common(table)
	s.Schema = s.fill(`CREATE TABLE IF NOT EXISTS {table} (
	resource TEXT    NOT NULL PRIMARY KEY,  -- '' holds the guard's terms: its epoch, space, and floor (token)
	epoch    INTEGER NOT NULL DEFAULT 0,
	token    INTEGER NOT NULL DEFAULT 0 CHECK (token >= 0),
	sequence INTEGER NOT NULL DEFAULT 0,
	checks   INTEGER NOT NULL DEFAULT 0,
	space    TEXT    NOT NULL DEFAULT ''
)`)
	s.Lock = s.fill(`INSERT INTO {table} (resource) VALUES (?)
ON CONFLICT (resource) DO UPDATE SET checks = checks + 1`)
	s.Pin = s.fill(`INSERT INTO {table} (resource, space) VALUES ('', ?) ON CONFLICT (resource) DO NOTHING`)
	s.SetTerms = s.fill(`INSERT INTO {table} (resource, epoch, space, token) VALUES ('', ?, ?, ?)
ON CONFLICT (resource) DO UPDATE SET epoch = excluded.epoch, space = excluded.space, token = excluded.token`)
	return s
}

// MySQL is the dialect of MySQL 5.7 to 9 and MariaDB.
//
// Names are binary: with a collation of its own the table would take "a" and "A", or "a" and "a ", for one resource.
// The engine is named because one without transactions would remember what was rolled back.
//
// End takes back the mark by which triggers know a session that has shown a claim; see sqlguard.Enforce.
//
// Lock changes nothing in a row that is there. So View, read before Remember, is what the transaction's view of the
// data tells: a view that is older than the last check is one in which the caller would read the past.
func MySQL(table string) Set {
	s := common(table)
	s.Schema = s.fill(fmt.Sprintf(`CREATE TABLE IF NOT EXISTS {table} (
	resource VARBINARY(%d)   NOT NULL PRIMARY KEY, -- '' holds the guard's terms: its epoch, space, and floor (token)
	epoch    BIGINT UNSIGNED NOT NULL DEFAULT 0,
	token    BIGINT UNSIGNED NOT NULL DEFAULT 0,
	sequence BIGINT UNSIGNED NOT NULL DEFAULT 0,
	checks   BIGINT UNSIGNED NOT NULL DEFAULT 0,
	space    VARBINARY(%d)   NOT NULL DEFAULT ''
) ENGINE=InnoDB`, fencing.MaxResourceBytes, fencing.MaxSpaceBytes))
	s.Lock = s.fill(`INSERT INTO {table} (resource) VALUES (?) ON DUPLICATE KEY UPDATE resource = resource`)
	s.View = s.fill(`SELECT checks FROM {table} WHERE resource = ?`)
	s.Seen += ` FOR UPDATE`
	s.Remember = s.fill(`UPDATE {table} SET epoch = ?, token = ?, sequence = ?, checks = checks + 1 WHERE resource = ?`)
	s.Alone = s.Terms + ` FOR UPDATE`
	s.Terms += ` LOCK IN SHARE MODE`
	s.Pin = s.fill(`INSERT INTO {table} (resource, space) VALUES ('', ?) ON DUPLICATE KEY UPDATE resource = resource`)
	s.End = `SET @fencing_mark = NULL`
	s.SetTerms = s.fill(`REPLACE INTO {table} (resource, epoch, space, token) VALUES ('', ?, ?, ?)`)
	return s
}

func common(table string) Set {
	s := Set{Table: table}
	s.Seen = s.fill(`SELECT epoch, token, sequence, checks FROM {table} WHERE resource = ?`)
	s.Remember = s.fill(`UPDATE {table} SET epoch = ?, token = ?, sequence = ? WHERE resource = ?`)
	s.Terms = s.fill(`SELECT epoch, space, token FROM {table} WHERE resource = ''`)
	s.Clean = s.fill(`DELETE FROM {table} WHERE resource <> '' AND (epoch < ? OR token < ?)`)
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
