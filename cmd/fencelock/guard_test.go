//go:build unix

package main

import (
	"database/sql"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/fencing/sqlguard"
	"github.com/fencelock/fencelock/internal/testtier"
)

// guard checks its command line before it does anything.
func TestGuardCommandLine(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		good bool
	}{
		{[]string{"check"}, true},
		{[]string{"check", "a", "b"}, true},
		{[]string{"show", "accounts/42"}, true},
		{[]string{"raise", "100"}, true},
		{[]string{"accept", "etcd-1"}, true},
		{[]string{"install"}, true},
		{[]string{"enforce", "--check"}, true},
		{[]string{"enforce", "--check", "a", "b"}, true},
		{[]string{"enforce"}, false},
		{[]string{"migrate"}, true},
		{[]string{"migrate", "now"}, false},
		{nil, false},
		{[]string{"show", "a", "b"}, false},
		{[]string{"raise"}, false},
		{[]string{"raise", "many"}, false},
		{[]string{"accept"}, false},
		{[]string{"accept", ""}, false},
		{[]string{"lower", "1"}, false},
	} {
		for _, store := range []string{"", "redis://127.0.0.1:1"} {
			args, check := slices.Clone(c.args), slices.Contains(c.args, "--check")
			s := &guardSettings{store: store, floor: "0", check: check}
			do, err := s.parseGuard(slices.DeleteFunc(args, func(arg string) bool { return arg == "--check" }))
			if good := c.good && store != ""; (err == nil) != good || (do != nil) != good {
				t.Errorf("guard %q with the store %q: %v, want it understood: %v", c.args, store, err, good)
			}
		}
	}
}

// On real stores the words of guard do what they say.
func TestGuardOnStores(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(t *testing.T) string{
		"redis": func(t *testing.T) string { return "redis://" + containers.Redis(t).Addr() },
		"mysql": func(t *testing.T) string {
			testtier.NotShort(t)
			return "mysql://root@" + containers.MariaDB(t).Addr() + "/test?timeout=10s"
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store := start(t)
			guard := func(want string, args ...string) {
				t.Helper()
				p := startGuard(t, append(args, "--store", store)...)
				got := regexp.MustCompile(`^id +[0-9a-f]*`).ReplaceAllString(p.output(), "id")
				if got = regexp.MustCompile(`\nid +[0-9a-f]*`).ReplaceAllString(got, "\nid"); got != want {
					t.Errorf("guard %q prints\n%s\nwant\n%s", args, got, want)
				}
				p.expectExit(exitOK)
			}
			startGuard(t, "show", "--store", store).expectExit(exitUnavailable, "fencelock guard install")
			guard("id\nspace  \nfloor  0\nepoch  0", "install")
			if name == "mysql" {
				guard("", "enforce", "--check") // there is no other table
			}
			guard("id\nspace  \nfloor  0\nepoch  0", "migrate")
			guard("id\nspace  etcd%2F1\nfloor  7\nepoch  1", "accept", "etcd/1", "--floor", "7")
			guard("forgot 0 resources\nid\nspace  etcd%2F1\nfloor  9\nepoch  1", "raise", "9", "--clean")
			guard("id\nspace  etcd%2F1\nfloor  9\nepoch  1\ntoken  0\nwrite  0\ngeneration  0\nnonce  ", "show", "accounts/42")
			p := startGuard(t, "raise", "8", "--store", store)
			p.expectExit(exitUsage, "the present one, 9, is higher")
		})
	}
}

func startGuard(t *testing.T, args ...string) *program {
	return start(t, append([]string{"guard"}, args...)...)
}

func TestGuardInstallPrints(t *testing.T) {
	for _, c := range []struct {
		args  []string
		parts []string
	}{
		{[]string{"postgres"}, []string{"CREATE TABLE IF NOT EXISTS fencing_tokens (", ";"}},
		{
			[]string{"postgres", "--protect", "a", "--resource", "'a/' || row.id", "--table", "s.t"},
			[]string{"s.t", "'a/' || NEW.id", "CREATE TRIGGER fencing"},
		},
		{
			[]string{"mysql", "--protect", "a", "--resource", "CONCAT('a/', row.id)"},
			[]string{"DELIMITER //", "CONCAT('a/', OLD.id)", "END//", "DELIMITER ;"},
		},
		{
			[]string{"sqlite", "--protect", "a", "--resource", "'a/' || row.id"},
			[]string{"CREATE TABLE IF NOT EXISTS fencing_tokens (", "'a/' || NEW.id", "END;"},
		},
		{
			[]string{"s3", "--protect", "state/guarded/"},
			[]string{`"s3:if-match": "true"`, `"arn:aws:s3:::state/guarded/*"`},
		},
	} {
		p := startGuard(t, append([]string{"install", "--print"}, c.args...)...)
		got := p.output()
		p.expectExit(exitOK)
		for _, part := range c.parts {
			if !strings.Contains(got, part) {
				t.Errorf("install --print %q has no %q:\n%s", c.args, part, got)
			}
		}
	}
}

