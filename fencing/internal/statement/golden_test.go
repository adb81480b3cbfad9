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

// recorder is a database that records its statements. It knows the resource b, and no space until it is set.
type recorder struct {
	out   *strings.Builder
	terms string
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
	if len(args) == 2 && args[1] == r.terms {
		r.terms = args[0].(string)
	}
	return 1, nil
}

func (r *recorder) Row(_ context.Context, query string, args []any, into ...any) (bool, error) {
	r.say(query, args)
	switch {
	case strings.HasPrefix(query, "SELECT count(*), "): // there is no such table in another schema
	case len(args) == 0:
		*into[0].(*string) = r.terms
	case len(into) == 1: // the view, or the end
		*into[0].(*int64) = 1
	case args[0] == "accounts/2" && strings.HasSuffix(r.terms, "=etcd-1"):
		*into[0].(*string), *into[1].(*int64) = "0 0 34 - 0", 1
	default:
		*into[1].(*int64) = 1
	}
	return true, nil
}

func TestGolden(t *testing.T) {
	for name, s := range map[string]Set{
		"postgresql": PostgreSQL(DefaultTable), "mysql": MySQL(DefaultTable), "sqlite": SQLite(DefaultTable),
	} {
		t.Run(name, func(t *testing.T) {
			var b strings.Builder
			r := &recorder{out: &b, terms: "2 0c9e7c3bd7fd44d5b1b3a0d1c3e2f405 0 0 -"}
			title := func(text string) { fmt.Fprintf(&b, "\n-- %s\n", text) }
			b.WriteString(strings.Join(s.Schema, ";\n\n") + "\n")
			id, err := fencing.ParseNonce("5a2f19fbb6b44c5f8f7b1d3c9a0e6f21")
			if err != nil {
				t.Fatal(err)
			}
			a := fencing.Claim{Resource: "accounts/1", Token: 33, Space: "etcd-1", Sequence: 7}
			c := fencing.Claim{
				Resource: "accounts/2", Token: 34, Space: "etcd-1", Generation: fencing.Generation{Number: 1, ID: id}, Nonce: id,
			}
			check := func(db Conn, claims []fencing.Claim, first bool) error {
				section, err := s.Check(t.Context(), db, claims, first)
				if err == nil {
					err = section.Begin(t.Context(), db)
				}
				if err == nil {
					title("at the end of the section")
					err = section.Verify(t.Context(), db)
				}
				return err
			}
			title("a section with two claims, the first of all: token 33 in its 7th write, and token 34 of a generation")
			if err := check(r, []fencing.Claim{a, c}, true); err != nil {
				t.Error(err)
			}
			if s.End != "" {
				title("after the commit of a section")
				b.WriteString(s.End + "\n")
			}
			title("a check by hand of token 33 for the second resource: refused, so nothing is remembered")
			if err := check(
				r, []fencing.Claim{{Resource: "accounts/2", Token: 33, Space: "etcd-1"}}, false,
			); !errors.Is(err, fencing.ErrStale) {
				t.Error(err)
			}
			title("accept etcd-2 from token 5 on")
			if err := s.Accept(t.Context(), r, "etcd-2", 5); err != nil {
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
