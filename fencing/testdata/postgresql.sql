CREATE TABLE IF NOT EXISTS fencing_tokens (
	resource text   PRIMARY KEY,            -- '' holds the guard's terms: its epoch, space, and floor (token)
	epoch    bigint NOT NULL DEFAULT 0,
	token    bigint NOT NULL DEFAULT 0 CHECK (token >= 0),
	sequence bigint NOT NULL DEFAULT 0,
	checks   bigint NOT NULL DEFAULT 0,
	space    text   NOT NULL DEFAULT ''
)

-- a section with two claims, the first of all: token 33 in its 7th write, and token 34
INSERT INTO fencing_tokens AS seen (resource) VALUES ($1)
ON CONFLICT (resource) DO UPDATE SET checks = seen.checks + 1
  -- with "accounts/1"
SELECT epoch, token, sequence, checks FROM fencing_tokens WHERE resource = $1
  -- with "accounts/1"
INSERT INTO fencing_tokens AS seen (resource) VALUES ($1)
ON CONFLICT (resource) DO UPDATE SET checks = seen.checks + 1
  -- with "accounts/2"
SELECT epoch, token, sequence, checks FROM fencing_tokens WHERE resource = $1
  -- with "accounts/2"
SELECT epoch, space, token FROM fencing_tokens WHERE resource = ''
INSERT INTO fencing_tokens (resource, space) VALUES ('', $1) ON CONFLICT (resource) DO NOTHING
  -- with "etcd-1"
SELECT epoch, space, token FROM fencing_tokens WHERE resource = ''
UPDATE fencing_tokens SET epoch = $1, token = $2, sequence = $3 WHERE resource = $4
  -- with 0, 33, 7, "accounts/1"
UPDATE fencing_tokens SET epoch = $1, token = $2, sequence = $3 WHERE resource = $4
  -- with 0, 34, 0, "accounts/2"

-- a check by hand of token 33 for the second resource: refused, so nothing is remembered
INSERT INTO fencing_tokens AS seen (resource) VALUES ($1)
ON CONFLICT (resource) DO UPDATE SET checks = seen.checks + 1
  -- with "accounts/2"
SELECT epoch, token, sequence, checks FROM fencing_tokens WHERE resource = $1
  -- with "accounts/2"
SELECT epoch, space, token FROM fencing_tokens WHERE resource = ''

-- accept etcd-2 from token 5 on
LOCK TABLE fencing_tokens IN EXCLUSIVE MODE
SELECT epoch, space, token FROM fencing_tokens WHERE resource = ''
INSERT INTO fencing_tokens (resource, epoch, space, token) VALUES ('', $1, $2, $3)
ON CONFLICT (resource) DO UPDATE SET epoch = excluded.epoch, space = excluded.space, token = excluded.token
  -- with 1, "etcd-2", 5

-- clean
SELECT epoch, space, token FROM fencing_tokens WHERE resource = ''
DELETE FROM fencing_tokens WHERE resource <> '' AND (epoch < $1 OR token < $2)
  -- with 0, 0
