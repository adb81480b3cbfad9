CREATE TABLE IF NOT EXISTS fencing_tokens_shown (
	resource VARBINARY(512) NOT NULL PRIMARY KEY,
	mark     VARBINARY(36)  NOT NULL
) ENGINE=InnoDB

DROP TRIGGER IF EXISTS fencing_tokens_shown

CREATE TRIGGER fencing_tokens_shown AFTER UPDATE ON fencing_tokens FOR EACH ROW
BEGIN
	IF NEW.resource <> '' AND NEW.checks <> OLD.checks THEN
		SET @fencing_mark = COALESCE(@fencing_mark, UUID());
		INSERT INTO fencing_tokens_shown (resource, mark) VALUES (NEW.resource, @fencing_mark) ON DUPLICATE KEY UPDATE mark = @fencing_mark;
	END IF;
END

DROP PROCEDURE IF EXISTS fencing_tokens_require

CREATE PROCEDURE fencing_tokens_require(IN wanted VARBINARY(4096))
BEGIN
	DECLARE shown VARBINARY(36);
	DECLARE missing VARCHAR(128) CHARACTER SET utf8mb4;
	SELECT MAX(mark) INTO shown FROM fencing_tokens_shown WHERE resource = wanted LOCK IN SHARE MODE;
	IF shown IS NULL OR @fencing_mark IS NULL OR shown <> @fencing_mark THEN
		SET missing = LEFT(CONCAT('fencing: this transaction has shown no claim for ', COALESCE(CONVERT(wanted USING utf8mb4), 'NULL')), 128);
		SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = missing;
	END IF;
END

DROP TRIGGER IF EXISTS accounts_fencing_insert

CREATE TRIGGER accounts_fencing_insert AFTER INSERT ON accounts FOR EACH ROW CALL fencing_tokens_require(CONVERT(CONCAT('accounts/', NEW.id) USING utf8mb4))

DROP TRIGGER IF EXISTS accounts_fencing_update

CREATE TRIGGER accounts_fencing_update AFTER UPDATE ON accounts FOR EACH ROW
BEGIN
	CALL fencing_tokens_require(CONVERT(CONCAT('accounts/', OLD.id) USING utf8mb4));
	CALL fencing_tokens_require(CONVERT(CONCAT('accounts/', NEW.id) USING utf8mb4));
END

DROP TRIGGER IF EXISTS accounts_fencing_delete

CREATE TRIGGER accounts_fencing_delete AFTER DELETE ON accounts FOR EACH ROW CALL fencing_tokens_require(CONVERT(CONCAT('accounts/', OLD.id) USING utf8mb4))
