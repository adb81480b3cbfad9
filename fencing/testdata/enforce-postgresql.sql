CREATE OR REPLACE FUNCTION accounts_fencing() RETURNS trigger LANGUAGE plpgsql AS $fencing$
DECLARE
	wanted text[] := '{}';
	missing text;
BEGIN
	IF TG_OP <> 'INSERT' THEN wanted := wanted || ('accounts/' || OLD.id)::text; END IF;
	IF TG_OP <> 'DELETE' THEN wanted := wanted || ('accounts/' || NEW.id)::text; END IF;
	SELECT w INTO missing FROM unnest(wanted) AS w WHERE w IS NULL OR NOT EXISTS (
		SELECT 1 FROM fencing_tokens AS seen
		WHERE seen.resource = w AND seen.token > 0 AND seen.xmin::text = pg_current_xact_id()::xid::text) LIMIT 1;
	IF FOUND THEN
		RAISE EXCEPTION 'fencing: this transaction has shown no claim for %', missing USING ERRCODE = 'insufficient_privilege';
	END IF;
	IF TG_OP = 'DELETE' THEN RETURN OLD; END IF;
	RETURN NEW;
END
$fencing$

DROP TRIGGER IF EXISTS fencing ON accounts

CREATE TRIGGER fencing BEFORE INSERT OR UPDATE OR DELETE ON accounts FOR EACH ROW EXECUTE FUNCTION accounts_fencing()
