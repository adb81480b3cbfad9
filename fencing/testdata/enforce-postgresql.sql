DO $find$
DECLARE
	memory text;
BEGIN
	SELECT min(format('%I.%I', n.nspname, c.relname)) INTO memory
		FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE c.relname = lower('fencing_tokens') AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't' HAVING count(*) = 1;
	IF memory IS NULL THEN
		RAISE EXCEPTION 'fencing: want one table fencing_tokens in the database, which the guard has made' USING ERRCODE = 'undefined_table';
	END IF;
	EXECUTE replace($create$CREATE OR REPLACE FUNCTION accounts_fencing() RETURNS trigger LANGUAGE plpgsql AS $fencing$
DECLARE
	wanted text[] := '{}';
	missing text;
BEGIN
	IF TG_OP = 'TRUNCATE' THEN
		RAISE EXCEPTION 'fencing: TRUNCATE of % has shown no claim for its rows', TG_TABLE_NAME USING ERRCODE = 'insufficient_privilege';
	END IF;
	IF TG_OP <> 'INSERT' THEN wanted := wanted || ('accounts/' || OLD.id)::text; END IF;
	IF TG_OP <> 'DELETE' THEN wanted := wanted || ('accounts/' || NEW.id)::text; END IF;
	SELECT w INTO missing FROM unnest(wanted) AS w WHERE w IS NULL OR NOT EXISTS (
		SELECT 1 FROM {memory} AS seen
		WHERE seen.resource = w AND seen.state <> '' AND seen.xmin::text = pg_current_xact_id()::xid::text) LIMIT 1;
	IF FOUND THEN
		RAISE EXCEPTION 'fencing: this transaction has shown no claim for %', missing USING ERRCODE = 'insufficient_privilege';
	END IF;
	RETURN NULL;
END
$fencing$$create$, '{memory}', memory);
END
$find$

DROP TRIGGER IF EXISTS fencing ON accounts

CREATE TRIGGER fencing AFTER INSERT OR UPDATE OR DELETE ON accounts FOR EACH ROW EXECUTE FUNCTION accounts_fencing()

DROP TRIGGER IF EXISTS fencing_truncate ON accounts

CREATE TRIGGER fencing_truncate BEFORE TRUNCATE ON accounts FOR EACH STATEMENT EXECUTE FUNCTION accounts_fencing()
