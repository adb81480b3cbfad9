CREATE TABLE IF NOT EXISTS fencing_tokens (
	resource TEXT    NOT NULL PRIMARY KEY,  -- '' holds the guard's terms: its epoch, space, and floor (token)
	epoch    INTEGER NOT NULL DEFAULT 0,
	token    INTEGER NOT NULL DEFAULT 0 CHECK (token >= 0),
	sequence INTEGER NOT NULL DEFAULT 0,
	checks   INTEGER NOT NULL DEFAULT 0,
	space    TEXT    NOT NULL DEFAULT ''
)

-- a section with two claims, the first of all: token 33 in its 7th write, and token 34
INSERT INTO fencing_tokens (resource) VALUES (?)
ON CONFLICT (resource) DO UPDATE SET checks = checks + 1
  -- with "accounts/1"
SELECT epoch, token, sequence, checks FROM fencing_tokens WHERE resource = ?
  -- with "accounts/1"
INSERT INTO fencing_tokens (resource) VALUES (?)
ON CONFLICT (resource) DO UPDATE SET checks = checks + 1
  -- with "accounts/2"
SELECT epoch, token, sequence, checks FROM fencing_tokens WHERE resource = ?
  -- with "accounts/2"
SELECT epoch, space, token FROM fencing_tokens WHERE resource = ''
INSERT INTO fencing_tokens (resource, space) VALUES ('', ?) ON CONFLICT (resource) DO NOTHING
  -- with "etcd-1"
SELECT epoch, space, token FROM fencing_tokens WHERE resource = ''
UPDATE fencing_tokens SET epoch = ?, token = ?, sequence = ? WHERE resource = ?
  -- with 0, 33, 7, "accounts/1"
UPDATE fencing_tokens SET epoch = ?, token = ?, sequence = ? WHERE resource = ?
  -- with 0, 34, 0, "accounts/2"

-- a check by hand of token 33 for the second resource: refused, so nothing is remembered
INSERT INTO fencing_tokens (resource) VALUES (?)
ON CONFLICT (resource) DO UPDATE SET checks = checks + 1
  -- with "accounts/2"
SELECT epoch, token, sequence, checks FROM fencing_tokens WHERE resource = ?
  -- with "accounts/2"
SELECT epoch, space, token FROM fencing_tokens WHERE resource = ''

-- accept etcd-2 from token 5 on
SELECT epoch, space, token FROM fencing_tokens WHERE resource = ''
INSERT INTO fencing_tokens (resource, epoch, space, token) VALUES ('', ?, ?, ?)
ON CONFLICT (resource) DO UPDATE SET epoch = excluded.epoch, space = excluded.space, token = excluded.token
  -- with 1, "etcd-2", 5

-- clean
SELECT epoch, space, token FROM fencing_tokens WHERE resource = ''
DELETE FROM fencing_tokens WHERE resource <> '' AND (epoch < ? OR token < ?)
  -- with 0, 0
