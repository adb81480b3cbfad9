package sqlguard

import (
	"fmt"
	"strings"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/statement"
)

// Enforce returns statements that make a table refuse every write without a claim, for a migration: a writer that
// forgets the guard gets an error. resource is an SQL expression for the resource of a row, with row for the row:
// 'accounts/' || row.id in PostgreSQL and SQLite, CONCAT('accounts/', row.id) in MySQL. Table may have a schema,
// except in SQLite; guard is the guard's table, "" for fencing_tokens. The guard's table must be there; the
// statements may be repeated, and all tables of one guard share some of them. In PostgreSQL a guard's table
// without a schema is the only one of its name in the database, as everywhere, and is looked for when the statements
// are executed: repeat them after it was moved.
//
// They stop writers that forget the guard, not writers that evade it: owners of the tables may disable triggers, or
// write to the guard's table. In PostgreSQL TRUNCATE is refused; in MySQL it runs no triggers. No trigger sees rows
// of a table attached as a partition, rows of tables that inherit from this one, and changes by logical
// replication.
//
// In PostgreSQL 13 and later the trigger looks for a row of the guard that this transaction has written, so claims are
// shown outside of savepoints.
//
// In MySQL and MariaDB a trigger cannot identify its transaction. There the check leaves a mark, in the session and
// with the resource, and a trigger compares the two: a session writes only while no other session has shown a claim
// for the resource since, and a rollback removes the mark. Tx ends it before the commit. After a bare check (In) it
// stays until another session shows a claim, or this one executes SET @fencing_mark = NULL: until then the session
// may write to that resource without a new claim. Changes by a foreign key's ON DELETE and ON UPDATE run no triggers
// there.
//
// In SQLite the trigger looks for the mark of a section, a row of the guard's table that no other transaction sees, and
// that the end of the section (Tx, or Verify) deletes. If a COMMIT in a statement has ended the transaction before,
// the mark stays, and allows writes to that resource, until the next check of any resource deletes it. Deletions by
// REPLACE run triggers only with PRAGMA recursive_triggers = on.
func Enforce(d Dialect, table, resource, guard string) ([]string, error) {
	fail := func(err error) ([]string, error) { return nil, fmt.Errorf("sqlguard: enforce: %w", err) }
	guard, err := statement.Table(guard)
	if err != nil {
		return fail(err)
	}
	if table == "" {
		return fail(&fencing.InvalidError{What: "table", Why: "it is empty"})
	}
	if _, err := statement.Table(table); err != nil {
		return fail(err)
	}
	if !strings.Contains(resource, "row.") || strings.ContainsAny(resource, ";$") {
		return fail(&fencing.InvalidError{
			What: "resource", Value: resource, Why: "want an expression that says row.column, without ; and $",
		})
	}
	texts := map[Dialect][]string{PostgreSQL: enforcePostgreSQL, MySQL: enforceMySQL, SQLite: enforceSQLite}[d]
	if texts == nil {
		return fail(&fencing.InvalidError{What: "dialect", Value: d.String(), Why: "want PostgreSQL, MySQL or SQLite"})
	}
	if d == SQLite && strings.Contains(table+guard, ".") {
		return fail(&fencing.InvalidError{
			What: "table", Value: table + ", " + guard, Why: "a trigger of SQLite names no schema: both tables are in one file",
		})
	}
	fill := strings.NewReplacer("{table}", table, "{guard}", guard,
		"{old}", strings.ReplaceAll(resource, "row.", "OLD."), "{new}", strings.ReplaceAll(resource, "row.", "NEW."))
	statements := make([]string, len(texts))
	for i, text := range texts {
		if d == PostgreSQL && i == 0 && !strings.Contains(guard, ".") {
			text = strings.Replace(findPostgreSQL, "{create}", strings.ReplaceAll(text, "{guard}", "{memory}"), 1)
		}
		statements[i] = fill.Replace(text)
	}
	return statements, nil
}

// findPostgreSQL creates the trigger's function for the guard's table that has been named without its schema.
const findPostgreSQL = `DO $find$
DECLARE
	memory text;
BEGIN
	SELECT min(format('%I.%I', n.nspname, c.relname)) INTO memory
		FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE c.relname = lower('{guard}') AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't' HAVING count(*) = 1;
	IF memory IS NULL THEN
		RAISE EXCEPTION 'fencing: want one table {guard} in the database, which the guard has made' USING ERRCODE = 'undefined_table';
	END IF;
	EXECUTE replace($create${create}$create$, '{memory}', memory);
END
$find$`

