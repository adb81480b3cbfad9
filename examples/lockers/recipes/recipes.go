// Package recipes are guarded sections with libraries on top of database/sql. Each takes 10 from an account, and writes
// nothing if the claim is refused. Copy what you need: the comment of package sqlguard names them.
package recipes

import (
	"context"
	"database/sql"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"
	"github.com/Masterminds/squirrel"
	"github.com/jmoiron/sqlx"
	"github.com/uptrace/bun"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

// Account is a row of the table accounts.
type Account struct {
	ID      int `db:"id" bun:",pk"`
	Balance int `db:"balance"`
}

// Sqlx reads into a struct, and writes with named parameters. A sqlx.Tx made of the guard's transaction does not know
// the driver's name, so Named and Rebind are called apart.
func Sqlx(ctx context.Context, guard *sqlguard.Guard, db *sqlx.DB, claim fencing.Claim, id int) error {
	return guard.Tx(ctx, claim, func(ctx context.Context, tx *sql.Tx) error {
		var a Account
		xtx := &sqlx.Tx{Tx: tx, Mapper: db.Mapper}
		if err := xtx.GetContext(ctx, &a, db.Rebind(`SELECT id, balance FROM accounts WHERE id = ?`), id); err != nil {
			return err
		}
		a.Balance -= 10
		query, args, err := sqlx.Named(`UPDATE accounts SET balance = :balance WHERE id = :id`, a)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, db.Rebind(query), args...)
		return err
	})
}

// SqlxTx begins the transaction with sqlx, so that all methods of sqlx.Tx work, and shows the claim in it.
func SqlxTx(ctx context.Context, guard *sqlguard.Guard, db *sqlx.DB, claim fencing.Claim, id int) error {
	tx, err := db.BeginTxx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return err
	}
	defer tx.Rollback() //nolint:errcheck // after a commit it does nothing
	in := guard.In(tx)
	if err := in.Check(ctx, claim); err != nil {
		return err
	}
	const update = `UPDATE accounts SET balance = balance - 10 WHERE id = :id`
	if _, err := tx.NamedExecContext(ctx, update, map[string]any{"id": id}); err != nil {
		return err
	}
	if err := in.Verify(ctx); err != nil {
		return err
	}
	return tx.Commit()
}

// Gorm opens a gorm.DB on the guard's transaction. It takes no connection.
func Gorm(ctx context.Context, guard *sqlguard.Guard, claim fencing.Claim, id int) error {
	return guard.Tx(ctx, claim, func(ctx context.Context, tx *sql.Tx) error {
		db, err := gorm.Open(postgres.New(postgres.Config{Conn: tx}), &gorm.Config{SkipDefaultTransaction: true})
		if err != nil {
			return err
		}
		return db.WithContext(ctx).Model(&Account{}).Where("id = ?", id).
			Update("balance", gorm.Expr("balance - ?", 10)).Error
	})
}

// GormTx shows the claim in a transaction that gorm has begun. Only the commit follows Verify.
func GormTx(ctx context.Context, guard *sqlguard.Guard, db *gorm.DB, claim fencing.Claim, id int) error {
	return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		in := guard.In(tx.Statement.ConnPool.(sqlguard.Tx))
		if err := in.Check(ctx, claim); err != nil {
			return err
		}
		err := tx.Model(&Account{}).Where("id = ?", id).Update("balance", gorm.Expr("balance - ?", 10)).Error
		if err != nil {
			return err
		}
		return in.Verify(ctx)
	}, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
}

// Bun builds its queries with the bun.DB, and executes them in the guard's transaction.
func Bun(ctx context.Context, guard *sqlguard.Guard, db *bun.DB, claim fencing.Claim, id int) error {
	return guard.Tx(ctx, claim, func(ctx context.Context, tx *sql.Tx) error {
		_, err := db.NewUpdate().Conn(tx).Model((*Account)(nil)).
			Set("balance = balance - ?", 10).Where("id = ?", id).Exec(ctx)
		return err
	})
}

// Squirrel executes its statements with RunWith.
func Squirrel(ctx context.Context, guard *sqlguard.Guard, claim fencing.Claim, id int) error {
	build := squirrel.StatementBuilder.PlaceholderFormat(squirrel.Dollar)
	return guard.Tx(ctx, claim, func(ctx context.Context, tx *sql.Tx) error {
		_, err := build.Update("accounts").Set("balance", squirrel.Expr("balance - ?", 10)).
			Where(squirrel.Eq{"id": id}).RunWith(tx).ExecContext(ctx)
		return err
	})
}

// Ent makes a driver of the guard's transaction; a generated client takes it as ent.Driver(driver).
func Ent(ctx context.Context, guard *sqlguard.Guard, claim fencing.Claim, id int) error {
	return guard.Tx(ctx, claim, func(ctx context.Context, tx *sql.Tx) error {
		driver := entsql.NewDriver(dialect.Postgres, entsql.Conn{ExecQuerier: tx})
		query, args := entsql.Dialect(dialect.Postgres).Update("accounts").
			Add("balance", -10).Where(entsql.EQ("id", id)).Query()
		return driver.Exec(ctx, query, args, nil)
	})
}
