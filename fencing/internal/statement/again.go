package statement

import (
	"context"
	"errors"
	"math/rand/v2"
	"reflect"
	"time"
)

// Attempts bounds the tries of a guarded section before the caller gets the database's refusal.
const Attempts = 20

// Again reports whether the database rolled back, or will if asked, for internal reasons, so that the same
// transaction may be retried: serialization failures, deadlocks, waits for a lock that took too long, a busy file.
// It knows the errors of the usual drivers by their methods and fields, and links no driver.
func Again(err error) bool {
	for _, each := range chain(err) {
		if e, ok := each.(interface{ SQLState() string }); ok { // pgx, lib/pq
			return postgres[e.SQLState()]
		}
		if e, ok := each.(interface{ Code() int }); ok { // modernc.org/sqlite
			return sqlite(int64(e.Code()))
		}
		v := reflect.Indirect(reflect.ValueOf(each))
		if v.Kind() != reflect.Struct {
			continue
		}
		if number := v.FieldByName("Number"); number.IsValid() && number.CanUint() { // go-sql-driver/mysql
			return mysql[number.Uint()]
		}
		if code := v.FieldByName("ExtendedCode"); code.IsValid() && code.CanInt() { // mattn/go-sqlite3
			return sqlite(code.Int())
		}
	}
	return false
}

// chain returns the error and all errors that it wraps.
func chain(err error) []error {
	switch e := err.(type) {
	case nil:
		return nil
	case interface{ Unwrap() []error }:
		all := []error{err}
		for _, each := range e.Unwrap() {
			all = append(all, chain(each)...)
		}
		return all
	}
	return append([]error{err}, chain(errors.Unwrap(err))...)
}

var (
	postgres = map[string]bool{
		"40001": true, // serialization_failure
		"40P01": true, // deadlock_detected
		"55P03": true, // lock_not_available: lock_timeout
	}
	mysql = map[uint64]bool{
		1020: true, // ER_CHECKREAD: MariaDB's innodb_snapshot_isolation
		1205: true, // ER_LOCK_WAIT_TIMEOUT
		1213: true, // ER_LOCK_DEADLOCK
	}
)

// sqlite reports whether code is SQLITE_BUSY, SQLITE_LOCKED, or one of their extended codes.
func sqlite(code int64) bool { return code&0xff == 5 || code&0xff == 6 }

// Pause waits before the nth repetition, about 2 ms, doubling to 256 ms, or until ctx ends, and reports whether it has
// not.
func Pause(ctx context.Context, n int) bool {
	d := 2 * time.Millisecond << min(n, 7)
	timer := time.NewTimer(d/2 + rand.N(d))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
