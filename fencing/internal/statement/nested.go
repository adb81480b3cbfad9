package statement

import (
	"context"
	"reflect"
)

// sectionKey marks the context of a section; the value is its *link.
type sectionKey struct{}

// link is one of the sections around a context.
type link struct {
	db    any
	table string
	outer *link
}

// Inside returns the context of a section of the database and table, and reports whether ctx is that of another one, at
// any depth: the inner section would wait for the outer one's locks.
func Inside(ctx context.Context, db any, table string) (_ context.Context, nested bool) {
	outer, _ := ctx.Value(sectionKey{}).(*link)
	for l := outer; l != nil; l = l.outer {
		if l.table == table && same(l.db, db) {
			return ctx, true
		}
	}
	return context.WithValue(ctx, sectionKey{}, &link{db: db, table: table, outer: outer}), false
}

func same(a, b any) bool {
	return reflect.TypeOf(a) == reflect.TypeOf(b) && reflect.ValueOf(a).Comparable() && a == b
}
