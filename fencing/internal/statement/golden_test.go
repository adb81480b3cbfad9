package statement

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/golden"
)

// recorder is a database that writes down what it is told. It knows the resource b, and no terms until they are set.
type recorder struct {
	out    *strings.Builder
	pinned bool
}

func (r *recorder) say(query string, args []any) {
	fmt.Fprintf(r.out, "%s", query)
	for i, arg := range args {
		fmt.Fprintf(r.out, "%s%#v", map[bool]string{true: "\n  -- with ", false: ", "}[i == 0], arg)
	}
	r.out.WriteString("\n")
}

func (r *recorder) Exec(_ context.Context, query string, args ...any) (int64, error) {
	r.say(query, args)
	r.pinned = r.pinned || len(args) == 1 && args[0] == "etcd-1"
	return 1, nil
}

func (r *recorder) Row(_ context.Context, query string, args []any, into ...any) (bool, error) {
	r.say(query, args)
	switch {
	case len(args) == 0: // the terms
		if r.pinned {
			*into[1].(*string) = "etcd-1"
		}
		return r.pinned, nil
	case len(into) == 1: // the view
		*into[0].(*int64) = 0
	case args[0] == "accounts/2" && r.pinned:
		*into[1].(*int64) = 34
	}
	return true, nil
}

func TestGolden(t *testing.T) {
	for name, s := range map[string]Set{
		"postgresql": PostgreSQL(DefaultTable), "mysql": MySQL(DefaultTable), "sqlite": SQLite(DefaultTable),
	} {
		t.Run(name, func(t *testing.T) {
			var b strings.Builder
			r := &recorder{out: &b}
			title := func(text string) { fmt.Fprintf(&b, "\n-- %s\n", text) }
			b.WriteString(s.Schema + "\n")
			a := fencing.Claim{Resource: "accounts/1", Token: 33, Space: "etcd-1", Sequence: 7}
			c := fencing.Claim{Resource: "accounts/2", Token: 34, Space: "etcd-1"}
			check := func(db Conn, claims []fencing.Claim, first bool) error {
				return s.Check(t.Context(), db, claims, first)
			}
			title("a section with two claims, the first of all: token 33 in its 7th write, and token 34")
			if err := check(r, []fencing.Claim{a, c}, true); err != nil {
				t.Error(err)
			}
			if s.End != "" {
				title("before the commit of a section")
				b.WriteString(s.End + "\n")
			}
			title("a check by hand of token 33 for the second resource: refused, so nothing is remembered")
			if err := check(
				r, []fencing.Claim{{Resource: "accounts/2", Token: 33, Space: "etcd-1"}}, false,
			); !errors.Is(err, fencing.ErrStale) {
				t.Error(err)
			}
			title("accept etcd-2 from token 5 on")
			if err := s.Change(
				t.Context(), r, func(t fencing.Terms) (fencing.Terms, error) { return t.Accept("etcd-2", 5) },
			); err != nil {
				t.Error(err)
			}
			title("clean")
			if _, err := s.Sweep(t.Context(), r); err != nil {
				t.Error(err)
			}
			golden.Compare(t, name+".sql", b.String())
		})
	}
}
