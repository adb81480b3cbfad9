// Package sqlguard guards data in PostgreSQL, MySQL, MariaDB or SQLite, reached through database/sql. The check
// and the write are one transaction, so both happen or neither does, even after a crash between the two.
//
//	guard, err := sqlguard.New(db, sqlguard.PostgreSQL, nil) // its table: guard.Create
//
//	err = locks.Do(ctx, "accounts/42", func(ctx context.Context, lease *fencelock.Lease) error {
//		return guard.Tx(ctx, lease.Claim("accounts/42"), func(ctx context.Context, tx *sql.Tx) error {
//			_, err := tx.ExecContext(ctx, `UPDATE accounts SET …`)
//			return err
//		})
//	}) // errors.Is(err, fencing.ErrStale): another client holds the lock, and the write did not happen
//
// Tx shows the claim before any read, at an isolation level at which later reads see the current data, repeats the
// section after a deadlock or a serialization failure, and rolls back if it fails.
//
// # Libraries on top of database/sql
//
// They take the transaction that Tx gives. The package examples/lockers/recipes runs each of these:
//
//	sqlx:      (&sqlx.Tx{Tx: tx, Mapper: db.Mapper}).GetContext(ctx, &a, db.Rebind(query), id), and for named parameters
//	           query, args, err := sqlx.Named(query, a); tx.ExecContext(ctx, db.Rebind(query), args...)
//	gorm:      gorm.Open(postgres.New(postgres.Config{Conn: tx}), &gorm.Config{SkipDefaultTransaction: true})
//	bun:       db.NewUpdate().Conn(tx)
//	squirrel:  builder.RunWith(tx)
//	ent:       ent.NewClient(ent.Driver(entsql.NewDriver(dialect.Postgres, entsql.Conn{ExecQuerier: tx})))
//
// Or they begin the transaction, and In shows the claim in it: In(tx) of a *sqlx.Tx, and within gorm's db.Transaction
// In(tx.Statement.ConnPool.(sqlguard.Tx)).
//
// # Requirements
//
// One small row for each resource, in a separate table, made by Create or the statements of Schema before the first
// check. Only Clean may delete rows: a guard that forgets admits a stale writer. Options.ID names the table, so that a
// table that was dropped and recreated is refused. Transactions on one resource wait for each other from the check to
// the commit, so keep them short.
//
// A PostgreSQL database has one such table, which all guards find: two would be two memories. Its connections
// use the encoding UTF8 (client_encoding), unless resources are ASCII.
//
// The statements for MySQL use the common part of MySQL 5.7 to 9 and MariaDB, and are tested on MariaDB. SQLite takes
// version 3.24 and a busy timeout.
//
// A commit is as durable as the database: a failover to a replica that had not received it forgets the token, together
// with the write.
package sqlguard
