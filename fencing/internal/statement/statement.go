// Package statement holds the SQL of the guards: one table, and the one statement that admits a token, for each dialect.
//
// The statement inserts the token of a resource that is new, or raises the one that is there; it never lowers it. What it
// answers is the token after that, and the space that the row is of: the claim is admitted if both are its own. So one
// statement decides, remembers, and tells the highest token to those that it refuses. It takes the row's lock, which the
// caller's transaction keeps until it commits or rolls back: writers of one resource come one after the other.
package statement

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/fencelock/fencelock/fencing"
)

// Set is what one guard says to its database.
type Set struct {
	Schema string // creates the table unless it exists
	Check  string // resource, space, token; see the dialect for its answer
	Seen   string // resource → token, space
	adopt  string // space: for rows that have none; they keep their tokens
	accept string // to, from: for rows of the space from; they forget their tokens
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
			What: "table", Value: name, Why: "want letters, digits and _, at most 63 of them, and one dot after a schema",
		}
	}
	return name, nil
}

// Mark is set in the token that MySQL answers where the row is of another space: the number is all it can answer with.
const Mark = 1 << 63

// PostgreSQL answers with a row: token, space.
func PostgreSQL(table string) Set {
	s := common(table, "$1", "$2")
	s.Schema = fmt.Sprintf(`CREATE TABLE IF NOT EXISTS %s (
	resource text   PRIMARY KEY,
	space    text   NOT NULL DEFAULT '',
	token    bigint NOT NULL CHECK (token >= 0)
)`, table)
	s.Check = fmt.Sprintf(`INSERT INTO %s AS seen (resource, space, token) VALUES ($1, $2, $3)
ON CONFLICT (resource) DO UPDATE SET token = CASE
	WHEN seen.space = excluded.space AND seen.token < excluded.token THEN excluded.token ELSE seen.token END
RETURNING token, space`, table)
	return s
}

// SQLite answers with a row: token, space. It takes version 3.35, of 2021.
func SQLite(table string) Set {
	s := common(table, "?", "?")
	s.Schema = fmt.Sprintf(`CREATE TABLE IF NOT EXISTS %s (
	resource TEXT    NOT NULL PRIMARY KEY,
	space    TEXT    NOT NULL DEFAULT '',
	token    INTEGER NOT NULL CHECK (token >= 0)
)`, table)
	s.Check = fmt.Sprintf(`INSERT INTO %s AS seen (resource, space, token) VALUES (?, ?, ?)
ON CONFLICT (resource) DO UPDATE SET token = CASE
	WHEN seen.space = excluded.space AND seen.token < excluded.token THEN excluded.token ELSE seen.token END
RETURNING token, space`, table)
	return s
}

// MySQL, and MariaDB, answer with the id of the last insert: the token, with Mark if the row is of another space. Not
// every version has RETURNING, and this number comes with every answer. Check takes five values: resource, space, token,
// and once more space and token: VALUES() is on its way out in one of the two, and its successor unknown to the other.
//
// Names are binary: with a collation of its own the table would take "a" and "A", or "a" and "a ", for one resource. The
// engine is named because one without transactions would remember what was rolled back.
func MySQL(table string) Set {
	s := common(table, "?", "?")
	s.Schema = fmt.Sprintf(`CREATE TABLE IF NOT EXISTS %s (
	resource VARBINARY(%d)   NOT NULL PRIMARY KEY,
	space    VARBINARY(%d)   NOT NULL DEFAULT '',
	token    BIGINT UNSIGNED NOT NULL
) ENGINE=InnoDB`, table, fencing.MaxResourceBytes, fencing.MaxSpaceBytes)
	s.Check = fmt.Sprintf(`INSERT INTO %s (resource, space, token) VALUES (?, ?, LAST_INSERT_ID(?))
ON DUPLICATE KEY UPDATE token = IF(space = ?,
	LAST_INSERT_ID(GREATEST(token, CAST(? AS UNSIGNED))),
	token + 0 * LAST_INSERT_ID(token | 9223372036854775808))`, table)
	return s
}

func common(table, first, second string) Set {
	fill := strings.NewReplacer("{table}", table, "{1}", first, "{2}", second).Replace
	return Set{
		Seen:   fill("SELECT token, space FROM {table} WHERE resource = {1}"),
		adopt:  fill("UPDATE {table} SET space = {1} WHERE space = ''"),
		accept: fill("UPDATE {table} SET space = {1}, token = 0 WHERE space = {2}"),
	}
}

// Change returns the statement that makes rows of the space from rows of the space to.
func (s Set) Change(from, to string) (query string, args []any, err error) {
	switch {
	case to == "":
		err = &fencing.InvalidError{What: "space", Value: to, Why: "it is empty"}
	case to == from:
		err = &fencing.InvalidError{What: "space", Value: to, Why: "it is the one before"}
	default:
		err = fencing.ValidateSpace(to)
	}
	if from == "" {
		return s.adopt, []any{to}, err
	}
	return s.accept, []any{to, from}, err
}