// What install cannot print is a mistake of the command line.
func TestGuardInstallKnowsWhatItPrints(t *testing.T) {
	startGuard(t, "install", "--print", "oracle").expectExit(exitUsage, "--print postgres, mysql, sqlite or s3")
	startGuard(t, "install", "--print", "s3").expectExit(exitUsage, "want BUCKET")
}

func TestMySQLAddress(t *testing.T) {
	for text, good := range map[string]bool{
		"mysql://u:p%40ss@db/test":         true,
		"mysql://u@db:3307/test?tls=false": true,
		"mysql://u@db":                     false,
		"mysql:///test":                    false,
		"mysql://u@db/test?timeout=long":   false,
	} {
		db, err := openMySQL(text)
		if (err == nil) != good {
			t.Errorf("%s: %v, want it read: %v", text, err, good)
		}
		if db != nil {
			db.Close()
		}
	}
}

// In a PostgreSQL database guard finds the table that postgres migrate makes.
func TestGuardOnPostgres(t *testing.T) {
	t.Parallel()
	testtier.NotShort(t)
	store := containers.Postgres(t).URL()
	p := start(t, "postgres", "migrate", "--backend", store)
	p.output()
	p.expectExit(exitOK)
	for _, word := range []string{"install", "show"} {
		p := startGuard(t, word, "--store", store)
		if got := p.output(); !strings.Contains(got, "floor  0\nepoch  0") {
			t.Errorf("guard %s prints\n%s", word, got)
		}
		p.expectExit(exitOK)
	}
	p = startGuard(t, "install", "--store", store, "--table", "public.fencing_tokens")
	p.output()
	p.expectExit(exitUsage, "second memory")

	db, err := sql.Open("pgx", store)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	text, err := sqlguard.Enforce(sqlguard.PostgreSQL, "accounts", "'a/' || row.id", "fencelock.fencing_tokens")
	if err != nil {
		t.Fatal(err)
	}
	for _, query := range append([]string{`CREATE TABLE orders (id int)`, `CREATE TABLE accounts (id int)`}, text...) {
		if _, err := db.ExecContext(t.Context(), query); err != nil {
			t.Fatalf("%s: %v", query, err)
		}
	}
	for _, c := range []struct {
		tables []string
		want   string
		exit   int
	}{
		{nil, "covered    public.accounts\nuncovered  public.orders: it has no trigger", exitUncovered},
		{[]string{"accounts"}, "covered    public.accounts", exitOK},
	} {
		p := startGuard(t, append([]string{"enforce", "--check", "--store", store}, c.tables...)...)
		if got := p.output(); got != c.want {
			t.Errorf("enforce --check %q prints\n%s\nwant\n%s", c.tables, got, c.want)
		}
		p.expectExit(c.exit)
	}
	p = startGuard(t, "enforce", "--check", "--store", "redis://127.0.0.1:1")
	p.output()
	p.expectExit(exitUsage, "only SQL has triggers")
}

// A step of a script that runs on after its lock was lost is refused, whatever it does in between.
func TestGuardCheckRefusesAStaleScript(t *testing.T) {
	t.Parallel()
	url, store := startServer(t), "redis://"+containers.Redis(t).Addr()
	startGuard(t, "install", "--store", store).expectExit(exitOK)
	startGuard(t, "check", "--store", store).expectExit(exitUsage, "FENCELOCK_CLAIMS")
	check := "env " + asProgram + "=1 " + executable(t) + " guard check --store " + store
	script := func(steps string, options ...string) *program {
		args := append([]string{"run", "--backend", url, "--tier", "correctness", "--name", "x"}, options...)
		return start(t, append(args, "--", "sh", "-c", steps)...)
	}
	// The first holder leaves its claims where a step finds them that does not know of the loss.
	claims := filepath.Join(t.TempDir(), "claims")
	script(check + " && " + check + " accounts/42 && echo \"$FENCELOCK_NAME\" \"$FENCELOCK_CLAIMS\" >" + claims).expectExit(exitOK)
	text, err := os.ReadFile(claims)
	if err != nil {
		t.Fatal(err)
	}
	script(check + " && " + check + " accounts/42").expectExit(exitOK)
	_, claim, _ := strings.Cut(strings.TrimSpace(string(text)), " ")
	stale := "FENCELOCK_CLAIMS='" + claim + "' " + check
	p := script(stale + "; echo code $?; " + stale + " accounts/42; echo code $?; " + stale + " accounts/43")
	p.await("code 1")
	p.await("code 1")
	p.expectExit(exitOK, "is stale: ")
	script(check+" a b", "--name", "a", "--name", "b").expectExit(exitOK)
	script(check+" a c", "--name", "a", "--name", "b").expectExit(exitRefused, "no token")
}
