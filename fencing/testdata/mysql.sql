CREATE TABLE IF NOT EXISTS fencing_tokens (
	resource VARBINARY(512) NOT NULL PRIMARY KEY, -- '' holds the guard's terms
	state    VARBINARY(512) NOT NULL DEFAULT '',  -- see docs/FENCING-SPEC.md
	checks   BIGINT UNSIGNED NOT NULL DEFAULT 0
) ENGINE=InnoDB;

INSERT INTO fencing_tokens (resource, state)
SELECT '', CONCAT('2 ', MD5(CONCAT(UUID(), RAND())), ' 0 0 -') FROM DUAL WHERE NOT EXISTS (SELECT 1 FROM fencing_tokens)
ON DUPLICATE KEY UPDATE checks = fencing_tokens.checks

-- a section with two claims, the first of all: token 33 in its 7th write, and token 34 of a generation
INSERT INTO fencing_tokens (resource) VALUES (?) ON DUPLICATE KEY UPDATE resource = resource
  -- with "accounts/1"
SELECT state, checks FROM fencing_tokens WHERE resource = ? FOR UPDATE
  -- with "accounts/1"
INSERT INTO fencing_tokens (resource) VALUES (?) ON DUPLICATE KEY UPDATE resource = resource
  -- with "accounts/2"
SELECT state, checks FROM fencing_tokens WHERE resource = ? FOR UPDATE
  -- with "accounts/2"
SELECT state FROM fencing_tokens WHERE resource = '' LOCK IN SHARE MODE
UPDATE fencing_tokens SET state = ? WHERE resource = '' AND state = ?
  -- with "2 0c9e7c3bd7fd44d5b1b3a0d1c3e2f405 0 0 =etcd-1", "2 0c9e7c3bd7fd44d5b1b3a0d1c3e2f405 0 0 -"
SELECT state FROM fencing_tokens WHERE resource = '' LOCK IN SHARE MODE
UPDATE fencing_tokens SET state = ?, checks = checks + 1 WHERE resource = ?
  -- with "0 0 33 - 7", "accounts/1"
UPDATE fencing_tokens SET state = ?, checks = checks + 1 WHERE resource = ?
  -- with "0 1.5a2f19fbb6b44c5f8f7b1d3c9a0e6f21 34 5a2f19fbb6b44c5f8f7b1d3c9a0e6f21 0", "accounts/2"
SAVEPOINT fencing_section

-- at the end of the section
RELEASE SAVEPOINT fencing_section

-- after the commit of a section
SET @fencing_mark = NULL

-- a check by hand of token 33 for the second resource: refused, so nothing is remembered
INSERT INTO fencing_tokens (resource) VALUES (?) ON DUPLICATE KEY UPDATE resource = resource
  -- with "accounts/2"
SELECT checks FROM fencing_tokens WHERE resource = ?
  -- with "accounts/2"
SELECT state, checks FROM fencing_tokens WHERE resource = ? FOR UPDATE
  -- with "accounts/2"
SELECT state FROM fencing_tokens WHERE resource = '' LOCK IN SHARE MODE

-- accept etcd-2 from token 5 on
SELECT state FROM fencing_tokens WHERE resource = '' FOR UPDATE
SELECT state FROM fencing_tokens WHERE resource = '' LOCK IN SHARE MODE
INSERT INTO fencing_tokens (resource, state) VALUES ('', ?) ON DUPLICATE KEY UPDATE state = VALUES(state)
  -- with "2 0c9e7c3bd7fd44d5b1b3a0d1c3e2f405 1 5 =etcd-2"

-- clean
SELECT state FROM fencing_tokens WHERE resource = '' LOCK IN SHARE MODE
DELETE FROM fencing_tokens WHERE resource <> '' AND state <> ''
AND (CAST(SUBSTRING_INDEX(state, ' ', 1) AS UNSIGNED) < ? OR SUBSTRING_INDEX(SUBSTRING_INDEX(state, ' ', 2), ' ', -1) = '0'
	AND CAST(SUBSTRING_INDEX(SUBSTRING_INDEX(state, ' ', 3), ' ', -1) AS UNSIGNED) < ?)
  -- with 0, 0
