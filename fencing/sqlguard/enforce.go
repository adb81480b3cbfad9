package sqlguard

import (
	"fmt"
	"strings"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/statement"
)

// Enforce returns statements that make a table refuse every write without a claim, for a migration: writers who forget
// the guard fail instead of writing. Resource is an SQL expression that names what a row belongs to, with row for the
// row: 'accounts/' || row.id in PostgreSQL, CONCAT('accounts/', row.id) in MySQL. Table may have a schema; guard is the
// guard's table, "" for fencing_tokens. The guard's table must be there; the statements may be executed again, and
// those of one guard are shared by all tables that it protects. SQLite has no such statements.
//
// They stop who forgets, not who cheats: owners of the tables may switch triggers off, or write to the guard's table
// themselves. TRUNCATE runs no triggers.
//
// In PostgreSQL 13 and later the trigger looks for a row of the guard that this transaction has written, so claims are
// shown outside of savepoints.
//
// MySQL and MariaDB do not tell a trigger which transaction it runs in. There the check leaves a mark, in the session
// and with the resource, and a trigger compares the two: a session writes only while nobody else has shown a claim for
// the resource since, and a rollback takes the mark back. Tx ends it before the commit. After a bare check (In) it
// stays until another session shows a claim, or this one executes SET @fencing_mark = NULL: till then the session may
// write to that resource without a claim of its own. What a foreign key's ON DELETE and ON UPDATE change runs no
// triggers there.
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
	var texts []string
	switch d {
	case PostgreSQL:
		texts = enforcePostgreSQL
	case MySQL:
		texts = enforceMySQL
	default:
		return fail(&fencing.InvalidError{What: "dialect", Value: d.String(), Why: "want PostgreSQL or MySQL"})
	}
	fill := strings.NewReplacer("{table}", table, "{guard}", guard,
		"{old}", strings.ReplaceAll(resource, "row.", "OLD."), "{new}", strings.ReplaceAll(resource, "row.", "NEW."))
	statements := make([]string, len(texts))
	for i, text := range texts {
		statements[i] = fill.Replace(text)
	}
	return statements, nil
}

var enforcePostgreSQL = []string{
	`CREATE OR REPLACE FUNCTION {table}_fencing() RETURNS trigger LANGUAGE plpgsql AS $fencing$
DECLARE
	wanted text[] := '{}';
	missing text;
BEGIN
	IF TG_OP <> 'INSERT' THEN wanted := wanted || ({old})::text; END IF;
	IF TG_OP <> 'DELETE' THEN wanted := wanted || ({new})::text; END IF;
	SELECT w INTO missing FROM unnest(wanted) AS w WHERE w IS NULL OR NOT EXISTS (
		SELECT 1 FROM {guard} AS seen
		WHERE seen.resource = w AND seen.token > 0 AND seen.xmin::text = pg_current_xact_id()::xid::text) LIMIT 1;
	IF FOUND THEN
		RAISE EXCEPTION 'fencing: this transaction has shown no claim for %', missing USING ERRCODE = 'insufficient_privilege';
	END IF;
	IF TG_OP = 'DELETE' THEN RETURN OLD; END IF;
	RETURN NEW;
END
$fencing$`,
	`DROP TRIGGER IF EXISTS fencing ON {table}`,
	`CREATE TRIGGER fencing BEFORE INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION {table}_fencing()`,
}

// The mark is read with a lock: a transaction that has shown no claim waits for one that has, and then sees that it has
// not. Triggers run after the row was changed, when it has its AUTO_INCREMENT; what they refuse is undone.
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
