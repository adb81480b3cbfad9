CREATE TABLE IF NOT EXISTS fencing_tokens (
	resource TEXT    NOT NULL PRIMARY KEY, -- '' holds the guard's terms
	state    TEXT    NOT NULL DEFAULT '',  -- see docs/FENCING-SPEC.md
	checks   INTEGER NOT NULL DEFAULT 0
);

INSERT INTO fencing_tokens (resource, state)
SELECT '', '2 ' || lower(hex(randomblob(16))) || ' 0 0 -' WHERE NOT EXISTS (SELECT 1 FROM fencing_tokens)

-- a section with two claims, the first of all: token 33 in its 7th write, and token 34 of a generation
INSERT INTO fencing_tokens (resource) VALUES (?)
ON CONFLICT (resource) DO UPDATE SET checks = checks + 1
  -- with "accounts/1"
SELECT state, checks FROM fencing_tokens WHERE resource = ?
  -- with "accounts/1"
INSERT INTO fencing_tokens (resource) VALUES (?)
ON CONFLICT (resource) DO UPDATE SET checks = checks + 1
  -- with "accounts/2"
SELECT state, checks FROM fencing_tokens WHERE resource = ?
  -- with "accounts/2"
SELECT state FROM fencing_tokens WHERE resource = ''
UPDATE fencing_tokens SET state = ? WHERE resource = '' AND state = ?
  -- with "2 0c9e7c3bd7fd44d5b1b3a0d1c3e2f405 0 0 =etcd-1", "2 0c9e7c3bd7fd44d5b1b3a0d1c3e2f405 0 0 -"
SELECT state FROM fencing_tokens WHERE resource = ''
UPDATE fencing_tokens SET state = ? WHERE resource = ?
  -- with "0 0 33 - 7", "accounts/1"
UPDATE fencing_tokens SET state = ? WHERE resource = ?
  -- with "0 1.5a2f19fbb6b44c5f8f7b1d3c9a0e6f21 34 5a2f19fbb6b44c5f8f7b1d3c9a0e6f21 0", "accounts/2"
DELETE FROM fencing_tokens WHERE resource >= char(1) AND resource < char(2)
INSERT INTO fencing_tokens (resource) VALUES (char(1) || ?)
  -- with "accounts/1"
INSERT INTO fencing_tokens (resource) VALUES (char(1) || ?)
  -- with "accounts/2"
SAVEPOINT fencing_section

-- at the end of the section
RELEASE SAVEPOINT fencing_section
DELETE FROM fencing_tokens WHERE resource = char(1) || ?
  -- with "accounts/1"
DELETE FROM fencing_tokens WHERE resource = char(1) || ?
  -- with "accounts/2"

-- a check by hand of token 33 for the second resource: refused, so nothing is remembered
INSERT INTO fencing_tokens (resource) VALUES (?)
ON CONFLICT (resource) DO UPDATE SET checks = checks + 1
  -- with "accounts/2"
SELECT state, checks FROM fencing_tokens WHERE resource = ?
  -- with "accounts/2"
SELECT state FROM fencing_tokens WHERE resource = ''

-- accept etcd-2 from token 5 on
SELECT state FROM fencing_tokens WHERE resource = ''
INSERT INTO fencing_tokens (resource, state) VALUES ('', ?)
ON CONFLICT (resource) DO UPDATE SET state = excluded.state
  -- with "2 0c9e7c3bd7fd44d5b1b3a0d1c3e2f405 1 5 =etcd-2"

-- clean
SELECT state FROM fencing_tokens WHERE resource = ''
DELETE FROM fencing_tokens WHERE resource <> '' AND state <> '' AND (CAST(state AS INTEGER) < ?
OR substr(state, instr(state, ' '), 3) = ' 0 ' AND CAST(substr(state, instr(state, ' ') + 3) AS INTEGER) < ?)
  -- with 0, 0
