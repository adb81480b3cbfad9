DROP TRIGGER IF EXISTS accounts_fencing_insert

CREATE TRIGGER accounts_fencing_insert AFTER INSERT ON accounts FOR EACH ROW
WHEN NOT EXISTS (SELECT 1 FROM fencing_tokens WHERE resource = char(1) || ('accounts/' || NEW.id))
BEGIN SELECT RAISE(ABORT, 'fencing: this transaction has shown no claim for the row of accounts'); END

DROP TRIGGER IF EXISTS accounts_fencing_update

CREATE TRIGGER accounts_fencing_update AFTER UPDATE ON accounts FOR EACH ROW
WHEN NOT EXISTS (SELECT 1 FROM fencing_tokens WHERE resource = char(1) || ('accounts/' || OLD.id))
	OR NOT EXISTS (SELECT 1 FROM fencing_tokens WHERE resource = char(1) || ('accounts/' || NEW.id))
BEGIN SELECT RAISE(ABORT, 'fencing: this transaction has shown no claim for the row of accounts'); END

DROP TRIGGER IF EXISTS accounts_fencing_delete

CREATE TRIGGER accounts_fencing_delete AFTER DELETE ON accounts FOR EACH ROW
WHEN NOT EXISTS (SELECT 1 FROM fencing_tokens WHERE resource = char(1) || ('accounts/' || OLD.id))
BEGIN SELECT RAISE(ABORT, 'fencing: this transaction has shown no claim for the row of accounts'); END