// The trigger comes after the row was changed, when no other trigger can move it to another resource, and generated
// columns have their values; a refused change is undone.
var enforcePostgreSQL = []string{
	`CREATE OR REPLACE FUNCTION {table}_fencing() RETURNS trigger LANGUAGE plpgsql AS $fencing$
DECLARE
	wanted text[] := '{}';
	missing text;
BEGIN
	IF TG_OP = 'TRUNCATE' THEN
		RAISE EXCEPTION 'fencing: TRUNCATE of % has shown no claim for its rows', TG_TABLE_NAME USING ERRCODE = 'insufficient_privilege';
	END IF;
	IF TG_OP <> 'INSERT' THEN wanted := wanted || ({old})::text; END IF;
	IF TG_OP <> 'DELETE' THEN wanted := wanted || ({new})::text; END IF;
	SELECT w INTO missing FROM unnest(wanted) AS w WHERE w IS NULL OR NOT EXISTS (
		SELECT 1 FROM {guard} AS seen
		WHERE seen.resource = w AND seen.state <> '' AND seen.xmin::text = pg_current_xact_id()::xid::text) LIMIT 1;
	IF FOUND THEN
		RAISE EXCEPTION 'fencing: this transaction has shown no claim for %', missing USING ERRCODE = 'insufficient_privilege';
	END IF;
	RETURN NULL;
END
$fencing$`,
	`DROP TRIGGER IF EXISTS fencing ON {table}`,
	`CREATE TRIGGER fencing AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION {table}_fencing()`,
	`DROP TRIGGER IF EXISTS fencing_truncate ON {table}`,
	`CREATE TRIGGER fencing_truncate BEFORE TRUNCATE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION {table}_fencing()`,
}

// The mark is read with a lock: a transaction without a claim waits for a transaction with one, and then sees that it
// has not. Triggers run after the row was changed, when it has its AUTO_INCREMENT; a refused change is undone.
var enforceMySQL = []string{
	fmt.Sprintf(`CREATE TABLE IF NOT EXISTS {guard}_shown (
	resource VARBINARY(%d) NOT NULL PRIMARY KEY,
	mark     VARBINARY(36)  NOT NULL
) ENGINE=InnoDB`, fencing.MaxResourceBytes),
	`DROP TRIGGER IF EXISTS {guard}_shown`,
	`CREATE TRIGGER {guard}_shown AFTER UPDATE ON {guard} FOR EACH ROW
BEGIN
	IF NEW.resource <> '' AND NEW.checks <> OLD.checks THEN
		SET @fencing_mark = COALESCE(@fencing_mark, UUID());
		INSERT INTO {guard}_shown (resource, mark) VALUES (NEW.resource, @fencing_mark) ON DUPLICATE KEY UPDATE mark = @fencing_mark;
	END IF;
END`,
	`DROP PROCEDURE IF EXISTS {guard}_require`,
	`CREATE PROCEDURE {guard}_require(IN wanted VARBINARY(4096))
BEGIN
	DECLARE shown VARBINARY(36);
	DECLARE missing VARCHAR(128) CHARACTER SET utf8mb4;
	SELECT MAX(mark) INTO shown FROM {guard}_shown WHERE resource = wanted LOCK IN SHARE MODE;
	IF shown IS NULL OR @fencing_mark IS NULL OR shown <> @fencing_mark THEN
		SET missing = LEFT(CONCAT('fencing: this transaction has shown no claim for ', COALESCE(CONVERT(wanted USING utf8mb4), 'NULL')), 128);
		SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = missing;
	END IF;
END`,
	`DROP TRIGGER IF EXISTS {table}_fencing_insert`,
	`CREATE TRIGGER {table}_fencing_insert AFTER INSERT ON {table} FOR EACH ROW CALL {guard}_require(CONVERT({new} USING utf8mb4))`,
	`DROP TRIGGER IF EXISTS {table}_fencing_update`,
	`CREATE TRIGGER {table}_fencing_update AFTER UPDATE ON {table} FOR EACH ROW
BEGIN
	CALL {guard}_require(CONVERT({old} USING utf8mb4));
	CALL {guard}_require(CONVERT({new} USING utf8mb4));
END`,
	`DROP TRIGGER IF EXISTS {table}_fencing_delete`,
	`CREATE TRIGGER {table}_fencing_delete AFTER DELETE ON {table} FOR EACH ROW CALL {guard}_require(CONVERT({old} USING utf8mb4))`,
}

// The message of RAISE is a literal before version 3.47.
var enforceSQLite = []string{
	`DROP TRIGGER IF EXISTS {table}_fencing_insert`,
	`CREATE TRIGGER {table}_fencing_insert AFTER INSERT ON {table} FOR EACH ROW
WHEN NOT EXISTS (SELECT 1 FROM {guard} WHERE resource = char(1) || ({new}))
BEGIN SELECT RAISE(ABORT, 'fencing: this transaction has shown no claim for the row of {table}'); END`,
	`DROP TRIGGER IF EXISTS {table}_fencing_update`,
	`CREATE TRIGGER {table}_fencing_update AFTER UPDATE ON {table} FOR EACH ROW
WHEN NOT EXISTS (SELECT 1 FROM {guard} WHERE resource = char(1) || ({old}))
	OR NOT EXISTS (SELECT 1 FROM {guard} WHERE resource = char(1) || ({new}))
BEGIN SELECT RAISE(ABORT, 'fencing: this transaction has shown no claim for the row of {table}'); END`,
	`DROP TRIGGER IF EXISTS {table}_fencing_delete`,
	`CREATE TRIGGER {table}_fencing_delete AFTER DELETE ON {table} FOR EACH ROW
WHEN NOT EXISTS (SELECT 1 FROM {guard} WHERE resource = char(1) || ({old}))
BEGIN SELECT RAISE(ABORT, 'fencing: this transaction has shown no claim for the row of {table}'); END`,
}
