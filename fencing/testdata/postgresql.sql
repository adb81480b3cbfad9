DO $fencing$
DECLARE other text;
BEGIN
	PERFORM pg_advisory_xact_lock(hashtext('fencing_tokens'));
	SELECT min(c.relnamespace::regnamespace::text) INTO other FROM pg_catalog.pg_class c
WHERE c.relname = 'fencing_tokens' AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
AND c.relnamespace IS DISTINCT FROM (SELECT h.oid FROM pg_catalog.pg_namespace h WHERE h.nspname = current_schema());
	IF other IS NOT NULL THEN
		RAISE EXCEPTION 'fencing: the schema % has a table fencing_tokens, and a second one would be a second memory', other
			USING ERRCODE = 'duplicate_table';
	END IF;
END $fencing$;

CREATE TABLE IF NOT EXISTS fencing_tokens (
	resource text   PRIMARY KEY,         -- '' holds the guard's terms
	state    text   NOT NULL DEFAULT '', -- see docs/FENCING-SPEC.md
	checks   bigint NOT NULL DEFAULT 0
);

INSERT INTO fencing_tokens (resource, state)
SELECT '', '2 ' || md5(random()::text || clock_timestamp()::text || txid_current()::text) || ' 0 0 -'
WHERE NOT EXISTS (SELECT 1 FROM fencing_tokens) ON CONFLICT (resource) DO NOTHING

-- a section with two claims, the first of all: token 33 in its 7th write, and token 34 of a generation
SELECT count(*), coalesce(min(c.relnamespace::regnamespace::text), '') FROM pg_catalog.pg_class c
WHERE c.relname = 'fencing_tokens' AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
INSERT INTO fencing_tokens AS seen (resource) VALUES ($1)
ON CONFLICT (resource) DO UPDATE SET checks = seen.checks + 1
  -- with "accounts/1"
SELECT state, checks FROM fencing_tokens WHERE resource = $1
  -- with "accounts/1"
INSERT INTO fencing_tokens AS seen (resource) VALUES ($1)
ON CONFLICT (resource) DO UPDATE SET checks = seen.checks + 1
  -- with "accounts/2"
SELECT state, checks FROM fencing_tokens WHERE resource = $1
  -- with "accounts/2"
SELECT state, current_setting('client_encoding'), coalesce((
SELECT min(c.relnamespace::regnamespace::text) FROM pg_catalog.pg_class k, pg_catalog.pg_class c
WHERE c.relname = 'fencing_tokens' AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
AND k.oid = m.tableoid AND c.oid <> k.oid
), '') FROM fencing_tokens AS m WHERE resource = ''
UPDATE fencing_tokens SET state = $1 WHERE resource = '' AND state = $2
  -- with "2 0c9e7c3bd7fd44d5b1b3a0d1c3e2f405 0 0 =etcd-1", "2 0c9e7c3bd7fd44d5b1b3a0d1c3e2f405 0 0 -"
SELECT state, current_setting('client_encoding'), coalesce((
SELECT min(c.relnamespace::regnamespace::text) FROM pg_catalog.pg_class k, pg_catalog.pg_class c
WHERE c.relname = 'fencing_tokens' AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
AND k.oid = m.tableoid AND c.oid <> k.oid
), '') FROM fencing_tokens AS m WHERE resource = ''
UPDATE fencing_tokens SET state = $1 WHERE resource = $2
  -- with "0 0 33 - 7", "accounts/1"
UPDATE fencing_tokens SET state = $1 WHERE resource = $2
  -- with "0 1.5a2f19fbb6b44c5f8f7b1d3c9a0e6f21 34 5a2f19fbb6b44c5f8f7b1d3c9a0e6f21 0", "accounts/2"

-- at the end of the section
SELECT count(*) FROM fencing_tokens
WHERE resource = $1 AND xmin::text = (txid_current() % 4294967296)::text
  -- with "accounts/1"

-- a check by hand of token 33 for the second resource: refused, so nothing is remembered
SELECT count(*), coalesce(min(c.relnamespace::regnamespace::text), '') FROM pg_catalog.pg_class c
WHERE c.relname = 'fencing_tokens' AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
INSERT INTO fencing_tokens AS seen (resource) VALUES ($1)
ON CONFLICT (resource) DO UPDATE SET checks = seen.checks + 1
  -- with "accounts/2"
SELECT state, checks FROM fencing_tokens WHERE resource = $1
  -- with "accounts/2"
SELECT state, current_setting('client_encoding'), coalesce((
SELECT min(c.relnamespace::regnamespace::text) FROM pg_catalog.pg_class k, pg_catalog.pg_class c
WHERE c.relname = 'fencing_tokens' AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
AND k.oid = m.tableoid AND c.oid <> k.oid
), '') FROM fencing_tokens AS m WHERE resource = ''

-- accept etcd-2 from token 5 on
SELECT count(*), coalesce(min(c.relnamespace::regnamespace::text), '') FROM pg_catalog.pg_class c
WHERE c.relname = 'fencing_tokens' AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
LOCK TABLE fencing_tokens IN EXCLUSIVE MODE
SELECT state, current_setting('client_encoding'), coalesce((
SELECT min(c.relnamespace::regnamespace::text) FROM pg_catalog.pg_class k, pg_catalog.pg_class c
WHERE c.relname = 'fencing_tokens' AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
AND k.oid = m.tableoid AND c.oid <> k.oid
), '') FROM fencing_tokens AS m WHERE resource = ''
INSERT INTO fencing_tokens (resource, state) VALUES ('', $1)
ON CONFLICT (resource) DO UPDATE SET state = excluded.state
  -- with "2 0c9e7c3bd7fd44d5b1b3a0d1c3e2f405 1 5 =etcd-2"

-- clean
SELECT count(*), coalesce(min(c.relnamespace::regnamespace::text), '') FROM pg_catalog.pg_class c
WHERE c.relname = 'fencing_tokens' AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
SELECT state, current_setting('client_encoding'), coalesce((
SELECT min(c.relnamespace::regnamespace::text) FROM pg_catalog.pg_class k, pg_catalog.pg_class c
WHERE c.relname = 'fencing_tokens' AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
AND k.oid = m.tableoid AND c.oid <> k.oid
), '') FROM fencing_tokens AS m WHERE resource = ''
DELETE FROM fencing_tokens WHERE resource <> '' AND CASE WHEN state = '' THEN false
ELSE split_part(state, ' ', 1)::bigint < $1
	OR split_part(state, ' ', 2) = '0' AND split_part(state, ' ', 3)::bigint < $2 END
  -- with 0, 0
