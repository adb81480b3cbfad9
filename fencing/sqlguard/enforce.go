package sqlguard

import (
	"fmt"
	"strings"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/statement"
)

// Enforce returns statements for PostgreSQL 13 and later that make a table refuse every write whose transaction has shown no
// claim, for a migration: writers who forget the guard fail instead of writing. Resource is an SQL expression that names what
// a row belongs to, with row for the row: 'accounts/' || row.id. Table may have a schema; guard is the guard's table, ""
// for fencing_tokens.
//
// The trigger looks for a row of the guard that this transaction has written, so claims are shown outside of savepoints. It
// stops who forgets, not who cheats: owners of the tables may switch it off, or write to the guard's table themselves.
func Enforce(table, resource, guard string) (string, error) {
	guard, err := statement.Table(guard)
	if err != nil {
		return "", fmt.Errorf("sqlguard: enforce: %w", err)
	}
	if table == "" {
		return "", fmt.Errorf("sqlguard: enforce: %w", &fencing.InvalidError{What: "table", Why: "it is empty"})
	}
	if _, err := statement.Table(table); err != nil {
		return "", fmt.Errorf("sqlguard: enforce: %w", err)
	}
	if !strings.Contains(resource, "row.") || strings.ContainsAny(resource, ";$") {
		return "", fmt.Errorf("sqlguard: enforce: %w", &fencing.InvalidError{
			What: "resource", Value: resource, Why: "want an expression that says row.column, without ; and $",
		})
	}
	return strings.NewReplacer("{table}", table, "{function}", table+"_fencing", "{guard}", guard,
		"{old}", strings.ReplaceAll(resource, "row.", "OLD."), "{new}", strings.ReplaceAll(resource, "row.", "NEW."),
	).Replace(enforce), nil
}

const enforce = `CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $fencing$
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
$fencing$;

CREATE TRIGGER fencing BEFORE INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION {function}();
`
