// Package sqlguard guards what is kept in PostgreSQL, MySQL, MariaDB or SQLite, reached through database/sql. The check
// and the write are one transaction, so both happen or neither does, whatever crashes between the two.
//
//	guard, err := sqlguard.New(db, sqlguard.PostgreSQL, nil) // its table: guard.Schema()
//
//	err = locks.Do(ctx, "accounts/42", func(ctx context.Context, lease *fencelock.Lease) error {
//		return guard.Tx(ctx, lease.Claim("accounts/42"), func(ctx context.Context, tx *sql.Tx) error {
//			_, err := tx.ExecContext(ctx, `UPDATE accounts SET …`)
//			return err
//		})
//	}) // errors.Is(err, fencing.ErrStale): somebody else holds the lock by now, and nothing was written
//
// Tx shows the claim before anything is read, at a level of isolation at which the reads that follow see the present,
// does the same again where the database gives up for reasons of its own, and rolls back whatever it does not commit.
//
// # Libraries on top of database/sql
//
// They take the transaction that Tx gives:
//
//	sqlx:  tx := &sqlx.Tx{Tx: tx, Mapper: db.Mapper}
//	gorm:  tx, err := gorm.Open(postgres.New(postgres.Config{Conn: tx}), &gorm.Config{SkipDefaultTransaction: true})
//	ent:   tx := ent.NewClient(ent.Driver(entsql.NewDriver(dialect.Postgres, entsql.Conn{ExecQuerier: tx})))
//	bun:   bun.Tx{Tx: tx} of a bun.DB; squirrel: RunWith(tx)
//
// # What it takes
//
// One small row for each resource, in a table of its own, which nothing deletes but Clean: a guard that forgets admits
// a stale writer. Transactions on one resource wait for each other from the check to the commit, so keep them short. In
// PostgreSQL name the table with its schema (Options.Table) if search_path is not the same for all: with two tables
// there are two memories.
//
// The statements for MySQL use what MySQL 5.7 to 9 and MariaDB share, and are tested on MariaDB. SQLite takes version
// 3.24 and a busy timeout.
//
// What was committed is as durable as the database is set up to be: a failover to a replica that had not heard of a
// commit forgets the token, together with the write that it came with.
package sqlguard
