CREATE TABLE IF NOT EXISTS fencing_tokens (
	resource VARBINARY(512)   NOT NULL PRIMARY KEY, -- '' holds the guard's terms: its epoch, space, and floor (token)
	epoch    BIGINT UNSIGNED NOT NULL DEFAULT 0,
	token    BIGINT UNSIGNED NOT NULL DEFAULT 0,
	sequence BIGINT UNSIGNED NOT NULL DEFAULT 0,
	checks   BIGINT UNSIGNED NOT NULL DEFAULT 0,
	space    VARBINARY(255)   NOT NULL DEFAULT ''
) ENGINE=InnoDB

-- a section with two claims, the first of all: token 33 in its 7th write, and token 34
INSERT INTO fencing_tokens (resource) VALUES (?) ON DUPLICATE KEY UPDATE resource = resource
  -- with "accounts/1"
SELECT epoch, token, sequence, checks FROM fencing_tokens WHERE resource = ? FOR UPDATE
  -- with "accounts/1"
INSERT INTO fencing_tokens (resource) VALUES (?) ON DUPLICATE KEY UPDATE resource = resource
  -- with "accounts/2"
SELECT epoch, token, sequence, checks FROM fencing_tokens WHERE resource = ? FOR UPDATE
  -- with "accounts/2"
SELECT epoch, space, token FROM fencing_tokens WHERE resource = '' LOCK IN SHARE MODE
INSERT INTO fencing_tokens (resource, space) VALUES ('', ?) ON DUPLICATE KEY UPDATE resource = resource
  -- with "etcd-1"
SELECT epoch, space, token FROM fencing_tokens WHERE resource = '' LOCK IN SHARE MODE
UPDATE fencing_tokens SET epoch = ?, token = ?, sequence = ?, checks = checks + 1 WHERE resource = ?
  -- with 0, 33, 7, "accounts/1"
UPDATE fencing_tokens SET epoch = ?, token = ?, sequence = ?, checks = checks + 1 WHERE resource = ?
  -- with 0, 34, 0, "accounts/2"

-- before the commit of a section
SET @fencing_mark = NULL

-- a check by hand of token 33 for the second resource: refused, so nothing is remembered
INSERT INTO fencing_tokens (resource) VALUES (?) ON DUPLICATE KEY UPDATE resource = resource
  -- with "accounts/2"
SELECT checks FROM fencing_tokens WHERE resource = ?
  -- with "accounts/2"
SELECT epoch, token, sequence, checks FROM fencing_tokens WHERE resource = ? FOR UPDATE
  -- with "accounts/2"
SELECT epoch, space, token FROM fencing_tokens WHERE resource = '' LOCK IN SHARE MODE

-- accept etcd-2 from token 5 on
SELECT epoch, space, token FROM fencing_tokens WHERE resource = '' FOR UPDATE
SELECT epoch, space, token FROM fencing_tokens WHERE resource = '' LOCK IN SHARE MODE
REPLACE INTO fencing_tokens (resource, epoch, space, token) VALUES ('', ?, ?, ?)
  -- with 1, "etcd-2", 5

-- clean
SELECT epoch, space, token FROM fencing_tokens WHERE resource = '' LOCK IN SHARE MODE
DELETE FROM fencing_tokens WHERE resource <> '' AND (epoch < ? OR token < ?)
  -- with 0, 0
