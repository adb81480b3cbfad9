//go:build unix

package main

import (
	"flag"
	"io"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/deep"
)

// What the command line of guard asks for is understood or refused before anything is done.
func TestGuardCommandLine(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		good bool
	}{
		{[]string{"show", "accounts/42"}, true},
		{[]string{"raise", "100"}, true},
		{[]string{"accept", "etcd-1"}, true},
		{[]string{"install"}, true},
		{nil, false},
		{[]string{"show", "a", "b"}, false},
		{[]string{"raise"}, false},
		{[]string{"raise", "many"}, false},
		{[]string{"accept"}, false},
		{[]string{"accept", ""}, false},
		{[]string{"lower", "1"}, false},
	} {
		for _, store := range []string{"", "redis://127.0.0.1:1"} {
			s := &guardSettings{store: store, floor: "0"}
			f := flag.NewFlagSet("guard", flag.ContinueOnError)
			f.SetOutput(io.Discard)
			do, err := s.parseGuard(f, c.args)
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
			deep.NotShort(t)
			return "mysql://root@" + containers.MariaDB(t).Addr() + "/test?timeout=10s"
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store := start(t)
			guard := func(want string, args ...string) {
				t.Helper()
				p := startGuard(t, append(args, "--store", store)...)
				if got := p.output(); got != want {
					t.Errorf("guard %q prints\n%s\nwant\n%s", args, got, want)
				}
				p.expectExit(exitOK)
			}
			if name == "mysql" {
				guard("", "install")
			}
			guard("space  etcd%2F1\nfloor  7\nepoch  1", "accept", "etcd/1", "--floor", "7")
			guard("forgot 0 resources\nspace  etcd%2F1\nfloor  9\nepoch  1", "raise", "9", "--clean")
			guard("space  etcd%2F1\nfloor  9\nepoch  1\ntoken  0\nwrite  0", "show", "accounts/42")
			p := startGuard(t, "raise", "8", "--store", store)
			p.expectExit(exitUnavailable, "the present one, 9, is higher")
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
	startGuard(t, "install", "--print", "oracle").expectExit(exitUsage, "--print postgres, mysql or s3")
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
